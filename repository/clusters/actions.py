"""Actions of operators on clusters: scale, drain, retry, delete."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from repository.clusters import autoscaling
from repository.clusters.assignments import bump_revision
from repository.clusters.backoff import clear
from repository.clusters.core import find_cluster, refuse_if_deleting
from repository.clusters.generations import last_declared, new_generation, resize
from repository.clusters.history import HistoryEntry, record
from repository.clusters.queries import load_cluster
from repository.clusters.tables import ClusterVmRow, GenerationRow
from repository.db.database import Database
from vmjobs.cluster.spec import ClusterSpec, SizeRange
from vmjobs.cluster.vm_state import Goal, Phase
from vmjobs.cluster.wire import Cluster
from vmjobs.config import Config
from vmjobs.errors import Fault, InvalidRequest
from vmjobs.model import now as utc_now


@dataclass(frozen=True)
class ClusterActions:
    """Changes clusters. Raises NotFound for a cluster that does not exist. who: the operator."""

    database: Database
    config: Config

    def scale(self, name: str, size: int, who: str) -> Cluster:
        """Change the number of VMs and nothing else.

        Raises Conflict (the cluster is being deleted), InvalidRequest (outside of its range).
        """
        present = utc_now()
        with self.database.write() as session:
            row = find_cluster(session, name, lock=True)
            refuse_if_deleting(row)
            spec = ClusterSpec.model_validate(row.spec)
            allowed = spec.range
            if isinstance(spec.size, SizeRange) and not allowed.min <= size <= allowed.max:
                text = f"the cluster {name} is declared for {allowed.min} to {allowed.max} VMs"
                fault = Fault("size", "out_of_range", f"{size} is not {allowed.min} to {allowed.max}")
                raise InvalidRequest(text, hint="apply another declaration", faults=[fault])
            if size != row.target:
                if not isinstance(spec.size, SizeRange):
                    resize(session, row, size, present)
                row.target, row.updated = size, present
                record(session, row, HistoryEntry("SCALED", message=f"{size} VMs, by {who}"), present)
                session.flush()
            return load_cluster(session, self.config, row)

    def wake(self, name: str, who: str) -> bool:
        """Start one VM in a cluster that autoscaling has reduced to 0, for a job seen elsewhere.

        A cluster that has VMs, or may have none, does not change. Return whether anything changed.
        """
        with self.database.write() as session:
            return autoscaling.wake(session, find_cluster(session, name, lock=True), who, utc_now())

    def drain(self, name: str, who: str) -> Cluster:
        """Let all VMs end with their jobs, and start none until :meth:`resume`."""
        return self._set_draining(name, True, HistoryEntry("DRAINING", message=f"asked for by {who}"))

    def resume(self, name: str, who: str) -> Cluster:
        """Start VMs again.  Raises Conflict: the cluster is being deleted."""
        return self._set_draining(name, False, HistoryEntry("RESUMED", message=f"by {who}"))

    def _set_draining(self, name: str, draining: bool, entry: HistoryEntry) -> Cluster:
        present = utc_now()
        with self.database.write() as session:
            row = find_cluster(session, name, lock=True)
            if not draining:
                refuse_if_deleting(row)
            if row.draining != draining:
                row.draining, row.updated = draining, present
                record(session, row, entry, present)
                session.flush()
            return load_cluster(session, self.config, row)

    def retry(self, name: str, who: str) -> Cluster:
        """Retry failures at once.

        Clear the backoff of the cluster's images, replace VMs that wait for a retry, and declare the
        generation again that was rolled back.

        Raises Conflict: the cluster is being deleted.
        """
        present = utc_now()
        with self.database.write() as session:
            row = find_cluster(session, name, lock=True)
            refuse_if_deleting(row)
            message = f"asked for by {who}"
            failed = last_declared(session, row)
            images = {row.image, failed.image}
            if isinstance(failed, GenerationRow):
                spec = ClusterSpec.model_validate(failed.spec)
                message += f": generation {failed.generation} is declared again"
                new_generation(session, row, spec, failed.image, present)
                row.kinds = failed.kinds
                session.delete(failed)
            mine = select(ClusterVmRow).where(ClusterVmRow.cluster == name).order_by(ClusterVmRow.id)
            nodes = set()
            for vm in session.scalars(mine.with_for_update()):
                images.add(vm.image)
                if vm.phase == Phase.WAITING.value and vm.goal == Goal.RUN.value:
                    vm.goal = Goal.DRAIN.value
                    nodes.add(vm.node)
            for node in sorted(nodes):  # in the order in which all transactions lock them
                bump_revision(session, node)
            clear(session, images)
            row.stalled, row.updated = 0, present
            record(session, row, HistoryEntry("RETRIED", message=message), present)
            session.flush()
            return load_cluster(session, self.config, row)

    def delete(self, name: str, goal: Goal, who: str) -> Cluster:
        """Delete the cluster once its VMs have ended, which drain or stop, as ``goal`` says.

        Repeating the call is no error; a drain may become a stop, but not the other way round.
        """
        present = utc_now()
        with self.database.write() as session:
            row = find_cluster(session, name, lock=True)
            if row.deleting not in {goal.value, Goal.STOP.value}:
                row.deleting, row.updated = goal.value, present
                how = "now" if goal is Goal.STOP else "once its jobs have ended"
                record(session, row, HistoryEntry("DELETING", message=f"{how}, by {who}"), present)
                session.flush()
            return load_cluster(session, self.config, row)
