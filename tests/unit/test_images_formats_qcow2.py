"""Attacks with qcow2: each is refused for its own reason."""

from __future__ import annotations

import contextlib
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from formats_kit import Lab, qemu_img, refused

from images.formats import ImageLimits
from images.inspect.inspection import inspect_image

MIB = 1024 * 1024


def be32(value: int) -> bytes:
    return struct.pack(">I", value)


def be64(value: int) -> bytes:
    return struct.pack(">Q", value)


def test_a_backing_file_is_refused(tmp_path: Path) -> None:
    for name, backing in (("absolute", "/etc/passwd"), ("json", 'json:{"driver":"nbd"}')):
        path = tmp_path / name
        qemu_img("create", "-q", "-f", "qcow2", "-u", "-b", backing, "-F", "raw", path, "1M")
        message = refused(path, "backing_file")
        # The message does not repeat text of the header, which is untrusted.
        assert backing not in message
        refused(path, "backing_file", pinned="qcow2")


def test_an_external_data_file_is_refused(tmp_path: Path) -> None:
    """CVE-2024-32498: the data file may be any file that the service can read."""
    path = tmp_path / "disk"
    options = f"data_file={tmp_path}/data,data_file_raw=on"
    qemu_img("create", "-q", "-f", "qcow2", "-o", options, path, "1M")
    data = path.read_bytes()
    assert str(tmp_path).encode() in data
    refused(path, "external_data_file")


@pytest.mark.slow
def test_encryption_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "luks"
    secret = ("--object", "secret,id=s,data=abc")
    options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"
    make_luks("create", "-q", *secret, "-f", "qcow2", "-o", options, path, "1M")
    refused(path, "encrypted")


def make_luks(*words: str | Path) -> None:
    """Make a LUKS image; QEMU fails if its benchmark is disturbed ("accurate CPU usage")."""
    for _ in range(20):
        with contextlib.suppress(subprocess.CalledProcessError):
            qemu_img(*words)
            return
    pytest.fail("qemu-img makes no LUKS image")


def extension(kind: int, length: int, data: bytes = b"") -> tuple[int, bytes]:
    """Return a header extension that replaces the first one."""
    return 112, be32(kind) + be32(length) + data


V2, V3 = "qcow2-v2", "qcow2-v3"

#: The reason code of a refusal, a sample, and what is written into the sample.
HEADERS: list[tuple[str, str, *tuple[tuple[int, bytes], ...]]] = [
    # incomplete data on a backing file
    ("backing_file", V3, (8, be64(0x200))),
    ("backing_file", V3, (16, be32(11))),
    ("backing_file", V2, (8, be64(0x200)), (16, be32(11))),
    ("backing_file", V3, extension(0xE2792ACA, 3, b"raw".ljust(8, b"\0"))),
    # one of the three places that name it is enough
    ("external_data_file", V3, (72, be64(4))),
    ("external_data_file", V3, (88, be64(2))),
    ("external_data_file", V3, extension(0x44415441, 8, b"/etc/pwd")),
    *[("encrypted", V3, (32, be32(method))) for method in (1, 2, 77)],
    ("encrypted", V3, extension(0x0537BE77, 16)),
    *[("unknown_features", V3, (72, be64(1 << bit))) for bit in (5, 17, 63)],
    ("not_closed", V3, (72, be64(1))),
    ("marked_corrupt", V3, (72, be64(2))),
    ("internal_snapshots", V2, (60, be32(0xFFFFFFFF))),
    ("is_qcow", V3, (4, be32(1))),
    *[("unknown_version", V3, (4, be32(version))) for version in (0, 4, 0xFFFFFFFF)],
    *[("cluster_size", V3, (20, be32(bits))) for bits in (0, 8, 22, 31, 63, 0xFFFFFFFF)],
    *[("cluster_size", V2, (20, be32(bits))) for bits in (0, 8, 22, 31, 63, 0xFFFFFFFF)],
    ("cluster_size", "qcow2-4k", (72, be64(16))),  # extended tables need large clusters
    ("no_size", V3, (24, be64(0))),
    ("odd_size", V3, (24, be64(1))),
    *[("disk_too_large", V3, (24, be64(n))) for n in (1 << 50, (1 << 63) - 512, (1 << 64) - 512)],
    # a size that the tables do not cover
    ("l1_size", V3, (24, be64(1 << 40))),
    ("l1_size", V3, (36, be32(0))),
    ("l1_size", V3, (36, be32(0x7FFFFFFF))),
    ("outside_file", V3, (36, be32(1 << 22))),
    ("l1_size", "qcow2-512", (24, be64(1 << 40)), (36, be32(0xFFFFFFFF))),
    # tables outside of the file
    *[("misaligned", V3, (field, be64(n))) for field in (40, 48) for n in (0, 513)],
    *[("outside_file", V3, (at, be64(n))) for at in (40, 48) for n in (1 << 40, (1 << 64) - 65536)],
    ("refcount_table", V3, (56, be32(0))),
    ("refcount_table", V3, (56, be32(0xFFFFFFFF))),
    ("outside_file", V3, (56, be32(100))),
    ("refcount_order", V3, (96, be32(7))),
    *[("header_size", V3, (100, be32(size))) for size in (0, 72, 105, 65536 + 8, 0xFFFFFFF8)],
    ("compression", V3, (104, b"\x07")),
    ("compression", V3, (104, b"\x01")),
    ("compression", V3, (72, be64(8))),
    *[("header_extension", V3, extension(0x12345678, n)) for n in (65536, 0x7FFFFFFF, 0xFFFFFFFF)],
]


@pytest.mark.parametrize("attack", HEADERS, ids=lambda attack: f"{attack[0]}-{attack[1]}")
def test_headers_that_cannot_be_are_refused(
    lab: Lab, attack: tuple[str, str, *tuple[tuple[int, bytes], ...]]
) -> None:
    code, sample, *patches = attack
    message = refused(lab.patched(sample, *patches), code)
    if code == "unknown_features":
        assert hex(int.from_bytes(patches[0][1])) in message


def test_internal_snapshots_and_bitmaps_are_refused(lab: Lab) -> None:
    path = lab.copy("qcow2-v3", "snapshot")
    qemu_img("snapshot", "-c", "one", path)
    assert "1 internal snapshots" in refused(path, "internal_snapshots")
    path = lab.copy("qcow2-v3", "bitmap")
    qemu_img("bitmap", "--add", path, "b0")
    refused(path, "bitmaps")


def l1_of(data: bytearray) -> int:
    return int(struct.unpack_from(">Q", data, 40)[0])


def l2_of(data: bytearray) -> int:
    return int(struct.unpack_from(">Q", data, l1_of(data))[0]) & 0x00FFFFFFFFFFFE00


def allocated(data: bytearray, width: int = 8) -> list[int]:
    """Return the offsets of second-level entries that name a cluster."""
    table = l2_of(data)
    places = range(table, table + (1 << data[23]), width)
    return [place for place in places if struct.unpack_from(">Q", data, place)[0]]


def entry(offset: int) -> bytes:
    return be64(offset | 1 << 63)


Attack = tuple[str, int, bytes]


def on_tables(data: bytearray) -> list[Attack]:
    """Return reason codes of refusals, with an offset and what is written there."""
    l1, l2, (refcounts,) = l1_of(data), l2_of(data), struct.unpack_from(">Q", data, 48)
    one, other, *_ = allocated(data)
    return [
        *[("overlap", l1, entry(table)) for table in (l1, refcounts)],  # L1 or refcounts
        ("overlap", l2, entry(l2)),
        ("overlap", other, bytes(data[one : one + 8])),
        ("outside_file", one, entry(1 << 40)),
        ("outside_file", l1, entry(1 << 40)),
        ("misaligned", one, entry(65536 * 5 + 512)),
        ("misaligned", l1, entry(65536 + 512)),
        *[("overlap", one, entry(table)) for table in (l1, l2, 65536, 2 * 65536)],  # data in a table
        ("reserved_bits", l1, entry(l2 | 2)),
        ("reserved_bits", one, entry(65536 * 5 | 1 << 57)),
        ("reserved_bits", int(refcounts), be64(65536 * 2 | 4)),
    ]


def on_a_table_twice(data: bytearray) -> list[Attack]:
    """Use one table repeatedly, like a zip bomb."""
    first = bytes(data[l1_of(data) : l1_of(data) + 8])
    assert struct.unpack(">Q", first)[0]
    return [("overlap", l1_of(data) + 16, first)]


def on_subclusters(data: bytearray) -> list[Attack]:
    empty = l2_of(data) + (1 << data[23]) - 16
    used = allocated(data, 16)[0]
    return [("reserved_bits", used + 8, b"\xff" * 8), ("reserved_bits", empty + 8, be64(1))]


def on_compressed(data: bytearray) -> list[Attack]:
    one, other, *_ = [place for place in allocated(data) if data[place] & 0x40]
    return [
        *[("outside_file", one, be64(n)) for n in (1 << 62 | 1 << 40, 1 << 62 | 16, (1 << 63) - 1)],
        ("overlap", one, bytes(data[other : other + 8])),
        ("overlap", one, be64(1 << 62 | l2_of(data) + 24)),
    ]


@pytest.mark.parametrize(
    ("sample", "attacks"),
    [
        (V3, on_tables),
        (V2, lambda data: [("reserved_bits", allocated(data)[0], entry(65536 * 5 | 1))]),
        ("qcow2-4k", on_a_table_twice),
        ("qcow2-extended", on_subclusters),
        ("qcow2-compressed", on_compressed),
    ],
)
def test_tables_that_cannot_be_are_refused(
    lab: Lab, sample: str, attacks: Callable[[bytearray], list[Attack]]
) -> None:
    for code, place, new in attacks(lab.data(sample)):
        refused(lab.patched(sample, (place, new)), code)


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    """zstd packs 64 MiB of one letter into some KiB, and a file may hold much of that."""
    raw, bomb = tmp_path / "raw", tmp_path / "bomb"
    raw.write_bytes(b"A" * 64 * MIB)
    options = "compression_type=zstd,cluster_size=2M"
    qemu_img("convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options, raw, bomb)
    limits = ImageLimits(expansion_floor=16 * MIB, expansion=4)
    assert inspect_image(bomb).allocated == 64 * MIB
    refused(bomb, "expands_too_much", limits=limits)
