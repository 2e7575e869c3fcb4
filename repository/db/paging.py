"""Paging of lists: size of a page, and cursors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from vmjobs.errors import Fault, InvalidRequest

T = TypeVar("T")

#: Entries of the longest page.
MAX_PAGE: Final = 1000


class PageRequest(NamedTuple):
    """A request for one page. limit: entries at most. cursor: from the page before, or empty."""

    limit: int = MAX_PAGE
    cursor: str = ""

    @property
    def rows(self) -> int:
        """Number of rows to query: one more than the limit shows that there is a next page."""
        return self.limit + 1

    def cut(self, rows: Sequence[T], cursor_of: Callable[[T], str]) -> tuple[Sequence[T], str]:
        """Return the page, and the cursor of the next one; empty if there is none."""
        more = len(rows) > self.limit
        return rows[: self.limit], cursor_of(rows[self.limit - 1]) if more else ""


def bad_cursor() -> InvalidRequest:
    """Return the error for an invalid cursor."""
    fault = Fault("cursor", "bad_cursor", "use what an earlier page gave as `next`")
    return InvalidRequest("the cursor is not valid", faults=[fault])
