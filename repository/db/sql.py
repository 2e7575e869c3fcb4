"""Statements that SQLite and PostgreSQL share and SQLAlchemy's core lacks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeVar, cast

from sqlalchemy import Row, Table, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute, Session

from repository.db.models import Base

#: Values in one ``IN (…)``: below the limits of both databases.
MAX_IN_VALUES: Final = 4096

T = TypeVar("T")


def batches(items: Iterable[T], count: int = MAX_IN_VALUES) -> Iterator[list[T]]:
    """Yield the items, ``count`` at a time."""
    rest = iter(items)
    while some := list(islice(rest, count)):
        yield some


def add_missing(session: Session, table: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows; existing rows stay unchanged.

    Callers sort rows by key where other transactions may insert the same ones, so that two
    transactions never deadlock.
    """
    if not rows:
        return
    session.execute(_insert(session, table).on_conflict_do_nothing(), list(rows))


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
    insert = _insert(session, table).values(**row)
    wanted = {name: insert.excluded[name] for name in change}
    statement = insert.on_conflict_do_update(index_elements=list(key), set_=wanted)
    columns: Sequence[Any] = returning if returning else [table.__table__.c[name] for name in key]
    found: Row[Any] = session.execute(statement.returning(*columns)).one()
    return found


def _insert(session: Session, table: type[Base]) -> Any:
    """Return an INSERT with ON CONFLICT, which each database has in a dialect of its own.

    Into the table, not the class: the ORM's overhead for bulk inserts exceeds their own cost.
    """
    make = postgresql.insert if _is_postgresql(session) else sqlite.insert
    return make(cast(Table, table.__table__))


def take_transaction_lock(session: Session, name: str) -> None:
    """Wait for a lock of this name, which ends with the transaction."""
    if _is_postgresql(session):
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        session.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": number})


def _is_postgresql(session: Session) -> bool:
    return session.get_bind().dialect.name == "postgresql"
