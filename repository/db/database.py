"""The database connection: engines, transactions, and translation of errors.

SQLite and PostgreSQL behave alike: a write transaction that has read a job's row excludes other
writers until it ends. PostgreSQL locks the row (``SELECT … FOR UPDATE``), SQLite the database
(``BEGIN IMMEDIATE``).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, DateTime, Engine, create_engine, event, make_url, text
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.types import TypeDecorator

from vmjobs.errors import ConfigError, InvalidRequest, Unavailable

logger = logging.getLogger(__name__)

#: How long to wait for another writer (SQLite) or for a connection (PostgreSQL).
BUSY_SECONDS: Final = 15
CONNECT_SECONDS: Final = 5
#: Options of libpq: notice a server that vanished from the network, and stop waiting for a lock that
#: is never released. Options in the URL take precedence.
_TIMEOUT_OPTIONS: Final = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": BUSY_SECONDS * 1000,
    "options": f"-c lock_timeout={BUSY_SECONDS}s -c idle_in_transaction_session_timeout=60s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """A time in UTC, always with its time zone. SQLite stores none, so this type restores it."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert for the database. Refuses a naive datetime: it would depend on the host."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a datetime without a time zone")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert from the database."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Database:
    """A pool of connections and two kinds of transactions."""

    def __init__(self, url: str) -> None:
        self.url = normal_url(url)
        self.engine = _engine(self.url)
        self._postgresql = self.url.get_backend_name() == "postgresql"
        self._readers = sessionmaker(self.engine, expire_on_commit=False)
        self._writers = sessionmaker(
            self.engine.execution_options(vmjobs_write=True), expire_on_commit=False
        )

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that changes nothing.

        Raises Unavailable("database").
        """
        with translated(), self._readers() as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that commits at the end of the block, or rolls back if it raises.

        Raises Unavailable("database"). IntegrityError passes through: it shows a race that only the
        caller can explain.
        """
        with translated(), self._writers.begin() as session:
            yield session

    @contextmanager
    def exclusive(self, name: str) -> Iterator[bool]:
        """Try to lock a name among all processes on this database; yield whether it succeeds.

        Never waits; the lock ends with the block or with the process, however that ends. Two names
        may, rarely, share a lock, but only if their first words are the same.
        """
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        backend = self._advisory(number) if self._postgresql else self._lock_file(name, number)
        with backend as mine:
            yield mine

    @contextmanager
    def _advisory(self, number: int) -> Iterator[bool]:
        key = {"number": number}
        with translated():
            connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            with translated():
                mine = bool(connection.scalar(text("SELECT pg_try_advisory_lock(:number)"), key))
            try:
                yield mine
            finally:
                if mine:
                    _unlock(connection, key)
        finally:
            connection.close()

    @contextmanager
    def _lock_file(self, name: str, number: int) -> Iterator[bool]:
        directory = Path(str(self.url.database)).parent / "locks"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One file for each name would be too many. But a build holds its lock for an hour, and must
        # not block periodic tasks: so the first word is part of the file name.
        kind = name.partition(" ")[0]
        with (directory / f"{kind}-{number % 1024:03x}").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def ping(self) -> None:
        """Check that the database answers.  Raises Unavailable("database")."""
        with self.read() as session:
            session.execute(text("SELECT 1"))

    def close(self) -> None:
        """Close all idle connections."""
        self.engine.dispose()


def _unlock(connection: Connection, key: dict[str, int]) -> None:
    """Release an advisory lock; if the session broke meanwhile, PostgreSQL has released it."""
    try:
        connection.execute(text("SELECT pg_advisory_unlock(:number)"), key)
    except DBAPIError as error:
        logger.warning("the database session broke while it held a lock: %s", error.orig)
        connection.invalidate()


@contextmanager
def translated() -> Iterator[None]:
    """Translate all SQLAlchemy exceptions but IntegrityError."""
    try:
        yield
    except IntegrityError:
        raise
    except (DataError, OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest("a value cannot be stored: it is too large or not valid text") from error
    except (DBAPIError, PoolTimeout) as error:
        cause = getattr(error, "orig", None) or error
        detail = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        raise Unavailable(
            "database",
            f"the database does not answer: {detail}",
            hint="nothing was changed; try again",
        ) from error
    except SQLAlchemyError as error:
        raise Unavailable("database", f"the database cannot be used: {error}") from error


def normal_url(url: str) -> URL:
    """Return the URL with our driver: ``postgresql://`` means psycopg 3.

    Raises ConfigError for anything but SQLite and PostgreSQL.
    """
    try:
        parsed = make_url(url)
    except SQLAlchemyError as error:
        raise ConfigError("database_url is not a database URL") from error
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and parsed.database not in {None, "", ":memory:"}:
        return parsed.set(drivername="sqlite+pysqlite")
    raise ConfigError("database_url must name an SQLite file or a PostgreSQL database")


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "postgresql":
        return create_engine(
            url,
            pool_pre_ping=True,
            pool_size=10,
            max_overflow=20,
            pool_timeout=BUSY_SECONDS,
            connect_args={k: v for k, v in _TIMEOUT_OPTIONS.items() if k not in url.query},
        )
    Path(str(url.database)).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    engine = create_engine(
        url, pool_timeout=BUSY_SECONDS, pool_size=20, connect_args={"timeout": BUSY_SECONDS}
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, record: Any) -> None:
    """Set up explicit transactions, and WAL mode, in which readers and writers do not block."""
    del record
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("vmjobs_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
