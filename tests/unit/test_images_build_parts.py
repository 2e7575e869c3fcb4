"""Trees, cpio archives, kernel modules and wheels: bytes in, bytes out."""

from __future__ import annotations

import stat
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest

from images.build import cpio, kernel, wheels
from images.build.bootstrap import clean
from images.build.builder import add_guest
from images.build.tree import FileTree, from_tar
from images.recipe import parse
from tests.kit.container_images import Layer
from vmjobs.errors import BuildError

RECIPE = parse(
    'name = "x"\nversion = "1"\nsuite = "bookworm"\nepoch = 0\npackages = ["a1"]\ndrop = ["opt/junk/*"]'
)


def test_a_tar_becomes_a_tree_with_hard_links_shared_and_devices_left_out(path: Path) -> None:
    layer = Layer().folder("./usr/bin").symlink("./bin", "usr/bin")
    layer.file("./usr/bin/a", "data", 0o2755, gid=42).link("./usr/bin/b", "./usr/bin/a")
    path.write_bytes(layer.add("./dev/null", tarfile.CHRTYPE).tar())
    tree = from_tar(path)
    assert tree.nodes["usr/bin/a"] is tree.nodes["usr/bin/b"]
    assert tree.nodes["usr/bin/a"].mode == stat.S_IFREG | 0o2755
    assert tree.nodes["usr/bin/a"].gid == 42
    assert tree.file("bin/b").read() == b"data"
    assert "dev/null" not in tree.nodes


def test_links_are_followed_and_circles_end() -> None:
    tree = FileTree()
    tree.add_dir("usr/sbin")
    tree.add_link("sbin", "usr/sbin")
    tree.add_link("usr/sbin/tool", "/opt/../usr/real")
    tree.add_file("sbin/init", b"#!")
    tree.add_file("usr/real", b"real")
    tree.add_link("a", "b")
    tree.add_link("b", "a")
    assert "usr/sbin/init" in tree.nodes
    assert tree.file("sbin/tool").read() == b"real"
    with pytest.raises(BuildError):
        tree.file("a")
    with pytest.raises(BuildError):
        tree.add_file("a/x", b"")


@pytest.mark.parametrize(
    ("busybox", "shell"),
    [
        (b"..BusyBox v1.37.0 (Debian 1:1.37.0-6)..", b"#!/bin/busybox sh"),
        (b"..BusyBox v1.38.0 (Debian 1:1.38.0-3)..", b"#!/bin/sh"),
        (b"something else", b"#!/bin/sh"),
        (None, b"#!/bin/sh"),
    ],
)
def test_the_guest_program_has_a_shell_that_works(busybox: bytes | None, shell: bytes) -> None:
    tree = FileTree()
    tree.add_dir("usr/bin")
    tree.add_link("bin", "usr/bin")
    if busybox is not None:
        tree.add_file("bin/busybox", busybox)
    add_guest(tree, RECIPE, {"init.sh": b"#!/bin/sh\necho hello\n"})
    assert tree.file("sbin/vmjobs-init").read() == shell + b"\necho hello\n"


def test_what_would_differ_between_builds_is_taken_out() -> None:
    tree = FileTree()
    for path in ("etc/machine-id", "etc/hostname", "var/log/apt/x", "usr/share/doc/a/b", "opt/junk/x"):
        tree.add_file(path, b"x")
    tree.add_file("usr/lib/a.py", b"x")
    checked = b"MAGC" + struct.pack("<I", 3) + b"h" * 8 + b"code"
    tree.add_file("usr/lib/__pycache__/a.pyc", checked)
    tree.add_file("usr/lib/__pycache__/stale.pyc", b"MAGC" + bytes(12) + b"code")
    clean(tree, RECIPE)
    files = {path: node for path, node in tree.nodes.items() if stat.S_ISREG(node.mode)}
    assert set(files) == {"usr/lib/a.py", "usr/lib/__pycache__/a.pyc"}
    assert files["usr/lib/__pycache__/a.pyc"].content.read()[4:8] == struct.pack("<I", 1)
    assert tree.nodes["tmp"].mode == stat.S_IFDIR | 0o1777
    assert not [path for path in tree.nodes if path.startswith("dev/")]


def test_a_cpio_archive_has_the_format_that_the_kernel_reads() -> None:
    tree = FileTree()
    tree.add_file("init", b"#!/bin/sh\n", 0o755)
    tree.add_link("bin/sh", "busybox")
    data = cpio.archive(tree, epoch=1000)
    assert len(data) % 512 == 0
    assert data == cpio.archive(tree, epoch=1000)
    found, offset = {}, 0
    while True:
        assert data[offset : offset + 6] == b"070701"
        fields = [int(data[offset + 6 + 8 * n : offset + 14 + 8 * n], 16) for n in range(13)]
        name = data[offset + 110 : offset + 110 + fields[11] - 1].decode()
        begin = (offset + 110 + fields[11] + 3) // 4 * 4
        offset = (begin + fields[6] + 3) // 4 * 4
        if name == "TRAILER!!!":
            break
        assert fields[5] == 1000
        found[name] = (fields[1], data[begin : begin + fields[6]])
    assert found["init"] == (stat.S_IFREG | 0o755, b"#!/bin/sh\n")
    assert found["bin/sh"] == (stat.S_IFLNK | 0o777, b"busybox")
    assert list(found) == [".", "bin", "bin/sh", "init"]


def module(depends: str) -> bytes:
    return f"\x7fELF\x02\x01\0license=GPL\0depends={depends}\0name=x\0".encode()


def test_modules_are_loaded_after_those_they_need() -> None:
    files = kernel.KernelFiles(
        "6.1",
        b"kernel",
        {
            "virtio_net": module("net-failover,virtio"),
            "net_failover": module("failover"),
            "failover": module(""),
            "virtio": module("built_in"),
        },
        frozenset({"built_in"}),
    )
    order = [name for name, _ in kernel.load_order(files, ["virtio", "virtio_net"])]
    assert order == ["virtio", "failover", "net_failover", "virtio_net"]
    with pytest.raises(BuildError, match="no module nothing, which the recipe needs"):
        kernel.load_order(files, ["nothing"])
    with pytest.raises(BuildError, match="ELF"):
        kernel.depends(b"not a module")


def test_names_of_modules() -> None:
    assert kernel.module_name("kernel/crypto/crc32c-intel.ko.xz") == "crc32c_intel"
    assert kernel.module_name("virtio_blk.ko") == "virtio_blk"


def wheel(folder: Path, *names: str) -> Path:
    file = folder / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return file


def test_a_wheel_is_laid_out_as_pip_would(tmp_path: Path) -> None:
    file = wheel(
        tmp_path, "x.py", "x-1.data/data/share/d", "x-1.data/scripts/run", "x-1.data/headers/h", "x-1/R"
    )
    tree = FileTree()
    wheels.install(tree, file, "/opt/py")
    assert {p for p, n in tree.nodes.items() if not n.is_dir} == {
        "opt/py/x.py",
        "opt/py/share/d",
        "usr/local/bin/run",
        "opt/py/x-1/R",
    }


@pytest.mark.parametrize(
    ("names", "why"),
    [(("../up", "a/../../up", "/abs"), "outside"), (("a//b", "a/./b", "./a", "a/."), "invalid name")],
)
def test_a_wheel_has_plain_names_and_writes_nowhere_else(
    tmp_path: Path, names: tuple[str, ...], why: str
) -> None:
    for name in names:
        with pytest.raises(BuildError, match=why):
            wheels.install(FileTree(), wheel(tmp_path, name), "/opt/py")


def test_a_wheel_cannot_replace_a_directory(tmp_path: Path) -> None:
    tree = FileTree()
    tree.add_file("opt/py/x/inside", b"")
    with pytest.raises(BuildError, match="is a directory"):
        wheels.install(tree, wheel(tmp_path, "x"), "/opt/py")
    tree.add_file("opt/py/y", b"")
    with pytest.raises(BuildError, match="which is not a directory"):
        wheels.install(tree, wheel(tmp_path, "y/z"), "/opt/py")


def test_a_wheel_that_would_fill_the_memory_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bomb-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"zeros{number}", bytes(1 << 20))
    monkeypatch.setattr(wheels, "MAX_UNPACKED", 2 << 20)
    tree = FileTree()
    with pytest.raises(BuildError, match="has 3 MiB; the limit is 2 MiB"):
        wheels.install(tree, file, "/opt/py")
    assert list(tree.nodes) == [""]


def test_a_wheel_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = wheel(tmp_path, "x.py")
    data = bytearray(file.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 8] |= 1  # the flag "encrypted"
    data[data.index(b"PK\x03\x04") + 6] |= 1
    file.write_bytes(bytes(data))
    with pytest.raises(BuildError, match="cannot unpack x-1-py3-none-any"):
        wheels.install(FileTree(), file, "/opt/py")


def test_a_source_that_is_shorter_than_it_was_is_an_error(path: Path) -> None:
    path.write_bytes(Layer().file("a", bytes(10_000)).tar())
    tree = from_tar(path)
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(BuildError, match="ends"):
        tree.file("a").read()
