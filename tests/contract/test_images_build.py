"""Real builds: the same inputs give the same image, in which e2fsck finds no errors."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from images import recipe
from images.build import bootstrap, build, builder, ext4, kernel, process, wheels
from images.build.tree import FileContent, FileNode, FileTree, in_memory
from images.store.image_store import ImageStore
from tests.kit.image_builds import STORE, WORK, debugfs, fsck, need
from vmjobs.errors import BuildError
from vmjobs.model import MIB


def write(tree: FileTree, disk: Path, slack: int = MIB) -> bytes:
    ext4.write(tree, disk, slack=slack, epoch=1_700_000_000, seed=b"seed", label="test")
    return disk.read_bytes()


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
    disk = tmp_path / "disk"
    first = write(tree, disk)
    assert fsck(disk) == []
    assert debugfs(disk, "cat /a/big") == data
    assert debugfs(disk, "cat /many/a-file-with-a-name-of-some-length-1499") == b"1499"
    inode = debugfs(disk, "stat /a/again").decode()
    assert "Mode:  04755" in inode
    assert "User:     7   Group: 70000" in inode
    assert "Links: 2" in inode
    assert "0x6553f100" in inode  # the epoch, not the current time
    assert "Fast link dest" in debugfs(disk, "stat /short").decode()
    assert write(tree, tmp_path / "other") == first


def test_disks_of_several_groups(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(800 * MIB)
        for offset in range(0, 800 * MIB, 50 * MIB):
            file.seek(offset)
            file.write(b"%d" % offset)
    tree = FileTree()
    content = FileContent(800 * MIB, file=source)
    tree.add("small", FileNode(stat.S_IFREG | 0o644, content=in_memory(b"before")))
    tree.add("spans-seven-groups", FileNode(stat.S_IFREG | 0o644, content=content))
    tree.add("zz", FileNode(stat.S_IFREG | 0o644, content=in_memory(b"after")))
    disk = tmp_path / "disk"
    ext4.write(tree, disk, slack=300 * MIB, epoch=0, seed=b"")
    assert fsck(disk) == []
    subprocess.run(["debugfs", "-R", f"dump /spans-seven-groups {tmp_path}/out", disk], check=True)
    assert subprocess.run(["cmp", source, tmp_path / "out"], check=False).returncode == 0
    assert debugfs(disk, "cat /zz") == b"after"


@pytest.mark.parametrize("slack", [1, 64, 127, 128, 129, 260])
def test_disks_of_every_size_are_sound(tmp_path: Path, slack: int) -> None:
    tree = FileTree()
    tree.add_file("x", b"x")
    ext4.write(tree, tmp_path / "disk", slack=slack * MIB, epoch=0, seed=b"")
    assert fsck(tmp_path / "disk") == []


@pytest.mark.soak
def test_two_builds_from_nothing_give_the_same_image(tmp_path: Path) -> None:
    need("mmdebstrap", "dpkg-deb")
    steps: list[str] = []
    digests = []
    for place in ("one", "two"):
        store = ImageStore(tmp_path / place / "store")
        entry = build("generic", store, tmp_path / place / "work", lambda s, _f: steps.append(s))
        digests.append(entry.digest)
        assert fsck(store.prepare(entry.digest).root) == []
    assert digests[0] == digests[1]
    assert steps[-1] == "done"
    manifest = store.manifest(digests[1])
    assert manifest.root.size < 150 * MIB
    assert {"bash", "busybox-static", "e2fsprogs"} <= set(manifest.packages)
    assert store.resolve("generic") == store.resolve("generic:1") == digests[1]


def test_what_was_built_is_not_built_again(tmp_path: Path) -> None:
    store = ImageStore(STORE)
    first = build("generic", store, WORK)
    began = time.monotonic()
    # A directory without packages: any step of a build would have to fetch them.
    assert build("generic", store, tmp_path / "nothing-here") == first
    assert time.monotonic() - began < 1
    assert not (tmp_path / "nothing-here").exists()


def test_nothing_is_fetched_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new store with the same downloads gets the same image; no program downloads."""
    here = build("hep", ImageStore(STORE), WORK)
    programs: list[str] = []

    def count(argv: Sequence[str | Path], **options: Any) -> bytes:
        programs.append(str(argv[0]))
        return process.run(argv, **options)

    for module in (bootstrap, wheels, kernel):
        monkeypatch.setattr(module, "run", count)
    assert build("hep", ImageStore(tmp_path / "store"), WORK).digest == here.digest
    assert programs == ["dpkg-deb"]


def test_packages_that_do_not_exist_are_named(tmp_path: Path) -> None:
    need("mmdebstrap")
    file = tmp_path / "bad.toml"
    file.write_text(
        'name = "bad"\nversion = "1"\nsuite = "bookworm"\nepoch = 0\npackages = ["no-such-package"]\n'
    )
    with pytest.raises(BuildError, match="no-such-package"):
        build(str(file), ImageStore(tmp_path / "store"), tmp_path / "work")
    assert not list((tmp_path / "work").rglob("*.tar"))


def test_the_initial_ram_disk_has_what_the_root_disk_takes() -> None:
    store = ImageStore(STORE)
    image = store.prepare(build("generic", store, WORK).digest)
    assert image.initrd is not None
    data = image.initrd.read_bytes()
    for name in (b"modules/virtio_pci.ko\0", b"modules/virtio_blk.ko\0", b"modules/virtio_net.ko\0"):
        assert name in data
    assert data.startswith(b"070701")
    assert len(data) < 4 * MIB
    assert kernel.module_name("a-b.ko") == "a_b"
    assert builder.build_key(recipe.load("generic"), builder.guest_program())
