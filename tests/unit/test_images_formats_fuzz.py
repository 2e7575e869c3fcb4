"""Parsers accept or refuse damaged images, without other errors, long reads or delays.

The random numbers are the same in every run.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from images.formats import Format, ImageLimits, inspect
from images.inspect import bootinfo
from images.inspect.inspection import inspect_image
from tests.kit.disk_formats import MADE, Lab, damage
from vmjobs.errors import ImageRejected

ROUNDS = 100
LIMITS = ImageLimits(metadata=16 * 1024 * 1024)


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_damaged_images_are_refused_or_taken(lab: Lab, path: Path, name: str, reads: list[int]) -> None:
    chance = random.Random(f"vmjobs {name}")
    sample = lab.data(name)
    taken = 0
    # Writing large files takes most of the time.
    rounds = ROUNDS if len(sample) < 4 * 1024 * 1024 else ROUNDS // 3
    for number in range(rounds):
        path.write_bytes(damage(bytearray(sample), chance))
        reads.clear()
        began = time.process_time()
        pinned = Format(MADE[name][0]) if number % 2 else None
        try:
            description = inspect(path, pinned, LIMITS)
        except ImageRejected as refused:
            assert len(refused.faults) == 1
            assert refused.faults[0].code
            assert refused.message.isprintable()
        else:
            taken += 1
            assert 0 < description.virtual_size <= LIMITS.virtual_size
            assert 0 <= description.allocated <= description.virtual_size
        assert sum(reads) <= LIMITS.metadata
        assert time.process_time() - began < 5
    # Some damage hits data, or nothing at all; most of it is detected.
    assert taken < rounds or name == "raw"


def test_random_bytes_are_refused_or_taken(path: Path) -> None:
    chance = random.Random("vmjobs")
    marks = (b"QFI\xfb\0\0\0\x02", b"QFI\xfb\0\0\0\x03", b"KDMV\x01\0\0\0", b"vhdxfile", b"")
    for _ in range(300):
        mark = chance.choice(marks)
        data = mark + chance.randbytes(chance.choice((0, 1, 64, 600, 5000, 70_000)))
        if chance.random() < 0.2:
            data = data[:0x40].ljust(0x40, b"\0") + b"\x7f\x10\xda\xbe" + data
        path.write_bytes(data)
        for format_ in (None, *Format):
            try:
                inspect_image(path, format_)
            except ImageRejected as refused:
                assert refused.faults[0].code


def test_no_content_is_an_error_for_boot_hints(lab: Lab) -> None:
    chance = random.Random("boot")
    for _ in range(ROUNDS):
        head = bytearray(chance.randbytes(2048))
        head[510:512] = b"\x55\xaa"
        if chance.random() < 0.5:
            head[446:510] = bytes(64)
            head[450] = chance.choice((0x05, 0xEE, 0x83))
            head[454:462] = b"\1\0\0\0\xff\xff\xff\xff"
            head[512:520] = b"EFI PART"
        for length in (0, 100, 511, 512, 600, 1100, 2048):
            found = bootinfo.detect_boot_of_bytes(bytes(head[:length]))
            assert len(found.partitions) <= 3 * 128 + 4
            assert found.why
    assert bootinfo.detect_boot_of_bytes(b"").boot is None
    with lab.samples["raw"].open("rb") as file:
        assert bootinfo.detect_boot(file).table == "mbr"
