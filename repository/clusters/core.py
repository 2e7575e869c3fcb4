"""Base class of the clusters' repository: its collaborators and common helpers."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.orm import Session

from repository.clusters.tables import ClusterRow
from repository.db.database import Database
from repository.images import Images
from repository.jobs.streams import StreamStore
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
        """Time without contact after which a node counts as lost."""
        return timedelta(seconds=self.config.node_lease_seconds)

    def address(self, pool: str) -> PoolAddress:
        """Return the address of a pool of the service; "": its first pool.  Raises NotFound."""
        name = pool or next(iter(self.config.pools), "")
        if name not in self.config.pools:
            what = f"there is no pool {name!r}" if name else "there is no pool"
            raise NotFound(f"{what}: see the service's setting pools")
        at = self.config.pool(name)
        return PoolAddress(
            name=name, collector=at.collector, trust_domain=at.trust_domain, user=at.user
        )


def find_cluster(session: Session, name: str, *, lock: bool = False) -> ClusterRow:
    """Return a cluster's row.  Raises NotFound.

    lock: lock the row until the (write) transaction ends.
    """
    row = session.get(ClusterRow, name, with_for_update=True if lock else None)
    if row is None:
        raise NotFound(f"there is no cluster {name[:64]}")
    return row


def console_of(incarnation: int) -> str:
    """Return the attempt id under which the stream store keeps the console of a VM."""
    return f"{incarnation:032x}"
