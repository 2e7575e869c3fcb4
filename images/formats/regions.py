"""Who owns which part of a file: finds tables and data that lie on top of each other."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import pairwise

from images.formats.base import refusal


class Regions:
    """Named, disjoint ranges of a file. Meant for some thousands of ranges."""

    def __init__(self, file_size: int) -> None:
        self._file_size = file_size
        self._ranges: list[tuple[int, int, str]] = []

    def add(self, begin: int, length: int, what: str) -> None:
        """Take a range.

        Raises:
            ImageRejected: it leaves the file, or is another's.
        """
        if length <= 0:
            return
        end = begin + length
        if begin < 0 or end > self._file_size:
            raise refusal(
                "outside_file",
                f"{what} is said to be at bytes {begin} to {end}, outside of the file "
                f"of {self._file_size} bytes",
            )
        place = bisect_right(self._ranges, (begin, end, what))
        for other_begin, other_end, other in self._ranges[max(0, place - 1) : place + 1]:
            if begin < other_end and other_begin < end:
                raise refusal("overlap", f"{what} lies on top of {other}")
        insort(self._ranges, (begin, end, what))

    def check(self, begins: array[int], length: int, what: str) -> None:
        """Whether pieces of one length are disjoint from all ranges, and from each other.

        begins: their offsets. A piece that begins in the file may reach over its end.
        Raises ImageRejected.
        """
        ordered = array("Q", sorted(begins))
        if ordered and ordered[-1] >= self._file_size:
            raise refusal(
                "outside_file", f"{what} is said to be at byte {ordered[-1]}, outside of the file"
            )
        for before, after in pairwise(ordered):
            if after - before < length:
                raise refusal("overlap", f"{what}, at byte {after}, lies on top of another")
        for begin, end, other in self._ranges:
            place = bisect_left(ordered, end)
            if place and ordered[place - 1] + length > begin:
                raise refusal("overlap", f"{what} lies on top of {other}")

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Begin and length of all that was added."""
        for begin, end, _ in self._ranges:
            yield begin, end - begin


class Units:
    """Which units (clusters, grains, blocks) of a file are taken: one bit a unit, one owner each."""

    def __init__(self, file_size: int, unit: int) -> None:
        self.unit = unit
        self._count = -(-file_size // unit)
        self._taken = bytearray(-(-self._count // 8))

    def take(self, offset: int, what: str) -> None:
        """Take the unit that begins at ``offset``.

        Raises:
            ImageRejected: it is outside of the file, not a unit's begin, or taken already.
        """
        number, rest = divmod(offset, self.unit)
        if rest:
            raise refusal("misaligned", f"{what} begins at byte {offset}, where none can begin")
        if number >= self._count:
            raise refusal("outside_file", f"{what} is said to be at byte {offset}, outside of the file")
        bit = 1 << (number & 7)
        if self._taken[number >> 3] & bit:
            raise refusal("overlap", f"{what}, at byte {offset}, is used for something else as well")
        self._taken[number >> 3] |= bit

    def take_range(self, begin: int, length: int, what: str) -> None:
        """Take all units that ``length`` bytes from ``begin`` touch; see :meth:`take`."""
        for offset in range(begin - begin % self.unit, begin + length, self.unit):
            self.take(offset, what)
