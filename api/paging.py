"""What lists take that are given in pages."""

from __future__ import annotations

from pydantic import Field

from api.operation import Strict, read_query
from repository.paging import MAX_PAGE, Window


class PageQuery(Strict):
    """Which part of the list."""

    limit: int = Field(MAX_PAGE, ge=1, le=MAX_PAGE, description="entries in a page")
    # PostgreSQL stores no NUL, and so compares nothing with it.
    cursor: str = Field(
        "", max_length=1024, pattern=r"^[^\x00]*$", description="`next` of the page before"
    )


def window() -> Window:
    """The part that the request asks for.  Raises InvalidRequest."""
    query = read_query(PageQuery)
    return Window(query.limit, query.cursor)
