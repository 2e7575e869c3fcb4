"""Write a file tree as an ext4 image, straight to a plain file.

``mke2fs -d`` copies ownership and change times from a directory on the host, so it needs root (or
a fake of it) and its result differs from run to run and from one e2fsprogs to the next. This
writer takes everything from the tree: the same tree gives the same bytes on every host, with no
rights at all. The result is what ``mke2fs -O none,extent,filetype,sparse_super,...`` would make:
no journal and no checksums, since a root disk is only ever booted through a copy-on-write overlay.

Layout: groups of 128 MiB, each with its own bitmaps and inode table; contents lie in the order of
the tree's walk, contiguous but for the groups' own blocks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from images.build.tree import Node, Tree
from vmjobs.errors import BuildError

BLOCK: Final = 4096
PER_GROUP: Final = 8 * BLOCK
INODE_SIZE: Final = 256
FIRST_INODE: Final = 11
ROOT_INODE: Final = 2
_DESCRIPTOR: Final = 32
_MAX_EXTENT: Final = 32768
_COMPAT: Final = 0x8 | 0x20  # ext_attr, dir_index
_INCOMPAT: Final = 0x2 | 0x40  # filetype, extents
_RO_COMPAT: Final = 0x1 | 0x2 | 0x20 | 0x40  # sparse_super, large_file, dir_nlink, extra_isize
_EXTENTS_FLAG: Final = 0x80000
_FAST_LINK: Final = 60
_INLINE_EXTENTS: Final = 4
_LEAF_EXTENTS: Final = (BLOCK - 12) // 12


@dataclass
class _Inode:
    number: int
    node: Node
    links: int = 0
    entries: list[tuple[bytes, _Inode]] = field(default_factory=list)
    parent: _Inode | None = None
    data: bytes | None = None
    size: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    leaf: int = 0

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK) if not self.fast_link else 0

    @property
    def fast_link(self) -> bool:
        return self.node.is_link and self.size < _FAST_LINK


class _Geometry:
    """Where the groups' own blocks are, for ``blocks`` blocks and ``inodes`` inodes at least."""

    def __init__(self, inodes: int, content: int) -> None:
        groups = 1
        while True:
            per_group = min(-(-inodes // groups // 16) * 16 + 16, PER_GROUP)
            self.inodes_per_group = per_group
            self.table = per_group * INODE_SIZE // BLOCK
            self.descriptors = -(-groups * _DESCRIPTOR // BLOCK)
            self.groups = groups
            overhead = sum(self.overhead(g) for g in range(groups))
            blocks = content + overhead
            # A last group that cannot hold its own tables would be no group at all.
            least = (groups - 1) * PER_GROUP + self.overhead(groups - 1) + 64
            if blocks <= groups * PER_GROUP and per_group * groups >= inodes:
                self.blocks = max(blocks, least)
                return
            groups += 1

    def has_super(self, group: int) -> bool:
        """Sparse superblock copies: groups 0 and 1 and the powers of 3, 5 and 7."""
        if group <= 1:
            return True
        for base in (3, 5, 7):
            power = base
            while power < group:
                power *= base
            if power == group:
                return True
        return False

    def heading(self, group: int) -> int:
        """Blocks for the superblock's copy and the group descriptors."""
        return 1 + self.descriptors if self.has_super(group) else 0

    def overhead(self, group: int) -> int:
        """Blocks of the group that are not for contents."""
        return self.heading(group) + 2 + self.table

    def bitmap(self, group: int) -> int:
        """First of the two bitmap blocks; the inode table follows them."""
        return group * PER_GROUP + self.heading(group)

    def end(self, group: int) -> int:
        """First block behind the group."""
        return min((group + 1) * PER_GROUP, self.blocks)


class _Allocator:
    """Hands out content blocks from the front."""

    def __init__(self, geometry: _Geometry) -> None:
        self.geometry = geometry
        self.group = 0
        self.next = geometry.overhead(0)

    def take(self, count: int) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        while count:
            if self.next >= self.geometry.end(self.group):
                self.group += 1
                if self.group >= self.geometry.groups:
                    raise BuildError("the root disk is too small for its contents")
                self.next = self.group * PER_GROUP + self.geometry.overhead(self.group)
                continue
            length = min(count, self.geometry.end(self.group) - self.next, _MAX_EXTENT)
            runs.append((self.next, length))
            self.next += length
            count -= length
        return runs


def write(tree: Tree, file: Path, *, slack: int, epoch: int, seed: bytes, label: str = "") -> None:
    """Write ``tree`` to ``file`` (sparse).

    slack: free bytes to leave. epoch: every time stamp, seconds since 1970. seed: the UUID is
    derived from it.

    Raises:
        BuildError: a file is too large or its source cannot be read.
    """
    inodes = _number(tree)
    content = sum(i.blocks + (1 if i.blocks > PER_GROUP else 0) for i in inodes)
    spare = 1024 + slack // (64 * 1024)
    geometry = _Geometry(FIRST_INODE + len(inodes) + spare, content + -(-slack // BLOCK))
    allocator = _Allocator(geometry)
    with ExitStack() as stack:
        target = stack.enter_context(file.open("wb"))
        target.truncate(geometry.blocks * BLOCK)
        opened: dict[Path, BinaryIO] = {}
        stack.callback(lambda: [source.close() for source in opened.values()])
        for inode in inodes:
            _place(inode, allocator)
            _write_content(inode, target, opened)
            _write_inode(inode, geometry, target, epoch)
        _write_groups(geometry, allocator, inodes, target, epoch, seed, label)


def _number(tree: Tree) -> list[_Inode]:
    """Give every node a number, link directories, and build the directories' bytes."""
    numbered: dict[int, _Inode] = {}
    by_path: dict[str, _Inode] = {}
    following = FIRST_INODE
    tree.add_dir("lost+found", 0o700)
    for path, node in tree.walk():
        inode = numbered.get(id(node))
        if inode is None:
            number = ROOT_INODE if path == "" else FIRST_INODE if path == "lost+found" else 0
            if number == 0:
                following += 1
                number = following
            inode = numbered[id(node)] = _Inode(number, node)
        by_path[path] = inode
        if path:
            folder, _, name = path.rpartition("/")
            parent = by_path[folder]
            parent.entries.append((name.encode("utf-8", "surrogateescape"), inode))
            inode.links += 1
            inode.parent = parent
    for inode in numbered.values():
        if inode.node.is_dir:
            below = sum(child.node.is_dir for _, child in inode.entries)
            inode.links = 2 + below
            inode.data = _directory(inode)
            inode.size = len(inode.data)
        elif inode.node.is_link:
            inode.data = inode.node.target.encode("utf-8", "surrogateescape")
            inode.size = len(inode.data)
        else:
            inode.size = inode.node.content.size
    return sorted(numbered.values(), key=lambda inode: inode.number)


def _directory(inode: _Inode) -> bytes:
    """A linear directory: entries do not cross blocks, the last one fills its block."""
    entries = [(b".", inode), (b"..", inode.parent or inode), *inode.entries]
    blocks: list[list[tuple[bytes, _Inode]]] = [[]]
    used = 0
    for name, child in entries:
        need = 8 + -(-len(name) // 4) * 4
        if used + need > BLOCK:
            blocks.append([])
            used = 0
        blocks[-1].append((name, child))
        used += need
    return b"".join(_directory_block(block) for block in blocks)


def _directory_block(entries: list[tuple[bytes, _Inode]]) -> bytes:
    out = bytearray()
    for place, (name, child) in enumerate(entries):
        length = 8 + -(-len(name) // 4) * 4
        if place == len(entries) - 1:
            length = BLOCK - len(out)
        kind = 2 if child.node.is_dir else 7 if child.node.is_link else 1
        head = struct.pack("<IHBB", child.number, length, len(name), kind)
        out += (head + name).ljust(length, b"\0")
    return bytes(out)


def _place(inode: _Inode, allocator: _Allocator) -> None:
    inode.runs = allocator.take(inode.blocks)
    if len(inode.runs) > _INLINE_EXTENTS:
        if len(inode.runs) > _LEAF_EXTENTS:
            raise BuildError(f"a file of {inode.size} bytes is too large for a root disk")
        inode.leaf = allocator.take(1)[0][0]


def _write_content(inode: _Inode, target: BinaryIO, opened: dict[Path, BinaryIO]) -> None:
    if not inode.runs:
        return
    pieces = iter([inode.data]) if inode.data is not None else inode.node.content.chunks(opened)
    left = b""
    for start, length in inode.runs:
        target.seek(start * BLOCK)
        room = length * BLOCK
        while room:
            if not left:
                left = next(pieces, b"")
                if not left:
                    break
            target.write(left[:room])
            left, room = left[room:], max(room - len(left), 0)
    if inode.leaf:
        target.seek(inode.leaf * BLOCK)
        target.write(_extents(inode.runs, _LEAF_EXTENTS))


def _extents(runs: list[tuple[int, int]], most: int) -> bytes:
    out = struct.pack("<HHHHI", 0xF30A, len(runs), most, 0, 0)
    logical = 0
    for start, length in runs:
        out += struct.pack("<IHHI", logical, length, start >> 32, start & 0xFFFFFFFF)
        logical += length
    return out


def _block_map(inode: _Inode) -> bytes:
    if inode.fast_link:
        return inode.data or b""
    if inode.leaf:
        head = struct.pack("<HHHHI", 0xF30A, 1, _INLINE_EXTENTS, 1, 0)
        return head + struct.pack("<IIHH", 0, inode.leaf & 0xFFFFFFFF, inode.leaf >> 32, 0)
    return _extents(inode.runs, _INLINE_EXTENTS)


def _write_inode(inode: _Inode, geometry: _Geometry, target: BinaryIO, epoch: int) -> None:
    node = inode.node
    sectors = (inode.blocks + bool(inode.leaf)) * (BLOCK // 512)
    flags = 0 if inode.fast_link else _EXTENTS_FLAG
    raw = struct.pack(
        "<HHIIIIIHHIII60sIIII",
        node.mode,
        node.uid & 0xFFFF,
        inode.size & 0xFFFFFFFF,
        *(epoch, epoch, epoch, 0),
        node.gid & 0xFFFF,
        inode.links,
        sectors,
        flags,
        0,
        _block_map(inode),
        *(0, 0, inode.size >> 32, 0),
    )
    raw += struct.pack("<HHHHHH", 0, 0, node.uid >> 16, node.gid >> 16, 0, 0)
    raw += struct.pack("<HHIIIII", 32, 0, 0, 0, 0, epoch, 0)
    group, index = divmod(inode.number - 1, geometry.inodes_per_group)
    target.seek((geometry.bitmap(group) + 2) * BLOCK + index * INODE_SIZE)
    target.write(raw)


def _bits(used: int, size: int) -> bytes:
    """A bitmap block: the first ``used`` bits set, and those from ``size`` on (they are not there)."""
    value = (1 << used) - 1
    value |= ((1 << (8 * BLOCK - size)) - 1) << size
    return value.to_bytes(BLOCK, "little")


def _group_numbers(
    geometry: _Geometry, allocator: _Allocator, inodes: list[_Inode]
) -> Iterator[tuple[int, int, int, int]]:
    """For each group: blocks used (from its front), blocks, inodes used, directories."""
    last = max(inode.number for inode in inodes)
    directories = [0] * geometry.groups
    for inode in inodes:
        if inode.node.is_dir:
            directories[(inode.number - 1) // geometry.inodes_per_group] += 1
    for group in range(geometry.groups):
        size = geometry.end(group) - group * PER_GROUP
        if group < allocator.group:
            used = size
        elif group == allocator.group:
            used = allocator.next - group * PER_GROUP
        else:
            used = geometry.overhead(group)
        first = group * geometry.inodes_per_group
        taken = min(max(last - first, 0), geometry.inodes_per_group)
        yield used, size, taken, directories[group]


def _write_groups(
    geometry: _Geometry,
    allocator: _Allocator,
    inodes: list[_Inode],
    target: BinaryIO,
    epoch: int,
    seed: bytes,
    label: str,
) -> None:
    table = b""
    free_blocks = free_inodes = 0
    numbers = _group_numbers(geometry, allocator, inodes)
    for group, (used, size, taken, directories) in enumerate(numbers):
        bitmap = geometry.bitmap(group)
        target.seek(bitmap * BLOCK)
        target.write(_bits(used, size))
        target.write(_bits(taken, geometry.inodes_per_group))
        spare = geometry.inodes_per_group - taken
        table += struct.pack(
            "<IIIHHHHIHHHH", bitmap, bitmap + 1, bitmap + 2, size - used, spare, directories, *[0] * 6
        )
        free_blocks += size - used
        free_inodes += spare
    for group in range(geometry.groups):
        if geometry.has_super(group):
            block = _superblock(geometry, free_blocks, free_inodes, group, epoch, seed, label)
            target.seek(group * PER_GROUP * BLOCK + (1024 if group == 0 else 0))
            target.write(block)
            target.seek((group * PER_GROUP + 1) * BLOCK)
            target.write(table)


def _superblock(
    geometry: _Geometry,
    free_blocks: int,
    free_inodes: int,
    group: int,
    epoch: int,
    seed: bytes,
    label: str,
) -> bytes:
    digest = hashlib.sha256(seed).digest()
    uuid = bytearray(digest[:16])
    uuid[6] = uuid[6] & 0x0F | 0x80  # RFC 9562: version 8, made from a hash
    uuid[8] = uuid[8] & 0x3F | 0x80
    block = bytearray(1024)

    def put(offset: int, layout: str, *values: int | bytes) -> None:
        struct.pack_into("<" + layout, block, offset, *values)

    put(0, "IIII", geometry.inodes_per_group * geometry.groups, geometry.blocks, 0, free_blocks)
    put(16, "IIII", free_inodes, 0, 2, 2)
    put(32, "IIII", PER_GROUP, PER_GROUP, geometry.inodes_per_group, 0)
    put(48, "IHHHHHH", epoch, 0, 0xFFFF, 0xEF53, 1, 1, 0)
    put(64, "IIII", epoch, 0, 0, 1)
    put(84, "IHH", FIRST_INODE, INODE_SIZE, group)
    put(92, "III", _COMPAT, _INCOMPAT, _RO_COMPAT)
    put(104, "16s16s", bytes(uuid), label.encode()[:16])
    put(236, "16sB", digest[16:32], 1)  # half-MD4, for directories that the guest lets grow
    put(264, "I", epoch)
    put(348, "HHI", 32, 32, 1)
    return bytes(block)
