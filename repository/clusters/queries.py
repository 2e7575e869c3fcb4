"""Queries of clusters for operators."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from repository.clusters.backoff import backoff_views
from repository.clusters.core import console_of, find_cluster, node_lease
from repository.clusters.generations import GenerationStatus, failed_view, generations
from repository.clusters.history import MAX_EVENTS
from repository.clusters.snapshots import cluster_view, nodes_now, vm_view
from repository.clusters.tables import BackoffRow, ClusterEventRow, ClusterRow, ClusterVmRow
from repository.db.database import Database
from repository.db.paging import PageRequest
from repository.db.views import view_of
from repository.jobs.streams import StreamReader, StreamStore
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.cluster.wire import Cluster, ClusterEvent
from vmjobs.config import Config
from vmjobs.errors import NotFound
from vmjobs.model import StreamName
from vmjobs.model import now as utc_now


@dataclass(frozen=True)
class ClusterQueries:
    """Reads clusters and their VMs.  Raises NotFound for a cluster that does not exist."""

    database: Database
    streams: StreamStore
    config: Config

    def page(self, page: PageRequest) -> tuple[list[Cluster], str]:
        """Return a page of clusters, by name, without their VMs; and the next cursor."""
        query = select(ClusterRow).order_by(ClusterRow.name).where(ClusterRow.name > page.cursor)
        ups = select(ClusterVmRow.cluster, func.count()).where(
            ClusterVmRow.state == ClusterVmState.UP.value
        )
        with self.database.read() as session:
            up = {row[0]: row[1] for row in session.execute(ups.group_by(ClusterVmRow.cluster))}
            rows, cursor = page.cut(session.scalars(query.limit(page.rows)).all(), lambda row: row.name)
            kept = generations(session)
            failed = {name: failed_view(kept.get((name, GenerationStatus.FAILED))) for name, _ in kept}
            return [
                cluster_view(row, up.get(row.name, 0), failed=failed.get(row.name)) for row in rows
            ], cursor

    def get(self, name: str) -> Cluster:
        """One cluster with its VMs."""
        with self.database.read() as session:
            return load_cluster(session, self.config, find_cluster(session, name))

    def events(self, name: str, after: int = 0) -> list[ClusterEvent]:
        """The last lines of the cluster's history, past event number ``after``, oldest first."""
        with self.database.read() as session:
            after = max(after, find_cluster(session, name).events_count - MAX_EVENTS)
            query = select(ClusterEventRow).where(
                ClusterEventRow.cluster == name, ClusterEventRow.seq > after
            )
            rows = session.scalars(query.order_by(ClusterEventRow.seq))
            return [view_of(ClusterEvent, row) for row in rows]

    def open_console(self, name: str, vm: str, incarnation: int = 0) -> StreamReader:
        """Open the console of a cluster VM. incarnation: the latest (0), or the one before it."""
        query = select(ClusterVmRow).where(ClusterVmRow.cluster == name, ClusterVmRow.name == vm)
        with self.database.read() as session:
            find_cluster(session, name)
            row = session.scalars(query).one_or_none()
        if row is None:
            raise NotFound(f"the cluster {name} has no VM {vm[:64]}")
        wanted = incarnation or max(1, row.incarnation)
        # The agent may send a console before its report.
        if not max(1, row.incarnation - 1) <= wanted <= row.incarnation + 1:
            raise NotFound(
                f"the console of incarnation {wanted} of {vm} is not kept",
                hint=f"the present incarnation is {row.incarnation}; that before it is kept, too",
            )
        return self.streams.open(row.id, console_of(wanted), StreamName.CONSOLE)


def load_cluster(session: Session, config: Config, row: ClusterRow) -> Cluster:
    """Return a cluster with its VMs."""
    present = utc_now()
    nodes = nodes_now(session, node_lease(config), present)
    alive = {name for name, node in nodes.items() if node.alive}
    rows = session.scalars(select(ClusterVmRow).where(ClusterVmRow.cluster == row.name))
    vms = [vm_view(vm, vm.node in alive) for vm in rows]
    vms.sort(key=lambda vm: int(vm.name.rpartition("-")[2]))
    failed = generations(session, row.name).get((row.name, GenerationStatus.FAILED))
    images = {row.image, *(m.image for m in vms), *([failed.image] if failed else [])}
    known = session.scalars(select(BackoffRow).where(BackoffRow.image.in_(sorted(images))))
    guards = backoff_views(known, images, present)
    up = sum(m.state is ClusterVmState.UP for m in vms)
    return cluster_view(row, up, vms, guards, failed_view(failed))
