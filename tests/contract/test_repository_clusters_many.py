"""Queries about clusters of ten thousand VMs: few statements, no needless table scans."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Table, insert, text
from sqlalchemy.orm import Session

from repository.clusters.history import MAX_EVENTS
from repository.clusters.tables import ClusterEventRow, ClusterRow, ClusterVmRow
from repository.metrics import read_metrics
from repository.service import Repository
from tests.kit.cluster_nodes import POOLS, World
from tests.kit.repository_jobs import clusters_of, statements
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.cluster.wire import ClusterVmReports
from vmjobs.model import now

pytestmark = [
    pytest.mark.in_process,
    pytest.mark.both_databases,
    pytest.mark.settings(pools=POOLS),
]

MANY = 10_000
CLUSTERS = 20
NODES = 100
#: Finds scans of large tables in a query plan of either database.
_SCAN = re.compile(r"(?:SCAN|Seq Scan on) (cluster_members|cluster_events)\b")


@pytest.fixture
def world(repository: Repository) -> World:
    """Clusters c0, c1 … of five hundred VMs each, all up, with full histories."""
    world = World(repository, "n1", *(f"m{n}" for n in range(NODES)))
    world.apply(size=1)
    world.bring_up()
    with repository.database.write() as session:
        cluster = _row(session, ClusterRow)
        vm = _row(session, ClusterVmRow)
        each = MANY // CLUSTERS
        cluster = {**cluster, "events_count": MAX_EVENTS, "target": each}
        session.execute(insert(ClusterRow), [{**cluster, "name": f"c{c}"} for c in range(CLUSTERS)])
        vms = [_member(vm, n, each) for n in range(MANY)]
        session.execute(insert(ClusterVmRow), vms)
        line = {"time": now(), "node": "", "state": "UP", "code": "PROGRESS", "message": ""}
        lines = [
            {**line, "cluster": f"c{c}", "member": f"c{c}-{seq % each}", "seq": seq}
            for c in range(CLUSTERS)
            for seq in range(1, MAX_EVENTS + 1)
        ]
        session.execute(insert(ClusterEventRow), lines)
    with repository.database.engine.connect() as connection:
        connection.execute(text("ANALYZE"))
        connection.commit()
    for row in vms:
        world.pool.join(row["name"], id=row["id"])
    return world


def _row(session: Session, table: Any) -> dict[str, Any]:
    columns: Table = table.__table__
    return dict(session.execute(columns.select()).mappings().one())


def _member(made: dict[str, Any], n: int, each: int) -> dict[str, Any]:
    cluster = f"c{n // each}"
    own = {"id": f"{n:032x}", "cluster": cluster, "name": f"{cluster}-{n % each}"}
    return {**made, **own, "node": f"m{n % NODES}", "state": ClusterVmState.UP.value}


def scanned(repository: Repository, asked: list[tuple[str, Any]]) -> set[str]:
    """Return which of the large tables were read from end to end."""
    sqlite = repository.database.engine.dialect.name == "sqlite"
    found = set()
    with repository.database.engine.connect() as connection:
        for statement, parameters in asked:
            if not statement.startswith("SELECT"):
                continue
            rows = connection.exec_driver_sql(
                f"EXPLAIN {'QUERY PLAN ' * sqlite}{statement}", parameters
            ).all()
            plan = "\n".join(str(row[-1]) for row in rows)
            found |= {
                name
                for line in plan.splitlines()
                for name in _SCAN.findall(line)
                if "USING" not in line
            }
    return found


#: A query, how many statements it may take, and large tables that it has to read as a whole.
Case = tuple[Callable[[Repository], object], int, set[str]]
CASES: dict[str, Case] = {
    "one cluster": (lambda r: r.clusters.get("c3"), 8, set()),
    "the history": (lambda r: r.clusters.events("c3"), 2, set()),
    "what is new in it": (lambda r: r.clusters.events("c3", MAX_EVENTS - 5), 2, set()),
    "all clusters": (clusters_of, 3, {"cluster_members"}),
    "a node's share": (lambda r: r.assignments.get("m7"), 6, set()),
    "a node's report": (
        lambda r: r.assignments.store_reports("m7", ClusterVmReports(reports=())), 3, set()
    ),
    "a machine's token": (lambda r: r.assignments.order_for("m0", f"{0:032x}", 1), 1, set()),
    "metrics": (
        lambda r: read_metrics(r.database, timedelta(seconds=300), now()), 13, {"cluster_members"}
    ),
}  # fmt: skip


@pytest.mark.soak_for("sqlite")
def test_questions_about_many_vms_take_few_statements(world: World, repository: Repository) -> None:
    for what, (ask, limit, whole) in CASES.items():
        with statements(repository.database) as asked:
            ask(repository)
        assert len(asked) <= limit, (what, [statement for statement, _ in asked])
        assert scanned(repository, asked) <= whole, what
    world.step()  # the first step may write something
    with statements(repository.database) as asked:
        world.step(1)
    assert len(asked) <= 25, len(asked)
