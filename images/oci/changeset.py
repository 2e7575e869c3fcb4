"""Apply a container image's layer to a tree: files, links, devices, and whiteouts.

Nothing is unpacked: the tree has names, owners, and offsets of the bytes in the archive. So no name in
a layer is ever used as a path on the host.
"""

from __future__ import annotations

import stat
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from images.build.tree import FileContent, FileNode, FileTree
from images.oci.layers import UnpackBudget
from vmjobs.errors import BuildError, ImageRejected

_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"
_META: Final = ".wh..wh."
_ATTRIBUTE: Final = "SCHILY.xattr."
#: Extended attributes that are the same on every host; others are labels of the host.
_KEPT_ATTRIBUTES: Final = ("user.", "security.capability")
_MAX_PATH: Final = 4096
_MAX_ID: Final = 2**32 - 2
_MAX_TIME: Final = 2**34 - 1
#: Larger extended headers (long names, attributes) are refused, in bytes.
_MAX_HEADER: Final = 1 << 20
_MAX_PIECES: Final = 1 << 17


class _LimitedTarInfo(tarfile.TarInfo):
    """Reads extended headers up to a limit, so that they do not fill the memory."""

    def _proc_member(self, archive: Any) -> Any:
        extended = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type in (*extended, *(b"L", b"K")) and self.size > _MAX_HEADER:
            raise ImageRejected(f"a layer has a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]

    def _proc_gnusparse_10(self, following: Any, headers: Any, archive: Any) -> None:
        place = archive.fileobj.tell()
        count = archive.fileobj.read(16).partition(b"\n")[0]
        archive.fileobj.seek(place)
        if not count.isdigit() or int(count) > _MAX_PIECES:
            raise ImageRejected("a layer has a sparse file with an invalid map")
        super()._proc_gnusparse_10(following, headers, archive)  # type: ignore[misc]


def apply_layer(tree: FileTree, archive: Path, budget: UnpackBudget) -> None:
    """Apply the layer in this (uncompressed) tar archive to ``tree``.

    Raises:
        ImageRejected: the archive is damaged, or has names outside the image.
    """
    try:
        with tarfile.open(archive, "r:", tarinfo=_LimitedTarInfo) as tar:
            layer = _Layer(tree, archive, budget)
            members = list(_members(tar, budget))
            for path, _ in members:
                layer.apply_whiteout(path)
            for path, member in members:
                layer.add(path, member)
            layer.record_nodes()
    except tarfile.TarError as error:
        if archive.stat().st_size == 0:
            return
        raise ImageRejected(f"a layer is no tar archive, or a damaged one: {error}") from error
    except BuildError as error:
        raise ImageRejected(str(error)) from error


def _members(tar: tarfile.TarFile, budget: UnpackBudget) -> Iterator[tuple[str, tarfile.TarInfo]]:
    for member in tar:
        budget.spend(entries=1)
        # The archive keeps its entries too, and they are the only large thing in it.
        yield normalized_path(member.name), member


def normalized_path(name: str) -> str:
    """An entry's normalized path, relative to the root; ``""`` for the root.

    Raises:
        ImageRejected: the path is outside the image, too long, or has a NUL.
    """
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if ".." in parts or (name.startswith("/") and parts):
        raise ImageRejected(f"a layer has an entry outside the image: {name!r}")
    if len(name) > _MAX_PATH or any(len(p.encode("utf-8", "surrogateescape")) > 255 for p in parts):
        raise ImageRejected(f"a layer has an entry with too long a name: {name[:80]!r}…")
    if "\0" in name:
        raise ImageRejected(f"a layer has an entry with a NUL byte in its name: {name!r}")
    return "/".join(parts)


class _Layer:
    """A layer that is being applied. children: names by directory, of the tree and the layer."""

    def __init__(self, tree: FileTree, archive: Path, budget: UnpackBudget) -> None:
        self._tree = tree
        self._archive = archive
        self._size = archive.stat().st_size
        self._budget = budget
        self._added: dict[str, FileNode] = {}
        self._children: dict[str, set[str]] = defaultdict(set)
        for path in tree.nodes:
            if path:
                folder, _, name = path.rpartition("/")
                self._children[folder].add(name)

    # ------------------------------------------------------------------ whiteouts

    def apply_whiteout(self, path: str) -> None:
        """Apply a whiteout, before all entries of the layer: it affects only lower layers."""
        folder, _, name = path.rpartition("/")
        if not name.startswith(_WHITEOUT):
            return
        if name == _OPAQUE:
            folder = self._tree.resolve_parent(f"{folder}/x").rpartition("/")[0]
            for child in list(self._children.get(folder, ())):
                self._remove(f"{folder}/{child}".lstrip("/"))
        elif not name.startswith(_META):
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in {"", ".", ".."}:
                raise ImageRejected(f"a layer has a whiteout of nothing: {path!r}")
            self._remove(self._tree.resolve_parent(f"{folder}/{hidden}"))

    def _remove(self, path: str) -> None:
        """Remove a path and all below it."""
        left = [path]
        while left:
            here = left.pop()
            if self._tree.nodes.pop(here, None) is not None:
                left += [f"{here}/{name}" for name in self._children.pop(here, ())]
        folder, _, name = path.rpartition("/")
        self._children[folder].discard(name)

    # ------------------------------------------------------------------ entries

    def add(self, path: str, member: tarfile.TarInfo) -> None:
        if path.rpartition("/")[2].startswith(_WHITEOUT):
            return
        if not path and not member.isdir():
            raise ImageRejected("the root of a layer is not a directory")
        path = self._tree.resolve_parent(path) if path else path
        self._make_parents(path)
        there = self._tree.nodes.get(path)
        if member.islnk():
            self._put(path, self._hard_link_node(path, member.linkname))
            return
        node = self._node(path, member)
        if there is not None and there.is_dir and node.is_dir:
            # Keep the directory and its contents, update its metadata.
            there.mode, there.uid, there.gid = node.mode, node.uid, node.gid
            there.mtime, there.xattrs = node.mtime, node.xattrs
            return
        self._put(path, node)

    def record_nodes(self) -> None:
        """Record the nodes of this layer, in an order that depends only on names."""
        ordered = (self._added[path] for path in sorted(self._added, key=lambda p: p.split("/")))
        self._tree.layers.append(list({id(node): node for node in ordered}.values()))

    def _put(self, path: str, node: FileNode) -> None:
        if path in self._tree.nodes:
            self._remove(path)
        self._tree.nodes[path] = self._added[path] = node
        folder, _, name = path.rpartition("/")
        self._children[folder].add(name)

    def _make_parents(self, path: str) -> None:
        parts = path.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            parent = "/".join(parts[:depth])
            node = self._tree.nodes.get(parent)
            if node is None:
                self._budget.spend(entries=1)
                self._put(parent, FileNode(stat.S_IFDIR | 0o755, mtime=0))
            elif not node.is_dir:
                raise ImageRejected(f"a layer has the entry {path!r}, but {parent!r} is no directory")

    def _hard_link_node(self, path: str, target: str) -> FileNode:
        """The node that a hard link shares."""
        first = self._tree.resolve_parent(normalized_path(target.lstrip("/")))
        node = self._tree.nodes.get(first)
        if node is None or node.is_dir:
            raise ImageRejected(f"a layer has a hard link {path!r} to {target!r}, which is no file")
        return node

    def _node(self, path: str, member: tarfile.TarInfo) -> FileNode:
        if not (0 <= member.uid <= _MAX_ID and 0 <= member.gid <= _MAX_ID):
            raise ImageRejected(f"{path!r} has an invalid owner: {member.uid}:{member.gid}")
        node = FileNode(
            member.mode & 0o7777,
            member.uid,
            member.gid,
            mtime=min(max(int(member.mtime), 0), _MAX_TIME),
            xattrs=_attributes(member),
        )
        if member.isdir():
            node.mode |= stat.S_IFDIR
        elif member.issym():
            node.mode = stat.S_IFLNK | 0o777
            node.target = member.linkname
            if not node.target or "\0" in node.target or len(node.target) >= _MAX_PATH:
                raise ImageRejected(f"{path!r} is a symbolic link with an invalid target")
        elif member.isreg() and member.type in (*tarfile.REGULAR_TYPES, tarfile.GNUTYPE_SPARSE):
            node.mode |= stat.S_IFREG
            node.content = self._content(path, member)
        elif member.isfifo():
            node.mode |= stat.S_IFIFO
        elif member.ischr() or member.isblk():
            node.mode |= stat.S_IFCHR if member.ischr() else stat.S_IFBLK
            node.device = (member.devmajor, member.devminor)
            if not (0 <= member.devmajor < 1 << 12 and 0 <= member.devminor < 1 << 20):
                raise ImageRejected(f"{path!r} is a device with invalid numbers")
        else:
            raise ImageRejected(f"{path!r} is an entry of an unknown kind: {member.type!r}")
        return node

    def _content(self, path: str, member: tarfile.TarInfo) -> FileContent:
        pieces = None
        stored = member.size
        listed = getattr(member, "sparse", None)
        if listed is not None:
            self._budget.spend(size=member.size)
            pieces = tuple((begin, length) for begin, length in listed if length)
            stored = sum(length for _, length in pieces)
            ends = [0, *(begin + length for begin, length in pieces)]
            begins = [*(begin for begin, _ in pieces), member.size]
            if any(begin < end for begin, end in zip(begins, ends, strict=True)):
                raise ImageRejected(f"{path!r} is a sparse file with an invalid map")
        if member.size < 0 or member.offset_data + stored > self._size:
            raise ImageRejected(f"a layer ends in the middle of {path!r}")
        return FileContent(member.size, file=self._archive, offset=member.offset_data, pieces=pieces)


def _attributes(member: tarfile.TarInfo) -> dict[str, bytes]:
    found = {}
    for key, value in member.pax_headers.items():
        name = key.removeprefix(_ATTRIBUTE)
        if name != key and name.startswith(_KEPT_ATTRIBUTES):
            found[name] = value.encode("utf-8", "surrogateescape")
    return found
