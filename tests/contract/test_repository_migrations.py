"""The migrations make the tables that the models describe, on both databases."""

from __future__ import annotations

import threading

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, Table, inspect, select

from repository.database import Database
from repository.migrations import alembic_config, upgrade
from repository.models import Base, BuildRow
from vmjobs.model import now


def test_models_and_migrations_agree(empty_database: str) -> None:
    upgrade(empty_database)
    upgrade(empty_database)
    database = Database(empty_database)
    with database.engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    database.close()


def test_several_processes_may_migrate_at_once(empty_database: str) -> None:
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


def test_a_build_under_way_keeps_its_builder(empty_database: str) -> None:
    """A builder knew its build by the number of attempts before there was a fence of its own."""
    database = Database(empty_database)
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0003")
    before = Table("builds", MetaData(), autoload_with=database.engine)
    values: dict[str, object] = dict.fromkeys(("name", "step", "code", "message", "hint", "digest"), "")
    values |= {"id": "1" * 32, "owner": "ada", "admin": False, "request": {}, "state": "BUILDING"}
    values |= {"progress": 0, "attempts": 3, "sends": 1}
    values |= dict.fromkeys(("sent", "created", "updated"), now())
    with database.engine.begin() as connection:
        connection.execute(before.insert().values(values))
    upgrade(empty_database)
    with database.read() as session:
        (found,) = session.scalars(select(BuildRow))
        assert (found.attempts, found.generation, found.naming) == (3, 3, False)
    database.close()


def test_down_to_nothing(empty_database: str) -> None:
    upgrade(empty_database)
    database = Database(empty_database)
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), "base")
    assert inspect(database.engine).get_table_names() == ["alembic_version"]
    database.close()
