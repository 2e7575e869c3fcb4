"""The migrations make the tables that the models describe, on both databases."""

from __future__ import annotations

import threading
from datetime import datetime

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, Table, inspect, select

from repository.clusters.tables import AssignmentRow, BackoffRow, ClusterRow
from repository.db.database import Database
from repository.db.models import Base, BlobOwnerRow, BuildRow
from repository.images.tables import ChunkRow, UploadRow
from repository.migrations import alembic_config, upgrade
from vmjobs.model import now

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


TAKEN, MADE = (f"sha256:{letter * 64}" for letter in "ab")
#: Rows that earlier releases stored, by the revision of their tables: table and values.
ROWS: dict[str, list[tuple[str, dict[str, object]]]] = {
    "0003": [("builds", {"id": "1" * 32, "owner": "ada", "state": "BUILDING", "attempts": 3})],
    "0005": [
        ("clusters", {"name": "vc"}),
        *(
            ("cluster_members", {"id": name, "cluster": "vc", "name": name, **values})
            for name, values in {
                "vc-0": {"image": "good", "admitted": 3},
                "vc-1": {"image": "good", "admitted": 1},
                "vc-2": {"image": "new", "admitted": 0},
            }.items()
        ),
    ],
    "0007": [("node_shares", {"node": "n1", "revision": 7})],
    "0014": [
        (
            "submissions",
            {
                "id": "a" * 32,
                "key": None,
                "owner": "ada",
                "spec": {"inputs": [{"name": "in", "digest": TAKEN, "size": 7}]},
            },
        ),
        ("jobs", {"id": "b" * 32, "array_id": "a" * 32, "owner": "ada"}),
        ("contents", {"id": 7, "layout": b""}),
        ("checkpoints", {"job_id": "b" * 32, "owner": "ada", "document": {"ran": 1.5}}),
        ("checkpoint_contents", {"job_id": "b" * 32, "content": 7}),
    ],
    "0015": [
        ("attempts", {"id": "c" * 32, "job_id": "b" * 32}),
        ("outputs", {"id": 1, "attempt_id": "c" * 32, "digest": MADE, "size": 9}),
        ("segments", {"id": 5, "digest": b"s" * 32}),
        ("blocks", {"digest": b"b" * 32, "segment": 5, "number": 3}),
        ("uploads", {"id": "d" * 32, "owner": "ada"}),
    ],
}


def put(connection: Connection, name: str, values: dict[str, object]) -> None:
    """Insert a row that has a value in each column."""
    table = Table(name, MetaData(), autoload_with=connection)
    plain: dict[type, object] = {str: "", int: 0, float: 0.0, bool: False, datetime: now()}
    made = {c.name: plain.get(c.type.python_type, {}) for c in table.columns}
    connection.execute(table.insert().values({**made, **values}))


def test_what_earlier_releases_stored_is_kept(empty_database: str) -> None:
    database = Database(empty_database)
    for revision, rows in ROWS.items():
        with database.engine.begin() as connection:
            command.upgrade(alembic_config(connection), revision)
            for name, values in rows:
                put(connection, name, values)
    with database.engine.begin() as connection:
        # Saved VMs survive in both directions, with the rows that refer to them.
        for turn, to in ((command.downgrade, "0014"), (command.upgrade, "0015")):
            turn(alembic_config(connection), to)
            saved, parts = (
                Table(name, MetaData(), autoload_with=connection)
                for name in ("checkpoints", "checkpoint_contents")
            )
            row = connection.execute(select(saved)).one()
            assert (row.job_id, row.owner, row.document) == ("b" * 32, "ada", {"ran": 1.5})
            assert connection.execute(select(parts)).one() == ("b" * 32, 7)
    upgrade(empty_database)
    with database.read() as session:
        # The number of attempts identified a builder before generations did.
        (build,) = session.scalars(select(BuildRow))
        assert (build.attempts, build.generation, build.naming) == (3, 3, False)
        # Two broken nodes do not make an image that always worked count as broken.
        (backoff,) = session.scalars(select(BackoffRow))
        known = (backoff.image, backoff.node, backoff.proven, backoff.until)
        assert known == ("good", "", True, None)
        # Clusters and nodes that are there begin to be counted.
        assert [row.happened for row in session.scalars(select(ClusterRow))] == [{}]
        (share,) = session.scalars(select(AssignmentRow))
        assert (share.revision, share.tokens, share.refusals) == (7, 0, 0)
        # Owners keep inputs and outputs; chunks stay known; running uploads start again.
        owned = list(session.scalars(select(BlobOwnerRow)))
        found = {(row.owner, row.digest, row.size, row.used) for row in owned}
        assert found == {("ada", TAKEN, 7, True), ("ada", MADE, 9, True)}
        assert all(row.touched.year >= 2024 for row in owned)
        assert [(row.segment, row.number) for row in session.scalars(select(ChunkRow))] == [(5, 3)]
        assert session.scalars(select(UploadRow)).all() == []
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), "0015")
    database.close()
