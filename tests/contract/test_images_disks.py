"""Root disks of images: what e2fsprogs reads in them, and their common chunks."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from images.build import ext4
from images.build.tree import FileContent, FileNode, FileTree, in_memory
from tests.kit import image_builds
from tests.kit.image_builds import fsck
from vmjobs.errors import BuildError
from vmjobs.model import MIB

CHUNK = 64 * 1024


def write(tree: FileTree, disk: Path, slack: int = MIB) -> Path:
    """Write the tree, and check every structure with e2fsck."""
    ext4.write(tree, disk, slack=slack, epoch=1_700_000_000, seed=b"seed", label="test")
    assert fsck(disk) == []
    return disk


def debugfs(disk: Path, command: str) -> str:
    return image_builds.debugfs(disk, command).decode("utf-8", "replace")


def file(data: bytes = b"", **fields: object) -> FileNode:
    return FileNode(stat.S_IFREG | 0o755, content=in_memory(data), **fields)  # type: ignore[arg-type]


def test_a_disk_holds_what_its_tree_does(tmp_path: Path) -> None:
    tree = FileTree()
    data = os.urandom(3 * MIB + 17)
    tree.add("a/big", FileNode(stat.S_IFREG | 0o4755, 7, 70_000, in_memory(data)))
    tree.add("a/again", tree.nodes["a/big"])
    tree.add_file("a/empty", b"")
    tree.add_link("short", "a/big")
    tree.add_link("long", "x" * 200)
    for number in range(1500):
        tree.add_file(f"many/a-file-with-a-name-of-some-length-{number}", b"%d" % number)
    disk = write(tree, tmp_path / "disk")
    assert image_builds.debugfs(disk, "cat /a/big") == data
    assert debugfs(disk, "cat /many/a-file-with-a-name-of-some-length-1499") == "1499"
    inode = debugfs(disk, "stat /a/again")
    assert "Mode:  04755" in inode
    assert "User:     7   Group: 70000" in inode
    assert "Links: 2" in inode
    assert "0x6553f100" in inode  # the epoch, not the current time
    assert "Fast link dest" in debugfs(disk, "stat /short")
    assert write(tree, tmp_path / "other").read_bytes() == disk.read_bytes()


def test_disks_of_several_groups(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as sink:
        sink.truncate(800 * MIB)
        for offset in range(0, 800 * MIB, 50 * MIB):
            sink.seek(offset)
            sink.write(b"%d" % offset)
    tree = FileTree()
    content = FileContent(800 * MIB, file=source)
    tree.add("small", file(b"before"))
    tree.add("spans-seven-groups", FileNode(stat.S_IFREG | 0o644, content=content))
    tree.add("zz", file(b"after"))
    disk = write(tree, tmp_path / "disk", slack=300 * MIB)
    debugfs(disk, f"dump /spans-seven-groups {tmp_path}/out")
    assert subprocess.run(["cmp", source, tmp_path / "out"], check=False).returncode == 0
    assert debugfs(disk, "cat /zz") == "after"


@pytest.mark.parametrize("slack", [1, 64, 127, 128, 129, 260])
def test_disks_of_every_size_are_sound(tmp_path: Path, slack: int) -> None:
    tree = FileTree()
    tree.add_file("x", b"x")
    write(tree, tmp_path / "disk", slack=slack * MIB)


def test_capabilities_and_other_attributes(tmp_path: Path) -> None:
    capability = b"\1\0\0\2\0\x20\0\0" + bytes(12)
    tree = FileTree()
    tree.add("ping", file(b"x", xattrs={"security.capability": capability}))
    many = {f"user.note{number}": os.urandom(100) for number in range(20)}
    tree.add("much", file(b"y", xattrs={"security.capability": capability, **many}))
    disk = write(tree, tmp_path / "disk")
    assert "security.capability (20)" in debugfs(disk, "ea_list /ping")
    listed = debugfs(disk, "ea_list /much")
    assert listed.count("user.note") == 20
    debugfs(disk, f"ea_get -f {tmp_path}/value /much user.note7")
    assert (tmp_path / "value").read_bytes() == many["user.note7"]
    debugfs(disk, f"ea_get -f {tmp_path}/value /ping security.capability")
    assert (tmp_path / "value").read_bytes() == capability


def test_devices_pipes_and_times(tmp_path: Path) -> None:
    tree = FileTree()
    tree.add("null", FileNode(stat.S_IFCHR | 0o666, device=(1, 3)))
    tree.add("far", FileNode(stat.S_IFBLK | 0o660, 0, 6, device=(259, 70_000)))
    tree.add("pipe", FileNode(stat.S_IFIFO | 0o600))
    tree.add("old", file(mtime=1))
    tree.add("late", file(mtime=2**32 + 5))  # 2106
    disk = write(tree, tmp_path / "disk")
    assert "Device major/minor number: 01:03" in debugfs(disk, "stat /null")
    assert "Device major/minor number: 259:70000" in debugfs(disk, "stat /far")
    assert "Type: FIFO" in debugfs(disk, "stat /pipe")
    assert "mtime: 0x00000001:00000000" in debugfs(disk, "stat /old")
    assert "mtime: 0x00000005:00000001" in debugfs(disk, "stat /late")


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("n" * 256, FileNode(stat.S_IFLNK | 0o777, target="x")),
        ("n", FileNode(stat.S_IFLNK | 0o777, target="t" * 4096)),
        ("n", FileNode(stat.S_IFLNK | 0o777, target="")),
        ("x", file(xattrs={"user.big": bytes(5000)})),
        ("x", file(xattrs={"trusted.x": b""})),
        ("x", file(xattrs={f"user.{'n' * 300}": b""})),
    ],
)
def test_names_and_attributes_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, node: FileNode
) -> None:
    tree = FileTree()
    tree.add(name, node)
    with pytest.raises(BuildError):
        write(tree, tmp_path / "disk")


def layered(*more: dict[str, bytes], without: tuple[str, ...] = ()) -> FileTree:
    """A tree of a large layer, always the same, and of others."""
    tree = FileTree()
    base = {f"usr/{n % 13}/file{n}": (b"%d " % n) * (500 * (n % 40)) for n in range(1, 400)}
    for files in (base, *more):
        nodes = {path: file(data) for path, data in files.items()}
        for path, node in nodes.items():
            tree.add(path, node)
        tree.layers.append(list(nodes.values()))
    for path in without:
        del tree.nodes[path]
    return tree


def chunks(disk: Path) -> list[bytes]:
    """The chunks of an image that are not zeros."""
    data = disk.read_bytes()
    found = (data[place : place + CHUNK] for place in range(0, len(data), CHUNK))
    return [chunk for chunk in found if chunk.count(0) < len(chunk)]


def test_layers_below_lie_as_if_there_were_none_above(tmp_path: Path) -> None:
    plain = chunks(write(layered(), tmp_path / "plain"))
    above = {"aaa/first": os.urandom(200_000), "usr/3/file3": b"another", "zzz": b"last"}
    other = write(layered(above, without=("usr/5/file5", "usr/7/file20")), tmp_path / "other")
    there = set(chunks(other))
    # Superblock, bitmaps and tables of the first group; metadata of directories; two files.
    assert sum(chunk not in there for chunk in plain) <= 8
    assert len(plain) > 100


def test_what_a_layer_replaced_is_not_on_the_disk(tmp_path: Path) -> None:
    secret = os.urandom(100_000)
    tree = layered({"secret": secret}, {"secret": b"gone"})
    disk = write(tree, tmp_path / "disk")
    assert secret[:64] not in disk.read_bytes()
    assert debugfs(disk, "cat /secret") == "gone"


def test_large_files_are_the_same_blocks_wherever_they_lie(tmp_path: Path) -> None:
    large = os.urandom(5 * CHUNK + 100)
    one, two = FileTree(), FileTree()
    one.add("large", file(large))
    for number in range(37):
        two.add(f"a/{number}", file(os.urandom(1000 * number)))
    two.add("moved/large", file(large))
    first = set(chunks(write(one, tmp_path / "one")))
    second = set(chunks(write(two, tmp_path / "two")))
    assert len([chunk for chunk in first & second if chunk[:100] in large]) == 6


def test_a_disk_without_lost_and_found(tmp_path: Path) -> None:
    tree = FileTree()
    tree.add("only", file(b"x"))
    disk = tmp_path / "disk"
    ext4.write(tree, disk, slack=MIB, epoch=0, seed=b"", lost_and_found=False)
    assert all("lost+found" in line for line in fsck(disk))
    assert "lost+found" not in debugfs(disk, "ls /")
