"""Statements that SQLite and PostgreSQL share and SQLAlchemy's core lacks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from sqlalchemy import Row, Table, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session

from repository.db.models import Base

#: Values in one ``IN (…)``: below the limits of both databases.
MAX_IN_VALUES: Final = 4096

T = TypeVar("T")


def batches(items: Sequence[T], count: int = MAX_IN_VALUES) -> Iterator[Sequence[T]]:
    """Yield the items, ``count`` at a time."""
    for begin in range(0, len(items), count):
        yield items[begin : begin + count]


def add_missing(session: Session, table: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows; existing rows stay unchanged.

    Callers sort rows by key where other transactions may insert the same ones, so that two
    transactions never deadlock.
    """
    if not rows:
        return
    make = postgresql.insert if _is_postgresql(session) else sqlite.insert
    # Into the table, not the class: the ORM's overhead for bulk inserts exceeds their own cost.
    session.execute(make(cast(Table, table.__table__)).on_conflict_do_nothing(), list(rows))


def upsert(
    session: Session,
    table: type[Base],
    row: Mapping[str, Any],
    *,
    key: Sequence[str],
    change: Sequence[str],
    returning: Sequence[InstrumentedAttribute[Any]] = (),
) -> Row[Any]:
    """Insert a row, or change columns of the row with the same key; return the resulting row.

    The row is locked until the transaction ends. returning: columns; none: the key.
    """
    make = postgresql.insert if _is_postgresql(session) else sqlite.insert
    into = cast(Table, table.__table__)
    insert: Any = make(into).values(**row)
    wanted = {name: insert.excluded[name] for name in change}
    statement = insert.on_conflict_do_update(index_elements=list(key), set_=wanted)
    columns: Sequence[Any] = returning if returning else [into.c[name] for name in key]
    found: Row[Any] = session.execute(statement.returning(*columns)).one()
    return found


def take_transaction_lock(session: Session, name: str) -> None:
    """Wait for a lock of this name, which ends with the transaction."""
    if _is_postgresql(session):
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        session.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": number})


def _is_postgresql(session: Session) -> bool:
    return session.get_bind().dialect.name == "postgresql"
