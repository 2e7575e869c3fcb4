"""Write a file tree as a cpio archive ("newc"), the format of an initial RAM disk."""

from __future__ import annotations

import stat
from typing import Final

from images.build.tree import FileNode, FileTree

_TRAILER: Final = "TRAILER!!!"


def archive(tree: FileTree, *, epoch: int) -> bytes:
    """The archive of ``tree``; the same tree gives the same bytes.

    epoch: all time stamps, seconds since 1970.
    """
    out = bytearray()
    for number, (path, node) in enumerate(tree.walk(), start=1):
        data = node.target.encode() if node.is_link else node.content.read()
        out += _entry(path or ".", node, b"" if node.is_dir else data, number, epoch)
    out += _entry(_TRAILER, FileNode(0), b"", 0, 0)
    return bytes(out) + bytes(-len(out) % 512)


def _entry(name: str, node: FileNode, data: bytes, inode: int, epoch: int) -> bytes:
    encoded = name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(node.mode) else 1
    # inode, mode, owner, group, links, time, size, device, special device, length of name, checksum
    fields = (inode, node.mode, node.uid, node.gid, links, epoch, len(data), 0, 0, 0, 0)
    head = b"070701" + b"".join(b"%08X" % value for value in (*fields, len(encoded), 0))
    named = head + encoded
    return named + bytes(-len(named) % 4) + data + bytes(-len(data) % 4)
