"""ext4 on-disk structures: inodes, directories, extents, extended attributes, superblock."""

from __future__ import annotations

import hashlib
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from images.build.tree import FileNode
from vmjobs.errors import BuildError

BLOCK: Final = 4096
PER_GROUP: Final = 8 * BLOCK
INODE_SIZE: Final = 256
INODES_PER_GROUP: Final = 8192
FIRST_INODE: Final = 11
ROOT_INODE: Final = 2
DESCRIPTOR: Final = 32
MAX_EXTENT: Final = 32768
INLINE_EXTENTS: Final = 4
LEAF_EXTENTS: Final = (BLOCK - 12) // 12
MAX_LINKS: Final = 65000

_COMPAT: Final = 0x8 | 0x20  # ext_attr, dir_index
_INCOMPAT: Final = 0x2 | 0x40  # filetype, extents
_RO_COMPAT: Final = 0x1 | 0x2 | 0x20 | 0x40  # sparse_super, large_file, dir_nlink, extra_isize
_EXTENTS_FLAG: Final = 0x80000
_FAST_LINK: Final = 60
_EXTRA: Final = 32
_KINDS: Final = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFLNK: 7,
}
_ATTRIBUTE_MAGIC: Final = 0xEA020000
_ATTRIBUTE_SPACES: Final = {"user.": 1, "security.": 6}


@dataclass
class Inode:
    """A node with its number, and the positions of its bytes on the disk.

    runs: first block and number of blocks, in order. leaf: the block that lists the runs if there are
    many. attributes: the block with extended attributes that do not fit beside the inode.
    """

    number: int
    node: FileNode
    links: int = 0
    entries: list[tuple[bytes, Inode]] = field(default_factory=list)
    parent: Inode | None = None
    data: bytes | None = None
    size: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    leaf: int = 0
    attributes: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks of its data."""
        return 0 if self.fast_link else -(-self.size // BLOCK)

    @property
    def fast_link(self) -> bool:
        """Whether it is a symbolic link whose target is kept in the inode."""
        return self.node.is_link and self.size < _FAST_LINK


# --------------------------------------------------------------------------- directories


def directory(inode: Inode) -> bytes:
    """A linear directory: entries do not cross blocks, the last one fills its block."""
    entries = [(b".", inode), (b"..", inode.parent or inode), *inode.entries]
    blocks: list[list[tuple[bytes, Inode]]] = [[]]
    used = 0
    for name, child in entries:
        need = 8 + -(-len(name) // 4) * 4
        if used + need > BLOCK:
            blocks.append([])
            used = 0
        blocks[-1].append((name, child))
        used += need
    return b"".join(_directory_block(block) for block in blocks)


def _directory_block(entries: list[tuple[bytes, Inode]]) -> bytes:
    out = bytearray()
    for place, (name, child) in enumerate(entries):
        length = 8 + -(-len(name) // 4) * 4
        if place == len(entries) - 1:
            length = BLOCK - len(out)
        kind = _KINDS[stat.S_IFMT(child.node.mode)]
        head = struct.pack("<IHBB", child.number, length, len(name), kind)
        out += (head + name).ljust(length, b"\0")
    return bytes(out)


# --------------------------------------------------------------------------- inodes


def extents(runs: list[tuple[int, int]], most: int) -> bytes:
    """A node of the extent tree, of depth 0."""
    out = struct.pack("<HHHHI", 0xF30A, len(runs), most, 0, 0)
    logical = 0
    for start, length in runs:
        out += struct.pack("<IHHI", logical, length, start >> 32, start & 0xFFFFFFFF)
        logical += length
    return out


def _block_map(inode: Inode) -> bytes:
    if stat.S_ISCHR(inode.node.mode) or stat.S_ISBLK(inode.node.mode):
        major, minor = inode.node.device
        if major < 256 and minor < 256:
            return struct.pack("<I", major << 8 | minor)
        return struct.pack("<II", 0, minor & 0xFF | major << 8 | (minor & ~0xFF) << 12)
    if stat.S_ISFIFO(inode.node.mode):
        return b""
    if inode.fast_link:
        return inode.data or b""
    if inode.leaf:
        head = struct.pack("<HHHHI", 0xF30A, 1, INLINE_EXTENTS, 1, 0)
        return head + struct.pack("<IIHH", 0, inode.leaf & 0xFFFFFFFF, inode.leaf >> 32, 0)
    return extents(inode.runs, INLINE_EXTENTS)


def encode(inode: Inode, epoch: int) -> bytes:
    """The inode as in the inode table. epoch: its time stamps, seconds since 1970."""
    node = inode.node
    plain = stat.S_ISREG(node.mode) or node.is_dir or (node.is_link and not inode.fast_link)
    changed = epoch if node.mtime is None else node.mtime
    low, high = changed & 0xFFFFFFFF, _epoch_bits(changed)
    sectors = (inode.blocks + bool(inode.leaf) + bool(inode.attributes)) * (BLOCK // 512)
    raw = struct.pack(
        "<HHIIIIIHHIII60sIIII",
        node.mode,
        node.uid & 0xFFFF,
        inode.size & 0xFFFFFFFF,
        *(low, epoch, low, 0),
        node.gid & 0xFFFF,
        1 if inode.links > MAX_LINKS else inode.links,
        sectors,
        _EXTENTS_FLAG if plain else 0,
        0,
        _block_map(inode),
        *(0, inode.attributes & 0xFFFFFFFF, inode.size >> 32, 0),
    )
    acl = inode.attributes >> 32
    raw += struct.pack("<HHHHHH", 0, acl, node.uid >> 16, node.gid >> 16, 0, 0)
    raw += struct.pack("<HHIIIIII", _EXTRA, 0, 0, high, high, epoch, 0, 0).ljust(_EXTRA, b"\0")
    if node.xattrs and not inode.attributes:
        raw += attributes_beside(node.xattrs) or b""
    return raw.ljust(INODE_SIZE, b"\0")


def _epoch_bits(moment: int) -> int:
    """The bits of a time stamp that do not fit into 32 signed bits."""
    signed = (moment & 0xFFFFFFFF) - (1 << 32 if moment & 0x80000000 else 0)
    return (moment - signed) >> 32 & 3


# --------------------------------------------------------------------------- extended attributes


def attributes_beside(attributes: dict[str, bytes]) -> bytes | None:
    """Extended attributes for the space behind an inode; ``None`` if they do not fit."""
    room = INODE_SIZE - 128 - _EXTRA
    if _room(attributes) > room - 4:
        return None
    listed, values = _attributes(attributes, room - 4)
    body = listed.ljust(room - 4 - len(values), b"\0") + values
    return struct.pack("<I", _ATTRIBUTE_MAGIC) + body


def attributes_block(attributes: dict[str, bytes]) -> bytes:
    """Extended attributes as a block of their own."""
    listed, values = _attributes(attributes, BLOCK)
    total, place = 0, 0
    while place < len(listed):
        length, entry_hash = listed[place], struct.unpack_from("<I", listed, place + 12)[0]
        total = (total << 16 ^ total >> 16 ^ entry_hash) & 0xFFFFFFFF
        place += 16 + -(-length // 4) * 4
    head = struct.pack("<IIIII", _ATTRIBUTE_MAGIC, 1, 1, total, 0).ljust(32, b"\0")
    return (head + listed).ljust(BLOCK - len(values), b"\0") + values


def check_attributes(attributes: dict[str, bytes]) -> None:
    """Raise BuildError if attributes do not fit into a block."""
    if 32 + _room(attributes) > BLOCK:
        raise BuildError("a file has more extended attributes than fit into a block")


def _room(attributes: dict[str, bytes]) -> int:
    """Size of attributes in bytes: a terminated list, and the values."""
    words = (part for _, name, value in _split(attributes) for part in (name, value))
    return 16 * len(attributes) + 4 + sum(-(-len(word) // 4) * 4 for word in words)


def _attributes(attributes: dict[str, bytes], end: int) -> tuple[bytes, bytes]:
    """The list of attributes, and their values, which end at the list's offset ``end``."""
    listed, values = b"", b""
    for space, name, value in sorted(_split(attributes), key=lambda a: (a[0], len(a[1]), a[1])):
        padded = value.ljust(-(-len(value) // 4) * 4, b"\0")
        values = padded + values
        head = struct.pack("<BBHII", len(name), space, end - len(values), 0, len(value))
        listed += head + struct.pack("<I", _attribute_hash(name, padded))
        listed += name.ljust(-(-len(name) // 4) * 4, b"\0")
    return listed, values


def _split(attributes: dict[str, bytes]) -> list[tuple[int, bytes, bytes]]:
    split = []
    for full, value in attributes.items():
        space = next((s for s in _ATTRIBUTE_SPACES if full.startswith(s)), None)
        if space is None or not 0 < len(full.removeprefix(space).encode()) < 256:
            raise BuildError(f"the extended attribute {full!r} cannot be kept")
        split.append((_ATTRIBUTE_SPACES[space], full.removeprefix(space).encode(), value))
    return split


def _attribute_hash(name: bytes, value: bytes) -> int:
    found = 0
    for byte in name:
        found = (found << 5 ^ found >> 27 ^ byte) & 0xFFFFFFFF
    for (word,) in struct.iter_unpack("<I", value):
        found = (found << 16 ^ found >> 16 ^ word) & 0xFFFFFFFF
    return found


# --------------------------------------------------------------------------- superblock


#: A group's bitmap block, and its numbers of free blocks, free inodes and directories.
GroupRow = tuple[int, int, int, int]


def superblock(
    rows: Sequence[GroupRow], blocks: int, group: int, epoch: int, seed: bytes, label: str
) -> bytes:
    """The superblock's copy in ``group``. blocks: of the disk. seed: the UUID is derived from it."""
    free_blocks, free_inodes = (sum(row[column] for row in rows) for column in (1, 2))
    digest = hashlib.sha256(seed).digest()
    uuid = bytearray(digest[:16])
    uuid[6] = uuid[6] & 0x0F | 0x80  # RFC 9562: version 8, made from a hash
    uuid[8] = uuid[8] & 0x3F | 0x80
    block = bytearray(1024)

    def put(offset: int, layout: str, *values: int | bytes) -> None:
        struct.pack_into("<" + layout, block, offset, *values)

    put(0, "IIII", INODES_PER_GROUP * len(rows), blocks, 0, free_blocks)
    put(16, "IIII", free_inodes, 0, 2, 2)
    put(32, "IIII", PER_GROUP, PER_GROUP, INODES_PER_GROUP, 0)
    put(48, "IHHHHHH", epoch, 0, 0xFFFF, 0xEF53, 1, 1, 0)
    put(64, "IIII", epoch, 0, 0, 1)
    put(84, "IHH", FIRST_INODE, INODE_SIZE, group)
    put(92, "III", _COMPAT, _INCOMPAT, _RO_COMPAT)
    put(104, "16s16s", bytes(uuid), label.encode()[:16])
    put(236, "16sB", digest[16:32], 1)  # half-MD4, for directories that grow in the guest
    put(264, "I", epoch)
    put(348, "HHI", _EXTRA, _EXTRA, 1)
    return bytes(block)


def descriptors(rows: Sequence[GroupRow]) -> bytes:
    """The group descriptors."""
    return b"".join(
        struct.pack("<IIIHHHHIHHHH", bitmap, bitmap + 1, bitmap + 2, blocks, inodes, folders, *[0] * 6)
        for bitmap, blocks, inodes, folders in rows
    )
