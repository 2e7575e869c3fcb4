"""A file tree in memory: names and modes, with references to the contents on disk.

Both disk formats that a build writes (ext4 and cpio) are made from a :class:`FileTree`. Nothing is
unpacked, so ownership needs no root, and no time stamps of the host get into the image.
"""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from vmjobs.errors import BuildError, reason_of

_CHUNK: Final = 1 << 20


@dataclass(frozen=True)
class FileContent:
    """Bytes of a file: in memory, or a range of another file on disk.

    pieces: of a sparse file, its data: pairs of offset and length. These bytes are contiguous in
    ``file``; everything else is zeros.
    """

    size: int
    data: bytes = b""
    file: Path | None = None
    offset: int = 0
    pieces: tuple[tuple[int, int], ...] | None = None

    def chunks(self, opened: dict[Path, BinaryIO]) -> Iterator[bytes]:
        """The bytes, in order; ``opened`` keeps files open between calls."""
        if self.file is None:
            if self.data:
                yield self.data
            return
        if self.file not in opened:
            opened[self.file] = self.file.open("rb")
        source = opened[self.file]
        if self.pieces is None:
            yield from self._range(source, self.offset, self.size)
            return
        done, place = 0, self.offset
        for begin, length in self.pieces:
            yield from _zeros(begin - done)
            yield from self._range(source, place, length)
            done, place = begin + length, place + length
        yield from _zeros(self.size - done)

    def _range(self, source: BinaryIO, offset: int, size: int) -> Iterator[bytes]:
        source.seek(offset)
        left = size
        while left:
            piece = source.read(min(left, _CHUNK))
            if not piece:
                raise BuildError(f"{self.file} ends {left} bytes before it should")
            left -= len(piece)
            yield piece

    def read(self) -> bytes:
        """All of the bytes at once."""
        opened: dict[Path, BinaryIO] = {}
        try:
            return b"".join(self.chunks(opened))
        finally:
            for file in opened.values():
                file.close()


def _zeros(count: int) -> Iterator[bytes]:
    while count > 0:
        yield bytes(min(count, _CHUNK))
        count -= _CHUNK


def in_memory(data: bytes) -> FileContent:
    """Content that consists of ``data``."""
    return FileContent(len(data), data)


@dataclass
class FileNode:
    """An inode: a regular file, a directory, a symbolic link, a device or a FIFO.

    mode: type and permission bits, as in ``st_mode``. target: of a symbolic link. mtime: seconds
    since 1970; ``None``: the disk's default. device: major and minor number. xattrs: extended
    attributes by their full names.
    """

    mode: int
    uid: int = 0
    gid: int = 0
    content: FileContent = field(default_factory=lambda: in_memory(b""))
    target: str = ""
    mtime: int | None = None
    device: tuple[int, int] = (0, 0)
    xattrs: dict[str, bytes] = field(default_factory=dict)

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.mode)


class FileTree:
    """Paths (relative, without a leading ``./``) and their nodes; hard links share a node.

    layers: for each layer of the tree a list of its nodes in the order for a disk, including those that
    a later layer replaced. So disks of trees with the same first layers begin with the same bytes.
    Nodes in no layer come last.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, FileNode] = {"": FileNode(stat.S_IFDIR | 0o755)}
        self.layers: list[list[FileNode]] = []

    def add(self, path: str, node: FileNode) -> None:
        """Put ``node`` at ``path``, replacing any other, and make missing parents.

        Symbolic links among the parents are followed (``sbin`` is one in a merged /usr).
        """
        path = self.resolve_parent(path)
        for parent in reversed(PurePosixPath(path).parents):
            name = "" if str(parent) == "." else str(parent)
            self.nodes.setdefault(name, FileNode(stat.S_IFDIR | 0o755))
        self.nodes[path] = node

    def add_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Put a small file owned by root at ``path``."""
        self.add(path, FileNode(stat.S_IFREG | mode, content=in_memory(data)))

    def add_dir(self, path: str, mode: int = 0o755) -> None:
        """Add a directory at ``path``, unless there is a node already."""
        path = self.resolve_parent(path)
        if path not in self.nodes:
            self.add(path, FileNode(stat.S_IFDIR | mode))

    def add_link(self, path: str, target: str) -> None:
        """Put a symbolic link to ``target`` at ``path``."""
        self.add(path, FileNode(stat.S_IFLNK | 0o777, target=target))

    def resolve_parent(self, path: str) -> str:
        """``path`` with symbolic links among its parent directories followed."""
        done: tuple[str, ...] = ()
        parts = list(PurePosixPath(path.strip("/")).parts)
        hops = 0
        while len(parts) > 1:
            done = (*done, parts.pop(0))
            node = self.nodes.get("/".join(done))
            if node is not None and node.is_link:
                hops += 1
                if hops > 40:
                    raise BuildError(f"{path}: too many symbolic links, probably a cycle")
                base = () if node.target.startswith("/") else done[:-1]
                parts = [*_normalized(base, node.target), *parts]
                done = ()
        return "/".join((*done, *parts))

    def remove(self, keep: Callable[[str, FileNode], bool]) -> None:
        """Remove every path (except the root) for which ``keep`` is false, and all below it."""
        gone: set[str] = set()
        for path in sorted(self.nodes):
            parent = path.rpartition("/")[0]
            if path and (parent in gone or not keep(path, self.nodes[path])):
                gone.add(path)
        for path in gone:
            del self.nodes[path]

    def walk(self) -> Iterator[tuple[str, FileNode]]:
        """Yield every path with its node, parents first, in an order that depends only on names."""
        for path in sorted(self.nodes, key=lambda p: p.split("/")):
            yield path, self.nodes[path]

    def file(self, path: str) -> FileContent:
        """Content of the regular file at ``path``, symbolic links followed.

        Raises:
            BuildError: there is no such file.
        """
        here = path
        for _ in range(40):
            here = self.resolve_parent(here)
            node = self.nodes.get(here)
            if node is None or node.is_dir:
                break
            if not node.is_link:
                return node.content
            parent = () if node.target.startswith("/") else PurePosixPath(here).parts[:-1]
            here = "/".join(_normalized(parent, node.target))
        raise BuildError(f"the image has no file /{path}")


def _normalized(base: tuple[str, ...], target: str) -> tuple[str, ...]:
    parts = list(base)
    for part in PurePosixPath(target).parts:
        if part == "..":
            parts = parts[:-1]
        elif part not in {"/", "."}:
            parts.append(part)
    return tuple(parts)


def from_tar(file: Path) -> FileTree:
    """Index an uncompressed tar archive. Device nodes and sockets are left out.

    Raises:
        BuildError: the archive cannot be read.
    """
    tree = FileTree()
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                _add_member(tree, member, file)
    except (OSError, tarfile.TarError) as error:
        raise BuildError(f"cannot read {file}: {reason_of(error)}") from error
    return tree


def _add_member(tree: FileTree, member: tarfile.TarInfo, file: Path) -> None:
    path = member.name.removeprefix("./").strip("/")
    if path in {"", "."}:
        return
    bits, owner = member.mode & 0o7777, (member.uid, member.gid)
    if member.isdir():
        tree.nodes[path] = FileNode(stat.S_IFDIR | bits, *owner)
    elif member.issym():
        tree.nodes[path] = FileNode(stat.S_IFLNK | 0o777, *owner, target=member.linkname)
    elif member.islnk():
        first = tree.nodes.get(member.linkname.removeprefix("./").strip("/"))
        if first is None:
            raise BuildError(f"{path}: a hard link to {member.linkname}, which does not exist")
        tree.nodes[path] = first
    elif member.isreg():
        content = FileContent(member.size, file=file, offset=member.offset_data)
        tree.nodes[path] = FileNode(stat.S_IFREG | bits, *owner, content=content)


def check_destination(tree: FileTree, path: str) -> None:
    """Raise BuildError if a file would replace a directory, or if a parent is no directory."""
    place = tree.resolve_parent(path)
    here = tree.nodes.get(place)
    if not place or (here is not None and here.is_dir):
        raise BuildError(f"the file {path} is a directory in the image")
    for parent in PurePosixPath(place).parents:
        node = tree.nodes.get("" if str(parent) == "." else str(parent))
        if node is not None and not node.is_dir:
            raise BuildError(f"the file {path} is below /{parent}, which is not a directory")
