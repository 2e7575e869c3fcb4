"""Write a file tree as an ext4 image, directly to a plain file.

``mke2fs -d`` copies ownership and change times from a directory on the host, so it needs root (or
fakeroot), and its result differs between runs and between releases of e2fsprogs. This writer uses only
the tree: the same tree gives the same bytes on every host, without privileges. The result is that of
``mke2fs -O none,extent,filetype,sparse_super,...``: no journal and no checksums, since a root disk is
only booted through a copy-on-write overlay.

Images are stored and sent as chunks of 64 KiB, each kept once (:mod:`images.content`), so the layout
repeats: group sizes do not depend on the contents; files of 64 KiB and more begin at a chunk boundary,
so that they are the same chunks at any position; and the layers of a tree follow each other, each as if
there were no later ones. The space of files that a later layer replaced stays free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from images.build import ext4_layout as layout
from images.build.ext4_layout import BLOCK, FIRST_INODE, INODES_PER_GROUP, PER_GROUP, ROOT_INODE, Inode
from images.build.tree import FileTree
from vmjobs.errors import BuildError

#: Blocks of the file system in one chunk of an image.
_ALIGNMENT: Final = 64 * 1024 // BLOCK
_TABLE_BLOCKS: Final = INODES_PER_GROUP * layout.INODE_SIZE // BLOCK
#: The least number of data blocks in the last group.
_MIN_DATA_BLOCKS: Final = 64
#: Groups with a copy of the superblock (sparse_super): 0, 1 and the powers of 3, 5 and 7.
_SUPER_GROUPS: Final = frozenset({0, 1, *(base**n for base in (3, 5, 7) for n in range(1, 21))})


class _Geometry:
    """Positions of the groups' own blocks. tables: blocks for the group descriptors."""

    def __init__(self, tables: int) -> None:
        self.tables = tables

    def bitmap(self, group: int) -> int:
        """First of the two bitmap blocks; the inode table follows them."""
        return group * PER_GROUP + (1 + self.tables if group in _SUPER_GROUPS else 0)

    def own(self, group: int) -> int:
        """First block after the group's own."""
        return self.bitmap(group) + 2 + _TABLE_BLOCKS

    def inode(self, number: int) -> int:
        """Position of an inode, in bytes."""
        group, index = divmod(number - 1, INODES_PER_GROUP)
        return (self.bitmap(group) + 2) * BLOCK + index * layout.INODE_SIZE


class _Allocator:
    """Allocates blocks in ascending order."""

    def __init__(self, geometry: _Geometry) -> None:
        self.geometry = geometry
        self.group = 0
        self.next = _rounded(geometry.own(0))

    def align(self) -> None:
        """Continue at the next chunk boundary."""
        self.next = _rounded(self.next)

    def take(self, count: int) -> list[tuple[int, int]]:
        """Allocate ``count`` blocks: runs of first block and length."""
        runs: list[tuple[int, int]] = []
        while count:
            end = (self.group + 1) * PER_GROUP
            if self.next >= end:
                self.group += 1
                self.next = _rounded(self.geometry.own(self.group))
                continue
            length = min(count, end - self.next, layout.MAX_EXTENT)
            runs.append((self.next, length))
            self.next += length
            count -= length
        return runs


def _rounded(block: int) -> int:
    return -(-block // _ALIGNMENT) * _ALIGNMENT


@dataclass
class _Plan:
    """All inodes with their positions. blocks, groups: of the whole disk."""

    geometry: _Geometry
    inodes: list[Inode]
    groups: int
    blocks: int


def write(
    tree: FileTree,
    file: Path,
    *,
    slack: int,
    epoch: int,
    seed: bytes,
    label: str = "",
    lost_and_found: bool = True,
) -> None:
    """Write ``tree`` to ``file`` (sparse).

    slack: free bytes to leave. epoch: time stamp of nodes that have none, seconds since 1970.
    seed: the UUID is derived from it. lost_and_found: have the directory that e2fsck looks for.

    Raises:
        BuildError: a file is too large, a name is too long, or a source cannot be read.
    """
    if lost_and_found:
        tree.add_dir("lost+found", 0o700)
    layers = _number(tree)
    tables = 1
    while (plan := _plan(layers, slack, tables)).groups * layout.DESCRIPTOR > tables * BLOCK:
        tables = -(-plan.groups * layout.DESCRIPTOR // BLOCK)
    with ExitStack() as stack:
        target = stack.enter_context(file.open("wb"))
        target.truncate(plan.blocks * BLOCK)
        opened: dict[Path, BinaryIO] = {}
        stack.callback(lambda: [source.close() for source in opened.values()])
        for inode in plan.inodes:
            _write_content(inode, target, opened)
            target.seek(plan.geometry.inode(inode.number))
            target.write(layout.encode(inode, epoch))
        _write_groups(plan, target, epoch, seed, label)


# --------------------------------------------------------------------------- numbers


def _number(tree: FileTree) -> list[list[Inode]]:
    """Number all nodes, layer by layer, link directories, and build their bytes.

    A node that a later layer replaced keeps its number and is in the list, with no links.
    """
    special = {id(tree.nodes[""]): ROOT_INODE}
    if "lost+found" in tree.nodes:
        special[id(tree.nodes["lost+found"])] = FIRST_INODE
    numbered: dict[int, Inode] = {}
    following = FIRST_INODE
    layers: list[list[Inode]] = []
    for nodes in (*tree.layers, [node for _, node in tree.walk()]):
        layers.append([])
        for node in nodes:
            if id(node) in numbered:
                continue
            number = special.get(id(node), 0)
            if not number:
                following += 1
                number = following
            inode = numbered[id(node)] = Inode(number, node)
            layers[-1].append(inode)
    _link(tree, numbered)
    for inode in numbered.values():
        _measure(inode)
    return layers


def _link(tree: FileTree, numbered: dict[int, Inode]) -> None:
    by_path: dict[str, Inode] = {}
    for path, node in tree.walk():
        inode = by_path[path] = numbered[id(node)]
        if not path:
            continue
        folder, _, name = path.rpartition("/")
        encoded = name.encode("utf-8", "surrogateescape")
        if len(encoded) > 255:
            raise BuildError(f"the name of {path} is longer than 255 bytes")
        parent = by_path[folder]
        parent.entries.append((encoded, inode))
        inode.links += 1
        inode.parent = parent
        if not node.is_dir and inode.links > layout.MAX_LINKS:
            raise BuildError(f"{path} has more than {layout.MAX_LINKS} hard links")
    root = by_path[""]
    root.links += 1


def _measure(inode: Inode) -> None:
    node = inode.node
    if node.is_dir:
        if inode.links:
            inode.links = 2 + sum(child.node.is_dir for _, child in inode.entries)
            inode.data = layout.directory(inode)
    elif node.is_link:
        inode.data = node.target.encode("utf-8", "surrogateescape")
        if not 0 < len(inode.data) < BLOCK:
            raise BuildError(f"a symbolic link has a target of {len(inode.data)} bytes")
    inode.size = node.content.size if inode.data is None else len(inode.data)


# --------------------------------------------------------------------------- positions


def _plan(layers: list[list[Inode]], slack: int, tables: int) -> _Plan:
    geometry = _Geometry(tables)
    allocator = _Allocator(geometry)
    last = FIRST_INODE
    for inodes in layers:
        files = [inode for inode in inodes if not inode.node.is_dir]
        for inode in files:
            if inode.blocks >= _ALIGNMENT:
                allocator.align()
                inode.runs = allocator.take(inode.blocks)
        allocator.align()
        for inode in files:
            if inode.blocks < _ALIGNMENT:
                inode.runs = allocator.take(inode.blocks)
        last = max([last, *(inode.number for inode in inodes)])
    present = [inode for inodes in layers for inode in inodes if inode.links]
    allocator.align()
    for inode in present:
        if inode.node.is_dir:
            inode.runs = allocator.take(inode.blocks)
    for inode in present:
        _allocate_extras(inode, allocator)
    allocator.take(-(-slack // BLOCK))
    groups = max(allocator.group + 1, -(-last // INODES_PER_GROUP))
    blocks = max(allocator.next, geometry.own(groups - 1) + _MIN_DATA_BLOCKS)
    return _Plan(geometry, sorted(present, key=lambda inode: inode.number), groups, blocks)


def _allocate_extras(inode: Inode, allocator: _Allocator) -> None:
    inode.leaf = inode.attributes = 0
    if len(inode.runs) > layout.INLINE_EXTENTS:
        if len(inode.runs) > layout.LEAF_EXTENTS:
            raise BuildError(f"a file of {inode.size} bytes is too large for a root disk")
        inode.leaf = allocator.take(1)[0][0]
    layout.check_attributes(inode.node.xattrs)
    if inode.node.xattrs and layout.attributes_beside(inode.node.xattrs) is None:
        inode.attributes = allocator.take(1)[0][0]


# --------------------------------------------------------------------------- bytes


def _write_content(inode: Inode, target: BinaryIO, opened: dict[Path, BinaryIO]) -> None:
    pieces = iter([inode.data]) if inode.data is not None else inode.node.content.chunks(opened)
    left = memoryview(b"")
    for start, length in inode.runs:
        target.seek(start * BLOCK)
        room = length * BLOCK
        while room:
            if not left:
                left = memoryview(next(pieces, b""))
                if not left:
                    break
            part = left[:room]
            _put(target, part)
            left, room = left[len(part) :], room - len(part)
    if inode.leaf:
        target.seek(inode.leaf * BLOCK)
        target.write(layout.extents(inode.runs, layout.LEAF_EXTENTS))
    if inode.attributes:
        target.seek(inode.attributes * BLOCK)
        target.write(layout.attributes_block(inode.node.xattrs))


def _put(target: BinaryIO, part: memoryview) -> None:
    """Write ``part``, or leave a hole if it is all zeros."""
    if part[0] or part[-1] or part.tobytes().count(0) < len(part):
        target.write(part)
    else:
        target.seek(len(part), 1)


def _write_groups(plan: _Plan, target: BinaryIO, epoch: int, seed: bytes, label: str) -> None:
    geometry = plan.geometry
    rows = []
    for group, (blocks, inodes, folders) in enumerate(_bitmaps(plan)):
        bitmap = geometry.bitmap(group)
        target.seek(bitmap * BLOCK)
        target.write(blocks.to_bytes(BLOCK, "little") + inodes.to_bytes(BLOCK, "little"))
        free = PER_GROUP - blocks.bit_count(), PER_GROUP - inodes.bit_count()
        rows.append((bitmap, *free, folders))
    table = layout.descriptors(rows)
    for group in range(plan.groups):
        if group in _SUPER_GROUPS:
            target.seek(group * PER_GROUP * BLOCK + (1024 if group == 0 else 0))
            target.write(layout.superblock(rows, plan.blocks, group, epoch, seed, label))
            target.seek((group * PER_GROUP + 1) * BLOCK)
            target.write(table)


def _bitmaps(plan: _Plan) -> Iterator[tuple[int, int, int]]:
    """For each group: used and nonexistent blocks and inodes as bits; number of directories."""
    blocks = [0] * plan.groups
    inodes = [(1 << PER_GROUP) - (1 << INODES_PER_GROUP)] * plan.groups
    folders = [0] * plan.groups
    inodes[0] |= (1 << FIRST_INODE - 1) - 1

    def use(first: int, length: int) -> None:
        group, place = divmod(first, PER_GROUP)
        blocks[group] |= ((1 << length) - 1) << place

    for group in range(plan.groups):
        start = group * PER_GROUP
        use(start, plan.geometry.own(group) - start)
        size = min(PER_GROUP, plan.blocks - start)
        blocks[group] |= (1 << PER_GROUP) - (1 << size)
    for inode in plan.inodes:
        group, index = divmod(inode.number - 1, INODES_PER_GROUP)
        inodes[group] |= 1 << index
        folders[group] += inode.node.is_dir
        for first, length in inode.runs:
            use(first, length)
        for extra in (inode.leaf, inode.attributes):
            if extra:
                use(extra, 1)
    yield from zip(blocks, inodes, folders, strict=True)
