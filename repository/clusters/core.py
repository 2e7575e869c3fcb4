"""What all parts of the clusters' repository share: its collaborators."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from repository.clusters.tables import ClusterRow
from repository.database import Database
from repository.images import Images
from repository.streams import StreamStore
from vmjobs.cluster.wire import PoolAddress
from vmjobs.config import Config
from vmjobs.errors import NotFound


class ClusterCore:
    """Holds the collaborators. Nothing is opened here; safe to share between threads."""

    def __init__(
        self, database: Database, streams: StreamStore, images: Images, config: Config
    ) -> None:
        self.database = database
        self.streams = streams
        self.images = images
        self.config = config

    @property
    def lease(self) -> timedelta:
        """How long a node may be silent."""
        return timedelta(seconds=self.config.node_lease_seconds)

    def address(self, pool: str) -> PoolAddress:
        """One of the service's pools; empty: the first of them.  Raises NotFound."""
        name = pool or next(iter(self.config.pools), "")
        if name not in self.config.pools:
            what = f"there is no pool {name!r}" if name else "there is no pool"
            raise NotFound(f"{what}: see the service's setting pools")
        at = self.config.pool(name)
        return PoolAddress(
            name=name, collector=at.collector, trust_domain=at.trust_domain, user=at.user
        )


def locked_cluster(session: Session, name: str) -> ClusterRow:
    """A cluster's row, ours until the (write) transaction ends.  Raises NotFound."""
    query = select(ClusterRow).where(ClusterRow.name == name).with_for_update()
    row = session.scalars(query).one_or_none()
    if row is None:
        raise no_cluster(name)
    return row


def no_cluster(name: str) -> NotFound:
    """The error for a cluster that is not there."""
    return NotFound(f"there is no cluster {name[:64]}")


def console_of(incarnation: int) -> str:
    """Under which attempt a machine's console is kept."""
    return f"{incarnation:032x}"
