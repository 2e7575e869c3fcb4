"""Common helpers of the clusters' services."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.orm import Session

from repository.clusters.tables import ClusterRow
from vmjobs.cluster.wire import PoolAddress
from vmjobs.config import Config
from vmjobs.errors import Conflict, NotFound


def node_lease(config: Config) -> timedelta:
    """Return the time without contact after which a node counts as lost."""
    return timedelta(seconds=config.node_lease_seconds)


def pool_address(config: Config, pool: str) -> PoolAddress:
    """Return the address of a pool of the service; "": its first pool.  Raises NotFound."""
    name = pool or next(iter(config.pools), "")
    if name not in config.pools:
        what = f"there is no pool {name!r}" if name else "there is no pool"
        raise NotFound(f"{what}: see the service's setting pools")
    at = config.pool(name)
    return PoolAddress(name=name, collector=at.collector, trust_domain=at.trust_domain, user=at.user)


def find_cluster(session: Session, name: str, *, lock: bool = False) -> ClusterRow:
    """Return a cluster's row.  Raises NotFound.

    lock: lock the row until the (write) transaction ends.
    """
    row = session.get(ClusterRow, name, with_for_update=True if lock else None)
    if row is None:
        raise NotFound(f"there is no cluster {name[:64]}")
    return row


def refuse_if_deleting(row: ClusterRow) -> None:
    """Raise Conflict if the cluster is being deleted."""
    if row.deleting:
        raise Conflict(
            f"the cluster {row.name} is being deleted",
            hint="declare it again once it is gone; `now` does not wait for its jobs",
        )


def console_of(incarnation: int) -> str:
    """Return the attempt id under which the stream store keeps the console of a VM."""
    return f"{incarnation:032x}"
