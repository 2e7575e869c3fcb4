"""Images to attack with: genuine ones by qemu-img, and changes to their bytes."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal

import pytest

from images.formats import ImageLimits
from images.formats.vhdx import crc32c
from images.inspect.inspection import inspect_image
from tests.kit.once_per_run import once
from vmjobs.errors import ImageRejected

SIZE = 8 * 1024 * 1024
KIB64 = 64 * 1024
HUGE32 = 0xFFFFFFFF

#: name -> qemu-img's arguments.
MADE = {
    "raw": ("raw",),
    "qcow2-v2": ("qcow2", "-o", "compat=0.10"),
    "qcow2-v3": ("qcow2", "-o", "compat=1.1"),
    "qcow2-compressed": ("qcow2", "-c"),
    "qcow2-zstd": ("qcow2", "-c", "-o", "compression_type=zstd"),
    "qcow2-2M": ("qcow2", "-o", "cluster_size=2M"),
    "qcow2-4k": ("qcow2", "-o", "cluster_size=4k"),
    "qcow2-512": ("qcow2", "-o", "cluster_size=512"),
    "qcow2-extended": ("qcow2", "-o", "extended_l2=on,cluster_size=128k"),
    "qcow2-lazy": ("qcow2", "-o", "lazy_refcounts=on"),
    "qcow2-falloc": ("qcow2", "-o", "preallocation=metadata"),
    "vmdk-sparse": ("vmdk", "-o", "subformat=monolithicSparse"),
    "vmdk-stream": ("vmdk", "-o", "subformat=streamOptimized"),
    "vmdk-zeroed": ("vmdk", "-o", "zeroed_grain=on"),
    "vdi-dynamic": ("vdi",),
    "vdi-static": ("vdi", "-o", "static=on"),
    "vhdx-dynamic": ("vhdx", "-o", "block_size=1M"),
    "vhdx-fixed": ("vhdx", "-o", "subformat=fixed"),
}

#: All formats have their headers and tables below this offset: damage elsewhere is only data.
HOT = 400_000
INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 64) - 1)


def le16(value: int) -> bytes:
    return struct.pack("<H", value)


def le32(value: int) -> bytes:
    return struct.pack("<I", value)


def le64(value: int) -> bytes:
    return struct.pack("<Q", value)


#: What is written where into a sample; and the code of a refusal, with patches that cause it.
Patch = tuple[int, bytes]
Attack = tuple[str, *tuple[Patch, ...]]
#: Yields attacks on a sample, given its bytes.
Attacks = Callable[[bytearray], Iterator[Attack]]


def each(code: str, offset: int, pack: Callable[[int], bytes], *values: int) -> Iterator[Attack]:
    """Yield an attack for each value of one field."""
    for value in values:
        yield code, (offset, pack(value))


def of_each(attacks: dict[str, tuple[Attacks, ...]]) -> list[tuple[str, Attacks]]:
    """Return pairs of a sample and one of its attacks, as pytest's parameters."""
    return [(sample, one) for sample, several in attacks.items() for one in several]


def disk() -> bytes:
    """A small disk: a boot sector, text, incompressible data, and zeros between them."""
    data = bytearray(SIZE)
    data[510:512] = b"\x55\xaa"
    data[446:462] = bytes.fromhex("80000000 83000000 00080000 00200000".replace(" ", ""))
    data[1024 * 1024 : 1024 * 1024 + 400_000] = b"some text, again and again. " * 14285 + bytes(20)
    noise, state = bytearray(), 1
    while len(noise) < 300_000:
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        noise += state.to_bytes(8, "little")
    data[5_000_192 : 5_000_192 + len(noise)] = noise
    return bytes(data)


def qemu_img(*words: str | Path) -> None:
    subprocess.run(["qemu-img", *map(str, words)], check=True, capture_output=True, timeout=60)


def make_all(directory: Path) -> dict[str, Path]:
    """Make all samples; returns them by name."""
    raw = directory / "raw"
    raw.write_bytes(disk())
    for name, (format_, *options) in MADE.items():
        if name != "raw":
            qemu_img("convert", "-f", "raw", "-O", format_, *options, raw, directory / name)
    return {name: directory / name for name in MADE}


def damage(data: bytearray, chance: random.Random) -> bytes:
    """Change some bytes, numbers or pieces, and perhaps the length."""
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(min(len(data), chance.choice((128, 512, 4096, 70_000, HOT))))
        kind = chance.randrange(4)
        if kind == 0:
            data[place] = chance.randrange(256)
        elif kind == 1:
            width = chance.choice((2, 4, 8))
            order: Literal["little", "big"] = "little" if chance.random() < 0.5 else "big"
            value = chance.choice(INTERESTING) + chance.randint(-1, 1)
            data[place : place + width] = (value % (1 << 8 * width)).to_bytes(width, order)
        elif kind == 2:
            other, length = chance.randrange(min(len(data), HOT)), chance.randrange(64)
            data[place : place + length] = data[other : other + length]
        else:
            data[place] ^= 1 << chance.randrange(8)
    if data.startswith(b"vhdxfile"):
        damage_vhdx(data, chance)
    if chance.random() < 0.15:
        del data[chance.randrange(len(data)) :]
    return bytes(data)


def damage_vhdx(data: bytearray, chance: random.Random) -> None:
    """Damage the fields of a VHDX, and mostly correct the checksums afterwards."""
    headers, tables = (KIB64, 2 * KIB64), (3 * KIB64, 4 * KIB64)
    bat, metadata = 2 * 1024 * 1024, 3 * 1024 * 1024
    for _ in range(chance.randint(0, 3)):
        places, length = chance.choice(
            ((headers, 80), (tables, 96), ((metadata,), 200), ((metadata + KIB64,), 64), ((bat,), 64))
        )
        field = chance.randrange(8, length) & ~3
        width = chance.choice((2, 4, 8))
        value = (chance.choice(INTERESTING) + chance.randint(-1, 1)) % (1 << 8 * width)
        for place in places:
            data[place + field : place + field + width] = value.to_bytes(width, "little")
    if chance.random() < 0.9:
        seal_vhdx(data)


#: Offset and length of each part of a VHDX that has a checksum.
VHDX_SEALED = ((KIB64, 4096), (2 * KIB64, 4096), (3 * KIB64, KIB64), (4 * KIB64, KIB64))


def seal_vhdx(data: bytearray) -> None:
    """Correct all checksums of a VHDX."""
    for begin, length in VHDX_SEALED:
        data[begin + 4 : begin + 8] = checksum_of(data[begin : begin + length])


def checksum_of(part: bytearray) -> bytes:
    part[4:8] = bytes(4)
    return crc32c(bytes(part)).to_bytes(4, "little")


def with_checksums(data: bytearray, patches: Sequence[Patch]) -> list[Patch]:
    """Add the checksums that a VHDX has to have after these patches."""
    found = list(patches)
    for begin, length in VHDX_SEALED if data.startswith(b"vhdxfile") else ():
        if any(begin <= offset < begin + length for offset, _ in patches):
            part = data[begin : begin + length]
            for offset, new in patches:
                if begin <= offset < begin + length:
                    part[offset - begin : offset - begin + len(new)] = new
            found.append((begin + 4, checksum_of(part)))
    return found


class Lab:
    """Samples, and copies of them with some bytes changed."""

    def __init__(self, samples: dict[str, Path], directory: Path) -> None:
        self.samples = samples
        self.directory = directory
        self._count = 0

    def data(self, name: str) -> bytearray:
        return bytearray(self.samples[name].read_bytes())

    def patched(self, name: str, *patches: tuple[int, bytes]) -> Path:
        """Copy a sample and overwrite bytes, each at its offset."""
        data = self.data(name)
        for offset, new in patches:
            data[offset : offset + len(new)] = new
        return self.file(bytes(data))

    def attack(self, name: str, attacks: Attacks) -> None:
        """Check that each attack on a sample is refused with its code."""
        data = self.data(name)
        path = self.file(bytes(data))
        with path.open("r+b", buffering=0) as file:
            for code, *patches in attacks(data):
                changed = with_checksums(data, patches)
                before = [(offset, bytes(data[offset : offset + len(new)])) for offset, new in changed]
                overwrite(file, changed)
                refused(path, code)
                overwrite(file, before)

    def file(self, data: bytes) -> Path:
        self._count += 1
        path = self.directory / f"attack-{self._count}"
        path.write_bytes(data)
        return path

    def copy(self, name: str, to: str) -> Path:
        return Path(shutil.copy(self.samples[name], self.directory / to))


def overwrite(file: IO[bytes], patches: Sequence[Patch]) -> None:
    for offset, new in patches:
        os.pwrite(file.fileno(), new, offset)


def refused(
    path: Path, code: str, *, pinned: str | None = None, limits: ImageLimits | None = None
) -> str:
    """Check the refusal's code; returns its message."""
    with pytest.raises(ImageRejected) as caught:
        inspect_image(path, pinned, limits)
    assert caught.value.faults[0].code == code, caught.value.message
    assert caught.value.message == caught.value.faults[0].message
    assert caught.value.exit_code == 65
    return caught.value.message


def stream_with_footer(lab: Lab, *patches: tuple[int, bytes]) -> Path:
    """The stream as VMware writes it: only its end says where the tables are."""
    data = lab.data("vmdk-stream")
    header = bytearray(data[:512])
    data[56:64] = b"\xff" * 8
    for offset, new in patches:
        header[offset : offset + len(new)] = new
    marker = struct.pack("<QII", 1, 0, 3).ljust(512, b"\0")
    return lab.file(bytes(data[: len(data) // 512 * 512]) + marker + bytes(header) + bytes(512))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many bytes each call reads from files."""
    pread, found = os.pread, list[int]()

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        data = pread(descriptor, length, offset)
        found.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    return found


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One image in every format and kind, all of the same disk."""

    def make() -> list[str]:
        folder = tmp_path_factory.mktemp("samples")
        make_all(folder)
        return [str(folder)]

    (folder,) = once(tmp_path_factory, "samples", make)
    return {name: Path(folder, name) for name in MADE}


@pytest.fixture
def lab(samples: dict[str, Path], tmp_path: Path) -> Lab:
    return Lab(samples, tmp_path)
