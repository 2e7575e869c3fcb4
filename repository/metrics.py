"""What the service has, in numbers, as of one moment. Nothing here changes anything."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from repository.clusters.history import present_state
from repository.clusters.loading import World, load
from repository.clusters.tables import ClusterRow, MemberRow
from repository.database import Database
from repository.images.tables import ImageRow, SegmentRow
from repository.models import BuildRow, JobRow
from vmjobs.cluster.member import MemberState, Phase
from vmjobs.model import JobState
from vmjobs.wire import BuildState

_State = TypeVar("_State", bound=StrEnum)

#: In these phases a member's machine is no more, and holds nothing of its node.
_HOLDS_NOTHING: Final = Phase.GONE.value


@dataclass
class ClusterFigures:
    """One cluster. target: machines that it is to have; 0 where it drains or is being deleted.

    failures: in a row, of all members since each of them was up last.
    """

    target: int = 0
    members: Counter[MemberState] = field(default_factory=Counter)
    busy: int = 0
    failures: int = 0


@dataclass
class SiteFigures:
    """The nodes of one site. Room for clusters, offered and taken, is that of nodes that are alive.

    memory: MiB.
    """

    alive: int = 0
    lost: int = 0
    offered_cpus: int = 0
    offered_memory: int = 0
    taken_cpus: int = 0
    taken_memory: int = 0


@dataclass(frozen=True)
class Figures:
    """All of it. clusters, sites, pools: by name. pools: whether they answered when asked last.

    image_bytes: of all images, whole. stored_bytes: what is kept for them, each byte once.
    """

    jobs: Mapping[JobState, int] = field(default_factory=dict)
    builds: Mapping[BuildState, int] = field(default_factory=dict)
    clusters: Mapping[str, ClusterFigures] = field(default_factory=dict)
    sites: Mapping[str, SiteFigures] = field(default_factory=dict)
    pools: Mapping[str, bool] = field(default_factory=dict)
    images: int = 0
    image_bytes: int = 0
    stored_bytes: int = 0


def figures(database: Database, lease: timedelta, present: datetime) -> Figures:
    """The figures as of ``present``.  Raises Unavailable("database").

    lease: how long a node may be silent.
    """
    with database.read() as session:
        world = load(session, lease, present, planning=False)
        images = select(func.count(), func.coalesce(func.sum(ImageRow.size), 0)).select_from(ImageRow)
        count, size = session.execute(images).one()
        stored = session.scalar(select(func.coalesce(func.sum(SegmentRow.stored), 0)))
        return Figures(
            jobs=_by_state(session, JobRow.state, JobState),
            builds=_by_state(session, BuildRow.state, BuildState),
            clusters=_clusters(world),
            sites=_sites(world),
            pools={name: not row.problem for name, row in world.pools.items()},
            images=count,
            image_bytes=int(size),
            stored_bytes=int(stored or 0),
        )


def _by_state(
    session: Session, column: InstrumentedAttribute[str], states: type[_State]
) -> dict[_State, int]:
    found = session.execute(select(column, func.count()).group_by(column))
    return {states(state): count for state, count in found}


def _clusters(world: World) -> dict[str, ClusterFigures]:
    found = {name: ClusterFigures(_target(row)) for name, row in world.clusters.items()}
    for row in world.members.values():
        cluster = found[row.cluster]
        cluster.members[present_state(row, world.heard(row))] += 1
        cluster.busy += row.busy
        cluster.failures += row.failures
    return found


def _target(row: ClusterRow) -> int:
    return 0 if row.deleting or row.draining else row.target


def _sites(world: World) -> dict[str, SiteFigures]:
    found: dict[str, SiteFigures] = defaultdict(SiteFigures)
    for node in world.nodes.values():
        site = found[node.site]
        if not node.alive:
            site.lost += 1
            continue
        site.alive += 1
        site.offered_cpus += node.cpus
        site.offered_memory += node.memory
    for row in filter(_holds_room, world.members.values()):
        if world.heard(row):
            site = found[world.nodes[row.node].site]
            site.taken_cpus += row.cpus
            site.taken_memory += row.memory
    return dict(found)


def _holds_room(row: MemberRow) -> bool:
    return bool(row.node) and row.phase != _HOLDS_NOTHING
