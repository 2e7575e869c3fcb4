"""List an image's packages, from Debian's and Alpine's databases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from images.build.tree import FileContent, FileTree
from vmjobs.errors import BuildError

_MAX_FILE: Final = 64 * 1024 * 1024


def package_versions(tree: FileTree) -> dict[str, str]:
    """Names and versions of installed packages; empty if there is no known database."""
    found: dict[str, str] = {}
    for content in _files(tree, "var/lib/dpkg/status", "var/lib/dpkg/status.d/"):
        for fields in _paragraphs(content, ": "):
            state = fields.get("Status", "install ok installed")
            if state.endswith(" installed") and "Package" in fields and "Version" in fields:
                found[fields["Package"]] = fields["Version"]
    for content in _files(tree, "lib/apk/db/installed"):
        for fields in _paragraphs(content, ":"):
            if "P" in fields and "V" in fields:
                found[fields["P"]] = fields["V"]
    return dict(sorted(found.items()))


def _files(tree: FileTree, *paths: str) -> Iterator[FileContent]:
    for path in paths:
        # Images without a package manager have a file for each package.
        inside = [p for p in tree.nodes if p.startswith(path)] if path.endswith("/") else [path]
        for name in inside:
            try:
                content = tree.file(name)
            except BuildError:
                continue
            if 0 < content.size <= _MAX_FILE and not name.endswith(".md5sums"):
                yield content


def _paragraphs(content: FileContent, separator: str) -> Iterator[dict[str, str]]:
    for paragraph in content.read().decode("utf-8", "replace").split("\n\n"):
        lines = (line.partition(separator) for line in paragraph.splitlines())
        yield {key: value for key, mark, value in lines if mark and key[:1] > " "}
