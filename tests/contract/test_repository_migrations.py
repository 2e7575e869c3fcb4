"""The migrations make the tables that the models describe, on both databases."""

from __future__ import annotations

import threading

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from repository.db import database as databases
from repository.db.database import Database
from repository.db.models import Base
from repository.migrations import alembic_config, upgrade
from vmjobs.errors import ConfigError

pytestmark = [pytest.mark.in_process, pytest.mark.both_databases]


def test_models_and_migrations_agree_and_lead_back_to_nothing(empty_database: str) -> None:
    upgrade(empty_database)
    upgrade(empty_database)
    database = Database(empty_database)
    with database.engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), "base")
    assert inspect(database.engine).get_table_names() == ["alembic_version"]
    database.close()


def test_several_processes_may_migrate_at_once(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last one waits for all others.
    monkeypatch.setattr(databases, "BUSY_SECONDS", 120)
    monkeypatch.setitem(databases._TIMEOUT_OPTIONS, "options", "-c lock_timeout=120s")
    faults: list[BaseException] = []

    def work() -> None:
        try:
            upgrade(empty_database)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_tables_of_an_unknown_release_are_refused(empty_database: str) -> None:
    upgrade(empty_database)
    database = Database(empty_database)
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(ConfigError, match="9999"):
        upgrade(empty_database)
