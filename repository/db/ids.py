"""Ids of jobs, arrays and builds: 32 hex digits that sort by time and cannot be guessed."""

from __future__ import annotations

import re
import secrets
import time
from typing import Final

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from vmjobs.errors import AmbiguousId

_PATTERN: Final = re.compile(r"[0-9a-f]{32}")
_BEGINNING: Final = re.compile(r"[0-9a-f]{6,31}")
#: An error lists at most this many matching ids.
MAX_CANDIDATES: Final = 8


def new_ids(count: int) -> list[str]:
    """Return ``count`` new ids, the greatest first: 48 bits of milliseconds, 80 random bits.

    Lists show the newest job first, so they show an array's jobs in the order of their index.
    """
    stamp = f"{time.time_ns() // 1_000_000:012x}"
    return sorted((stamp + secrets.token_hex(10) for _ in range(count)), reverse=True)


def is_id(text: str) -> bool:
    """Whether ``text`` has the form of an id."""
    return _PATTERN.fullmatch(text) is not None


def full_id(
    session: Session, ids: InstrumentedAttribute[str], text: str, *among: ColumnElement[bool]
) -> str:
    """Return the only one of ``ids`` that begins with ``text``; if none does, ``text`` itself.

    among: conditions that select the rows visible to the caller.
    Raises AmbiguousId: several ids begin with it.
    """
    if not _BEGINNING.fullmatch(text):
        return text
    # A range, because the index serves it; "g" sorts behind all hex digits.
    query = select(ids).where(ids.between(text, text + "g"), *among).order_by(ids.desc())
    found = session.scalars(query.limit(MAX_CANDIDATES + 1)).all()
    if len(found) > 1:
        more = " and more" if len(found) > MAX_CANDIDATES else ""
        raise AmbiguousId(
            f"the id {text} is ambiguous: it may be {', '.join(found[:MAX_CANDIDATES])}{more}",
            hint="give more characters of the id",
        )
    return found[0] if found else text
