"""The few statements that SQLite and PostgreSQL have in common and SQLAlchemy's core has not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from sqlalchemy import Row, Table, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session

from repository.models import Base

#: Values in one ``IN (…)``: below what either database takes.
MANY: Final = 4096

T = TypeVar("T")


def batches(items: Sequence[T], count: int = MANY) -> Iterator[Sequence[T]]:
    """The items, ``count`` at a time."""
    for begin in range(0, len(items), count):
        yield items[begin : begin + count]


def add_missing(session: Session, table: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows; those that are there stay as they are.

    Rows that others may insert at the same moment come in the order of their key: two
    transactions that wait for each other's rows never do so crosswise.
    """
    if not rows:
        return
    make = postgresql.insert if _is_postgresql(session) else sqlite.insert
    # Into the table, not the class: what the ORM adds for bulk inserts costs more than they do.
    session.execute(make(cast(Table, table.__table__)).on_conflict_do_nothing(), list(rows))


def put(
    session: Session,
    table: type[Base],
    row: Mapping[str, Any],
    *,
    key: Sequence[str],
    change: Sequence[str],
    returning: Sequence[InstrumentedAttribute[Any]],
) -> Row[Any]:
    """Insert a row, or change those columns of the one that has the key; the row as it is then.

    Either way it is ours until the transaction ends.
    """
    make = postgresql.insert if _is_postgresql(session) else sqlite.insert
    insert: Any = make(cast(Table, table.__table__)).values(**row)
    wanted = {name: insert.excluded[name] for name in change}
    statement = insert.on_conflict_do_update(index_elements=list(key), set_=wanted)
    found: Row[Any] = session.execute(statement.returning(*returning)).one()
    return found


def alone(session: Session, name: str) -> None:
    """Wait until no other transaction is in here under this name; ends with the transaction."""
    if _is_postgresql(session):
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        session.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": number})


def _is_postgresql(session: Session) -> bool:
    return session.get_bind().dialect.name == "postgresql"
