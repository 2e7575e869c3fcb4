"""Login sessions in the database: which VMs accept logins, and a record of each login."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from repository.clusters.core import ClusterCore, locked_cluster, no_cluster
from repository.clusters.history import Told, record
from repository.clusters.sharing import bump
from repository.clusters.tables import ClusterRow, MemberRow
from vmjobs.cluster.member import MemberState, Phase
from vmjobs.errors import MachineNotRunning, NotFound
from vmjobs.model import now as utc_now

#: Phases in which a guest is up and may accept logins.
_UP: Final = frozenset({Phase.RUNNING.value, Phase.DRAINING.value})


@dataclass(frozen=True)
class MemberDoor:
    """The target of a login. member: id of the cluster VM; name: its name."""

    cluster: str
    name: str
    member: str
    node: str
    incarnation: int


class Logins(ClusterCore):
    """Logins of operators to cluster VMs."""

    def door_of(self, cluster: str, name: str) -> MemberDoor:
        """Return the login target of a cluster VM.

        Raises:
            NotFound: there is no such VM.
            MachineNotRunning: its guest is not up.
        """
        with self.database.read() as session:
            if session.get(ClusterRow, cluster) is None:
                raise no_cluster(cluster)
            query = select(MemberRow).where(MemberRow.cluster == cluster, MemberRow.name == name)
            row = session.scalars(query).one_or_none()
        if row is None:
            raise NotFound(f"{cluster} has no VM {name}", hint=f"see `vmjobs cluster show {cluster}`")
        if row.phase not in _UP or row.state == MemberState.LOST.value:
            raise MachineNotRunning(
                f"cannot log in to {name}: it is {row.state}",
                hint=f"see its console with `vmjobs cluster console {cluster} {name}`",
            )
        return MemberDoor(cluster, name, row.id, row.node, row.incarnation)

    def call(self, node: str) -> None:
        """Make a node's agent read its assignment now."""
        with self.database.write() as session:
            bump(session, node)

    def note_login(self, door: MemberDoor, who: str) -> None:
        """Add a line for a login to the cluster's history."""
        with self.database.write() as session:
            cluster = locked_cluster(session, door.cluster)
            row = session.get(MemberRow, door.member)
            told = Told("LOGIN", "LOGIN", f"{who} logs in as root")
            record(session, cluster, told, utc_now(), row)
