"""Checks all file names that come from outside.

A name must be a plain relative path; other names are refused with the reason and never repaired.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

MAX_LENGTH = 255
MAX_DEPTH = 16


def check_path(name: str) -> str:
    """Why ``name`` is not a safe path below a directory; ``""`` if it is."""
    parts = name.split("/")
    found = (
        (not name, "the name is empty"),
        (len(name.encode("utf-8", "surrogatepass")) > MAX_LENGTH, f"over {MAX_LENGTH} bytes long"),
        ("\\" in name or not name.isprintable(), "a backslash, or bytes that are not printable UTF-8"),
        (name.startswith("/"), "the path is absolute"),
        (".." in parts, "the path leaves its directory by '..'"),
        ("" in parts or "." in parts, "the path is not in its plain form"),
        (len(parts) > MAX_DEPTH, f"the path is deeper than {MAX_DEPTH} levels"),
    )
    return next((why for is_it, why in found if is_it), "")


def safe_join(directory: Path, name: str) -> Path:
    """Join ``directory`` and the untrusted ``name``.

    Raises:
        ValueError: the name is not a safe path; the text says why.
    """
    why = check_path(name)
    if why:
        raise ValueError(why)
    return directory / PurePosixPath(name)


def matches_glob(name: str, glob: str) -> bool:
    """Whether an output's name matches a glob, by the rules of a POSIX shell.

    ``*`` and ``?`` do not cross a ``/``; a leading dot must be matched explicitly.
    """
    names, globs = name.split("/"), glob.removeprefix("./").split("/")
    if len(names) != len(globs):
        return False
    return all(
        fnmatchcase(part, pattern) and (not part.startswith(".") or pattern.startswith("."))
        for part, pattern in zip(names, globs, strict=True)
    )
