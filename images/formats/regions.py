"""Maps of a file's used ranges, which find overlapping tables and data."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from typing import Final

from images.formats.base import refusal


class FileRegions:
    """Named, disjoint ranges of a file. Meant for some thousands of ranges."""

    def __init__(self, file_size: int) -> None:
        self._file_size = file_size
        self._ranges: list[tuple[int, int, str]] = []

    def add(self, begin: int, length: int, what: str) -> None:
        """Add a range.

        Raises:
            ImageRejected: it is not inside the file, or overlaps with another.
        """
        if length <= 0:
            return
        end = begin + length
        if begin < 0 or end > self._file_size:
            raise refusal(
                "outside_file",
                f"{what} should be at bytes {begin} to {end}, outside of the file "
                f"of {self._file_size} bytes",
            )
        place = bisect_right(self._ranges, (begin, end, what))
        for other_begin, other_end, other in self._ranges[max(0, place - 1) : place + 1]:
            if begin < other_end and other_begin < end:
                raise refusal("overlap", f"{what} overlaps with {other}")
        insort(self._ranges, (begin, end, what))

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield offset and length of each range."""
        for begin, end, _ in self._ranges:
            yield begin, end - begin


_CHUNK: Final = 1024 * 1024


class AllocationMap:
    """The used allocation units (clusters, grains, blocks) of a file, a bit for each.

    base: bytes before the first unit, less than one unit.
    """

    def __init__(self, file_size: int, unit: int, base: int = 0) -> None:
        self.unit = unit
        self._base = base
        self._count = -(-max(0, file_size - base) // unit)
        self._used = bytearray(-(-self._count // 8))

    def mark_once(self, offset: int, what: str) -> None:
        """Mark the unit at ``offset`` as used.

        Raises:
            ImageRejected: the offset is outside of the file or misaligned, or the unit in use.
        """
        number, rest = divmod(offset - self._base, self.unit)
        if rest:
            raise refusal("misaligned", f"{what} begins at byte {offset}, which is misaligned")
        if not 0 <= number < self._count:
            raise refusal("outside_file", f"{what} should be at byte {offset}, outside of the file")
        bit = 1 << (number & 7)
        if self._used[number >> 3] & bit:
            raise refusal("overlap", f"{what} at byte {offset} overlaps with other data")
        self._used[number >> 3] |= bit

    def mark_range(self, begin: int, length: int, what: str) -> None:
        """Mark all units of ``length`` bytes from ``begin``; see :meth:`mark_once`."""
        for offset in range(begin - begin % self.unit, begin + length, self.unit):
            self.mark_once(offset, what)

    def mark(self, offset: int) -> None:
        """Mark the unit that contains ``offset``, which may be in use already."""
        number = (offset - self._base) // self.unit
        if 0 <= number < self._count:
            self._used[number >> 3] |= 1 << (number & 7)

    def overlaps_range(self, begin: int, length: int) -> bool:
        """Whether a used unit overlaps with these bytes."""
        first = max(0, (begin - self._base) // self.unit)
        last = min(self._count - 1, (begin + length - 1 - self._base) // self.unit)
        return any(self._used[n >> 3] >> (n & 7) & 1 for n in range(first, last + 1))

    def overlaps(self, other: AllocationMap) -> bool:
        """Whether a unit is used in both maps, which must be of the same file."""
        for begin in range(0, len(self._used), _CHUNK):
            mine, others = (each._used[begin : begin + _CHUNK] for each in (self, other))
            if int.from_bytes(mine, "little") & int.from_bytes(others, "little"):
                return True
        return False
