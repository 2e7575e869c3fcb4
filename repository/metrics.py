"""Figures of the service at one moment, for metrics. This module only reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from repository.clusters.backoff import backoff_of
from repository.clusters.history import ClusterEventKind, event_count, present_state, state_entry_count
from repository.clusters.snapshots import Snapshot, load_snapshot
from repository.clusters.tables import AssignmentRow, BackoffRow, ClusterRow
from repository.db.database import Database
from repository.db.models import BuildRow, JobRow
from repository.images.tables import ImageRow, SegmentRow
from vmjobs.cluster.failure_backoff import BackoffState
from vmjobs.cluster.vm_state import ClusterVmState, Phase
from vmjobs.model import JobState
from vmjobs.wire import BuildState

_State = TypeVar("_State", bound=StrEnum)


@dataclass
class ClusterFigures:
    """One cluster.

    target: wanted number of VMs; 0 if it drains or is being deleted. members: VMs by state.
    failures: sum over the VMs of failures since each was last up. outdated: VMs of earlier
    generations. event_count: counts of events. states: counts of VMs that entered each state.
    """

    target: int = 0
    members: Counter[ClusterVmState] = field(default_factory=Counter)
    busy: int = 0
    failures: int = 0
    outdated: int = 0
    event_count: Counter[ClusterEventKind] = field(default_factory=Counter)
    states: Counter[ClusterVmState] = field(default_factory=Counter)


@dataclass
class SiteFigures:
    """The nodes of one site. Only live nodes count for offered and taken resources.

    memory: MiB. tokens, refusals: counts of pool tokens that were granted and refused.
    """

    alive: int = 0
    lost: int = 0
    offered_cpus: int = 0
    offered_memory: int = 0
    taken_cpus: int = 0
    taken_memory: int = 0
    tokens: int = 0
    refusals: int = 0


@dataclass(frozen=True)
class BackoffFigures:
    """An active failure backoff. image: digest. node: empty: all nodes. failures: in a row."""

    image: str
    node: str
    state: BackoffState
    failures: int


@dataclass(frozen=True)
class Figures:
    """All figures. clusters, sites, pools: by name. pools: whether they answer queries.

    image_bytes: total size of all images. stored_bytes: bytes stored for them, deduplicated.
    """

    jobs: Mapping[JobState, int] = field(default_factory=dict)
    builds: Mapping[BuildState, int] = field(default_factory=dict)
    clusters: Mapping[str, ClusterFigures] = field(default_factory=dict)
    sites: Mapping[str, SiteFigures] = field(default_factory=dict)
    pools: Mapping[str, bool] = field(default_factory=dict)
    guards: Sequence[BackoffFigures] = ()
    images: int = 0
    image_bytes: int = 0
    stored_bytes: int = 0


def figures(database: Database, lease: timedelta, present: datetime) -> Figures:
    """Return the figures as of ``present``.  Raises Unavailable("database").

    lease: time without contact after which a node counts as lost.
    """
    with database.read() as session:
        snapshot = load_snapshot(session, lease, present, planning=False)
        images = select(func.count(), func.coalesce(func.sum(ImageRow.size), 0)).select_from(ImageRow)
        count, size = session.execute(images).one()
        stored = session.scalar(select(func.coalesce(func.sum(SegmentRow.stored), 0)))
        return Figures(
            jobs=_by_state(session, JobRow.state, JobState),
            builds=_by_state(session, BuildRow.state, BuildState),
            clusters=_clusters(snapshot),
            sites=_sites(session, snapshot),
            guards=_guards(session, present),
            pools={name: not row.problem for name, row in snapshot.pools.items()},
            images=count,
            image_bytes=int(size),
            stored_bytes=int(stored or 0),
        )


def _by_state(
    session: Session, column: InstrumentedAttribute[str], states: type[_State]
) -> dict[_State, int]:
    found = session.execute(select(column, func.count()).group_by(column))
    return {states(state): count for state, count in found}


def _clusters(snapshot: Snapshot) -> dict[str, ClusterFigures]:
    found = {name: ClusterFigures(_target(row)) for name, row in snapshot.clusters.items()}
    for row in snapshot.members.values():
        cluster = found[row.cluster]
        cluster.members[present_state(row, snapshot.heard(row))] += 1
        cluster.busy += row.busy
        cluster.failures += row.failures
        cluster.outdated += row.generation != snapshot.clusters[row.cluster].generation
    for name, declared in snapshot.clusters.items():
        found[name].event_count.update({what: event_count(declared, what) for what in ClusterEventKind})
        found[name].states.update(
            {state: state_entry_count(declared, state) for state in ClusterVmState}
        )
    return found


def _target(row: ClusterRow) -> int:
    return 0 if row.deleting or row.draining else row.target


def _guards(session: Session, present: datetime) -> tuple[BackoffFigures, ...]:
    query = (
        select(BackoffRow)
        .where(BackoffRow.until.is_not(None))
        .order_by(BackoffRow.image, BackoffRow.node)
    )
    guards = [backoff_of(row) for row in session.scalars(query)]
    return tuple(BackoffFigures(g.image, g.node, g.state(present), g.failures) for g in guards)


def _sites(session: Session, snapshot: Snapshot) -> dict[str, SiteFigures]:
    found: dict[str, SiteFigures] = defaultdict(SiteFigures)
    for node in snapshot.nodes.values():
        site = found[node.site]
        if not node.alive:
            site.lost += 1
            continue
        site.alive += 1
        site.offered_cpus += node.cpus
        site.offered_memory += node.memory
    for row in snapshot.members.values():
        # In phase GONE a VM has ended and uses no resources of its node.
        if row.phase != Phase.GONE.value and snapshot.heard(row):
            site = found[snapshot.nodes[row.node].site]
            site.taken_cpus += row.cpus
            site.taken_memory += row.memory
    asked = select(AssignmentRow.node, AssignmentRow.tokens, AssignmentRow.refusals)
    for name, tokens, refusals in session.execute(asked):
        site = found[snapshot.nodes[name].site if name in snapshot.nodes else ""]
        site.tokens += tokens
        site.refusals += refusals
    return dict(found)
