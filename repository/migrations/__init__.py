"""The schema's migrations, and the call that upgrades a database."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.util import CommandError
from sqlalchemy import Connection, text

from repository.db.database import Database, translated
from vmjobs.errors import ConfigError

#: Number of the advisory lock for migrations: arbitrary, but the same in every process.
_LOCK = 0x766D6A6F


def upgrade(database_url: str) -> None:
    """Upgrade the schema to the newest revision; several processes may try at once.

    Raises Unavailable("database"), and ConfigError: bad URL, or tables of an unknown release.
    """
    database = Database(database_url)
    try:
        with translated(), database.engine.execution_options(vmjobs_write=True).begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            command.upgrade(alembic_config(connection), "head")
    except CommandError as error:
        message = f"the database has tables of another release of vmjobs: {error}"
        raise ConfigError(message, hint="use the release that made them") from error
    finally:
        database.close()


def alembic_config(connection: Connection) -> AlembicConfig:
    """Alembic's settings for work on an open connection."""
    config = AlembicConfig()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    return config
