"""The migrations make the tables that the models describe, on both databases."""

from __future__ import annotations

import threading
from datetime import datetime

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, Table, inspect, select

from repository.clusters.tables import AssignmentRow, BackoffRow, ClusterRow
from repository.db.database import Database
from repository.db.models import Base, BlobOwnerRow, BuildRow
from repository.images.tables import ChunkRow, UploadRow
from repository.migrations import alembic_config, upgrade
from vmjobs.model import now

pytestmark = [pytest.mark.in_process, pytest.mark.both_databases]


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
    """The number of attempts identified a builder before generations did."""
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


def test_images_whose_vms_came_up_are_known_to(empty_database: str) -> None:
    """Two broken nodes do not make an image that always worked count as broken."""
    database = Database(empty_database)
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0005")
        metadata = MetaData()
        clusters = Table("clusters", metadata, autoload_with=connection)
        members = Table("cluster_members", metadata, autoload_with=connection)
        connection.execute(clusters.insert().values(_filled(clusters, name="vc")))
        for number, admitted in enumerate((3, 1, 0)):
            values = _filled(members, id=f"{number:032x}", cluster="vc", name=f"vc-{number}")
            values |= {"image": ("good", "good", "new")[number], "admitted": admitted}
            connection.execute(members.insert().values(values))
    upgrade(empty_database)
    with database.read() as session:
        (found,) = session.scalars(select(BackoffRow))
        assert (found.image, found.node, found.proven, found.until) == ("good", "", True, None)
    database.close()


def test_clusters_that_are_there_begin_to_be_counted(empty_database: str) -> None:
    database = Database(empty_database)
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0007")
        tables = {
            t: Table(t, MetaData(), autoload_with=connection) for t in ("clusters", "node_shares")
        }
        connection.execute(tables["clusters"].insert().values(_filled(tables["clusters"], name="vc")))
        shares = tables["node_shares"]
        connection.execute(shares.insert().values(_filled(shares, node="n1", revision=7)))
    upgrade(empty_database)
    with database.read() as session:
        assert [row.happened for row in session.scalars(select(ClusterRow))] == [{}]
        (share,) = session.scalars(select(AssignmentRow))
        assert (share.revision, share.tokens, share.refusals) == (7, 0, 0)
    database.close()


def test_vms_that_were_saved_stay_saved(empty_database: str) -> None:
    """They survive an upgrade and a downgrade, with the rows that refer to them."""
    database = Database(empty_database)
    names = ("submissions", "jobs", "contents", "checkpoints", "checkpoint_contents")
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0014")
        tables = {name: Table(name, MetaData(), autoload_with=connection) for name in names}
        rows: dict[str, dict[str, object]] = {
            "submissions": {"id": "a" * 32, "key": None},
            "jobs": {"id": "b" * 32, "array_id": "a" * 32},
            "contents": {"id": 7, "layout": b""},
            "checkpoints": {"job_id": "b" * 32, "owner": "ada", "document": {"ran": 1.5}},
            "checkpoint_contents": {"job_id": "b" * 32, "content": 7},
        }
        for name, values in rows.items():
            connection.execute(tables[name].insert().values(_filled(tables[name], **values)))
        for turn in (command.upgrade, command.downgrade):
            turn(alembic_config(connection), "0015" if turn is command.upgrade else "0014")
            row = connection.execute(select(tables["checkpoints"])).one()
            assert (row.job_id, row.owner, row.document) == ("b" * 32, "ada", {"ran": 1.5})
            assert connection.execute(select(tables["checkpoint_contents"])).one() == ("b" * 32, 7)
    database.close()


def _filled(table: Table, **values: object) -> dict[str, object]:
    """Return a row with a value in each column."""
    plain: dict[type, object] = {str: "", int: 0, float: 0.0, bool: False, datetime: now()}
    made = {c.name: plain.get(c.type.python_type, {}) for c in table.columns}
    return {**made, **values}


def test_down_to_nothing(empty_database: str) -> None:
    upgrade(empty_database)
    database = Database(empty_database)
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), "base")
    assert inspect(database.engine).get_table_names() == ["alembic_version"]
    database.close()


def test_owners_have_what_their_jobs_have(empty_database: str) -> None:
    """Owners keep inputs and outputs; chunks stay known; running uploads start again."""
    database = Database(empty_database)
    names = ("submissions", "jobs", "attempts", "outputs", "segments", "blocks", "uploads")
    (taken, made) = (f"sha256:{letter * 64}" for letter in "ab")
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0015")
        tables = {name: Table(name, MetaData(), autoload_with=connection) for name in names}
        spec = {"inputs": [{"name": "in", "digest": taken, "size": 7}]}
        rows: dict[str, dict[str, object]] = {
            "submissions": {"id": "a" * 32, "key": None, "owner": "ada", "spec": spec},
            "jobs": {"id": "b" * 32, "array_id": "a" * 32, "owner": "ada"},
            "attempts": {"id": "c" * 32, "job_id": "b" * 32},
            "outputs": {"id": 1, "attempt_id": "c" * 32, "digest": made, "size": 9},
            "segments": {"id": 5, "digest": b"s" * 32},
            "blocks": {"digest": b"b" * 32, "segment": 5, "number": 3},
            "uploads": {"id": "d" * 32, "owner": "ada"},
        }
        for name, values in rows.items():
            connection.execute(tables[name].insert().values(_filled(tables[name], **values)))
    upgrade(empty_database)
    with database.read() as session:
        found = {
            (row.owner, row.digest, row.size, row.used) for row in session.scalars(select(BlobOwnerRow))
        }
        assert found == {("ada", taken, 7, True), ("ada", made, 9, True)}
        assert all(row.touched.year >= 2024 for row in session.scalars(select(BlobOwnerRow)))
        assert [(row.segment, row.number) for row in session.scalars(select(ChunkRow))] == [(5, 3)]
        assert session.scalars(select(UploadRow)).all() == []
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), "0015")
    database.close()
