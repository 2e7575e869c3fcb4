"""Login sessions in the database: which VMs accept logins, and a record of each login."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from repository.clusters import history
from repository.clusters.assignments import bump_revision
from repository.clusters.core import find_cluster
from repository.clusters.history import HistoryEntry
from repository.clusters.tables import ClusterVmRow
from repository.db.database import Database
from vmjobs.cluster.vm_state import ClusterVmState, Phase
from vmjobs.errors import NotFound, VmNotRunning
from vmjobs.model import now as utc_now

#: Phases in which a guest is up and may accept logins.
_LOGIN_PHASES: Final = frozenset({Phase.RUNNING.value, Phase.DRAINING.value})


@dataclass(frozen=True)
class LoginTarget:
    """The target of a login. vm_id: of the cluster VM; name: its name."""

    cluster: str
    name: str
    vm_id: str
    node: str
    incarnation: int


@dataclass(frozen=True)
class ClusterLogins:
    """Logins of operators to cluster VMs."""

    database: Database

    def target(self, cluster: str, name: str) -> LoginTarget:
        """Return the login target of a cluster VM.

        Raises:
            NotFound: there is no such VM.
            VmNotRunning: its guest is not up.
        """
        with self.database.read() as session:
            find_cluster(session, cluster)
            query = select(ClusterVmRow).where(
                ClusterVmRow.cluster == cluster, ClusterVmRow.name == name
            )
            row = session.scalars(query).one_or_none()
        if row is None:
            raise NotFound(f"{cluster} has no VM {name}", hint=f"see `vmjobs cluster show {cluster}`")
        if row.phase not in _LOGIN_PHASES or row.state == ClusterVmState.LOST.value:
            raise VmNotRunning(
                f"cannot log in to {name}: it is {row.state}",
                hint=f"see its console with `vmjobs cluster console {cluster} {name}`",
            )
        return LoginTarget(cluster, name, row.id, row.node, row.incarnation)

    def notify_node(self, node: str) -> None:
        """Make a node's agent read its assignment now."""
        with self.database.write() as session:
            bump_revision(session, node)

    def record(self, target: LoginTarget, who: str) -> None:
        """Add a line for a login to the cluster's history."""
        with self.database.write() as session:
            cluster = find_cluster(session, target.cluster, lock=True)
            row = session.get(ClusterVmRow, target.vm_id)
            entry = HistoryEntry("LOGIN", "LOGIN", f"{who} logs in as root")
            history.record(session, cluster, entry, utc_now(), row)
