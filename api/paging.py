"""Query parameters of lists."""

from __future__ import annotations

from pydantic import Field

from api.operation import read_query
from repository.db.paging import MAX_PAGE, PageRequest
from vmjobs.model import FrozenModel


class PageQuery(FrozenModel):
    """The requested part of a list."""

    limit: int = Field(MAX_PAGE, ge=1, le=MAX_PAGE, description="entries in a page")
    # PostgreSQL can neither store nor compare NUL.
    cursor: str = Field(
        "", max_length=1024, pattern=r"^[^\x00]*$", description="`next` of the page before"
    )


class EventQuery(FrozenModel):
    """The events to list."""

    after: int = Field(0, ge=0, le=2**31 - 1, description="only events with a larger `seq`")


def requested_window() -> PageRequest:
    """Return the requested part.  Raises InvalidRequest."""
    query = read_query(PageQuery)
    return PageRequest(query.limit, query.cursor)
