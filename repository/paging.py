"""Pages of lists: how much of a list is given at once, and where the next part begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from vmjobs.errors import Fault, InvalidRequest

T = TypeVar("T")

#: Entries of the longest page.
MAX_PAGE: Final = 1000


class Window(NamedTuple):
    """Which part of a list. limit: entries at most. cursor: of the page before; empty: the first."""

    limit: int = MAX_PAGE
    cursor: str = ""

    @property
    def rows(self) -> int:
        """What to ask for: one more than fit tells that there is a next page."""
        return self.limit + 1

    def cut(self, rows: Sequence[T], cursor_of: Callable[[T], str]) -> tuple[Sequence[T], str]:
        """The page, and the cursor of the next one; empty where there is none."""
        more = len(rows) > self.limit
        return rows[: self.limit], cursor_of(rows[self.limit - 1]) if more else ""


def all_pages(page: Callable[[Window], tuple[Sequence[T], str]]) -> list[T]:
    """A whole list, a page after the other."""
    found: list[T] = []
    cursor = ""
    while True:
        some, cursor = page(Window(cursor=cursor))
        found += some
        if not cursor:
            return found


def bad_cursor() -> InvalidRequest:
    """The error for a cursor that no page gave."""
    fault = Fault("cursor", "bad_cursor", "use what an earlier page gave as `next`")
    return InvalidRequest("the cursor is none of ours", faults=[fault])
