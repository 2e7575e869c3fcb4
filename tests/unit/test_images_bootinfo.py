"""Boot detection from a disk's first sectors: real partition tables and file systems."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from images.inspect.bootinfo import BootInfo, detect_boot, detect_boot_of_bytes
from vmjobs.model import MIB, BootMethod

ESP = "C12A7328-F81F-11D2-BA4B-00A0C93EC93B"
BIOS_BOOT = "21686148-6449-6E6F-744E-656564454649"
ROOT = "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709"


def made(tmp_path: Path, table: str, *, code: bool = False) -> Path:
    path = tmp_path / "disk"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["/usr/sbin/sfdisk", "-q", path], input=table.encode(), check=True, timeout=60)
    if code:
        with path.open("r+b") as file:
            file.write(b"\xeb\x63\x90")
    return path


def mkfs(path: Path, kind: str, label: str, offset: int = 0, mib: int = 16) -> None:
    """Make a file system in a file of its own, and copy it to ``offset``."""
    own = path.with_name(f"{path.name}.{kind}")
    with own.open("wb") as file:
        file.truncate(mib * MIB)
    option = "-n" if kind == "vfat" else "-L"
    subprocess.run(
        [f"/usr/sbin/mkfs.{kind}", option, label, own], check=True, capture_output=True, timeout=60
    )
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(offset)
        file.write(own.read_bytes())


def test_a_cloud_image_boots_by_bios_and_uefi(tmp_path: Path) -> None:
    table = f"label: gpt\nsize=1M, type={BIOS_BOOT}\nsize=20M, type={ESP}\ntype={ROOT}\n"
    path = made(tmp_path, table, code=True)
    mkfs(path, "vfat", "EFI", 2 * MIB)
    mkfs(path, "ext4", "root", 22 * MIB)
    found = detect_boot(path)
    assert found.methods == (BootMethod.BIOS, BootMethod.UEFI, BootMethod.KERNEL)
    assert found.boot is BootMethod.BIOS
    assert found.partition == 3
    assert found.table == "gpt"
    assert [(v.kind, v.filesystem, v.label) for v in found.partitions] == [
        ("BIOS boot", "", ""),
        ("EFI system", "vfat", "EFI"),
        ("Linux root", "ext4", "root"),
    ]
    assert found.partitions[2].begin == 22 * MIB


def test_without_boot_code_there_is_no_bios(tmp_path: Path) -> None:
    table = f"label: gpt\nsize=20M, type={ESP}\ntype={ROOT}\n"
    found = detect_boot(made(tmp_path, table))
    assert found.boot is BootMethod.UEFI
    assert "no boot code" in found.why


def test_an_old_disk_boots_by_bios(tmp_path: Path) -> None:
    found = detect_boot(made(tmp_path, "label: dos\ntype=83, bootable\n", code=True))
    assert (found.boot, found.table, found.partition) == (BootMethod.BIOS, "mbr", 1)


def test_a_disk_without_any_boot_loader_needs_a_kernel(tmp_path: Path) -> None:
    path = made(tmp_path, "label: dos\nsize=8M, type=82\nsize=16M, type=83\nsize=20M, type=83\n")
    mkfs(path, "ext4", "small", 9 * MIB)
    found = detect_boot(path)
    assert found.boot is BootMethod.KERNEL
    # The one with a file system, though another is larger.
    assert found.partition == 2


def test_logical_partitions_are_seen(tmp_path: Path) -> None:
    table = "label: dos\nsize=8M, type=83\ntype=5\nsize=8M, type=83\nsize=8M, type=83\n"
    path = made(tmp_path, table)
    numbers = [volume.number for volume in detect_boot(path).partitions]
    assert numbers[0] == 1
    assert len(numbers) >= 3


def test_circles_of_logical_partitions_end() -> None:
    disk = bytearray(8192)
    for sector in (0, 1, 2):
        disk[sector * 512 + 510 : sector * 512 + 512] = b"\x55\xaa"
    disk[450], disk[454:462] = 5, b"\1\0\0\0\x10\0\0\0"
    for sector, following in ((1, 1), (2, 0)):
        entry = sector * 512 + 446
        disk[entry + 4], disk[entry + 8 : entry + 16] = 0x83, b"\1\0\0\0\1\0\0\0"
        disk[entry + 20], disk[entry + 24 : entry + 32] = 5, bytes([following]) + b"\0\0\0\1\0\0\0"
    assert [v.number for v in detect_boot_of_bytes(bytes(disk)).partitions] == [5, 6]


@pytest.mark.parametrize("kind", ["ext2", "ext3", "ext4"])
def test_a_file_system_by_itself_needs_a_kernel(path: Path, kind: str) -> None:
    mkfs(path, kind, "rootfs")
    assert detect_boot(path) == BootInfo(
        boot=BootMethod.KERNEL,
        why=f"the disk is one file system ({kind}): it boots with a separate kernel",
        methods=(BootMethod.KERNEL,),
        filesystem=kind,
        label="rootfs",
    )


def test_what_nothing_boots_from_is_said(path: Path) -> None:
    mkfs(path, "vfat", "STICK")
    found = detect_boot(path)
    assert (found.boot, found.filesystem, found.label) == (None, "vfat", "STICK")
    assert found.is_disk
    assert not detect_boot_of_bytes(bytes(MIB)).is_disk


def test_labels_are_fit_for_terminals(path: Path) -> None:
    mkfs(path, "ext4", "x")
    with path.open("r+b") as file:
        file.seek(1024 + 0x78)
        file.write(b"\x1b[31mred\x07\xff\n")
    assert detect_boot(path).label == "[31mred\ufffd"
