"""The tables of virtual clusters. What their rows mean stands in ``vmjobs.cluster``."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from repository.models import DIGEST, ID, STATE, Base

_CASCADE = "CASCADE"
_CODE = String(32)
_NAME = String(255)
#: A cluster's name, and a member's: that of its host.
_CLUSTER = String(32)
_MEMBER = String(63)
#: Characters of what a machine says of its operating system.
MAX_SYSTEM: Final = 128


class ClusterRow(Base):
    """A cluster.

    kinds: what boots its image. deleting: how its members are to end; empty: it is to stay.
    stalled: the generation whose replacement of machines was said to fail. happened: how often each
    thing did since it was first declared, as ``history`` names them.
    """

    __tablename__ = "clusters"

    name: Mapped[str] = mapped_column(_CLUSTER, primary_key=True)
    owner: Mapped[str] = mapped_column(_NAME)
    spec: Mapped[dict[str, Any]]
    image: Mapped[str] = mapped_column(DIGEST, index=True)
    kinds: Mapped[list[Any]]
    generation: Mapped[int] = mapped_column(default=1)
    target: Mapped[int]
    draining: Mapped[bool] = mapped_column(default=False)
    deleting: Mapped[str] = mapped_column(STATE, default="")
    stalled: Mapped[int] = mapped_column(default=0)
    events_count: Mapped[int] = mapped_column(default=0)
    happened: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created: Mapped[datetime]
    updated: Mapped[datetime]


class MemberRow(Base):
    """A member of a cluster: the order, the agent's last word, the pool's.

    orders: what of its order never changes. pool, cpus, memory, disk: the same as there.
    admitted, condemned: the last incarnation that is; why, why_message: of the latter.
    phase: empty before the agent's first word. code, message: the agent's, or why there is no node.
    advertised: the incarnation whose ad the pool has; 0: none. withdrawn: the last one that the pool
    was told is no more. waiting: since when it is waited for its ad or its probe. system: as its ad
    told last. state, since: as the history had them last.
    """

    __tablename__ = "cluster_members"
    __table_args__ = (Index(None, "cluster", "generation"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    cluster: Mapped[str] = mapped_column(ForeignKey("clusters.name", ondelete=_CASCADE))
    name: Mapped[str] = mapped_column(_MEMBER, unique=True)
    generation: Mapped[int]
    image: Mapped[str] = mapped_column(DIGEST, index=True)
    orders: Mapped[dict[str, Any]] = mapped_column(deferred=True)
    pool: Mapped[str] = mapped_column(_NAME)
    cpus: Mapped[int]
    memory: Mapped[int]
    disk: Mapped[int]
    created: Mapped[datetime]

    node: Mapped[str] = mapped_column(_NAME, default="", index=True)
    goal: Mapped[str] = mapped_column(STATE)
    admitted: Mapped[int] = mapped_column(default=0)
    condemned: Mapped[int] = mapped_column(default=0)
    why: Mapped[str] = mapped_column(_CODE, default="PROGRESS")
    why_message: Mapped[str] = mapped_column(Text, default="")

    phase: Mapped[str] = mapped_column(STATE, default="")
    incarnation: Mapped[int] = mapped_column(default=0)
    code: Mapped[str] = mapped_column(_CODE, default="PROGRESS")
    message: Mapped[str] = mapped_column(Text, default="")
    hypervisor: Mapped[str | None] = mapped_column(STATE)
    failures: Mapped[int] = mapped_column(default=0)
    retry: Mapped[datetime | None]

    advertised: Mapped[int] = mapped_column(default=0)
    withdrawn: Mapped[int] = mapped_column(default=0)
    busy: Mapped[bool] = mapped_column(default=False)
    jobs: Mapped[int] = mapped_column(BigInteger, default=0)
    system: Mapped[str] = mapped_column(String(MAX_SYSTEM), default="")
    waiting: Mapped[datetime | None]

    state: Mapped[str] = mapped_column(STATE)
    since: Mapped[datetime]
    up_since: Mapped[datetime | None]


class ClusterEventRow(Base):
    """One line of a cluster's history. member: empty: the cluster itself."""

    __tablename__ = "cluster_events"

    cluster: Mapped[str] = mapped_column(
        ForeignKey("clusters.name", ondelete=_CASCADE), primary_key=True
    )
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time: Mapped[datetime]
    member: Mapped[str] = mapped_column(_MEMBER, default="")
    node: Mapped[str] = mapped_column(_NAME, default="")
    state: Mapped[str] = mapped_column(STATE)
    code: Mapped[str] = mapped_column(_CODE)
    message: Mapped[str] = mapped_column(Text, default="")


class GenerationRow(Base):
    """A generation of a cluster beside the present one; ``why`` it is kept, ``since`` when.

    standing: ``good``: the last one that was fully up. ``failed``: declared, and taken back.
    """

    __tablename__ = "cluster_generations"

    cluster: Mapped[str] = mapped_column(
        ForeignKey("clusters.name", ondelete=_CASCADE), primary_key=True
    )
    standing: Mapped[str] = mapped_column(STATE, primary_key=True)
    generation: Mapped[int]
    spec: Mapped[dict[str, Any]]
    image: Mapped[str] = mapped_column(DIGEST, index=True)
    kinds: Mapped[list[Any]]
    why: Mapped[str] = mapped_column(Text, default="")
    since: Mapped[datetime]


class GuardRow(Base):
    """A guard of ``vmjobs.cluster.guard``. told: its ``until``, as the histories had it last."""

    __tablename__ = "cluster_guards"

    image: Mapped[str] = mapped_column(DIGEST, primary_key=True)
    node: Mapped[str] = mapped_column(_NAME, primary_key=True)
    failures: Mapped[int] = mapped_column(default=0)
    closures: Mapped[int] = mapped_column(default=0)
    until: Mapped[datetime | None]
    code: Mapped[str] = mapped_column(_CODE, default="PROGRESS")
    why: Mapped[str] = mapped_column(Text, default="")
    nodes: Mapped[list[Any]]
    proven: Mapped[bool] = mapped_column(default=False)
    told: Mapped[datetime | None]


class NodeShareRow(Base):
    """A node's share of all clusters: how often it has changed, and when its agent last spoke of it.

    tokens, refusals: how many tokens for pools its agent was given, and how often it was given none.
    """

    __tablename__ = "node_shares"

    node: Mapped[str] = mapped_column(_NAME, primary_key=True)
    revision: Mapped[int] = mapped_column(BigInteger, default=0)
    heard: Mapped[datetime | None]
    tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    refusals: Mapped[int] = mapped_column(BigInteger, default=0)


class PoolRow(Base):
    """A pool: when it was last asked, and why it did not answer then; empty: it did."""

    __tablename__ = "cluster_pools"

    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    asked: Mapped[datetime]
    problem: Mapped[str] = mapped_column(Text, default="")


class DemandRow(Base):
    """What is known of demand for a cluster of a range of sizes.

    since, most: since when it has more machines than are wanted, and how many were at most since then.
    known: what ads of its machines say; kind: a digest of what those machines are made of.
    woken: when somebody had it wake, as long as it has a machine for that.
    """

    __tablename__ = "cluster_demands"

    cluster: Mapped[str] = mapped_column(
        ForeignKey("clusters.name", ondelete=_CASCADE), primary_key=True
    )
    since: Mapped[datetime | None]
    most: Mapped[int] = mapped_column(default=0)
    woken: Mapped[datetime | None]
    kind: Mapped[str] = mapped_column(String(64))
    known: Mapped[dict[str, Any]]


class WeighedRow(Base):
    """A pool whose idle jobs are counted: when it is asked again, why it did not answer; empty: it did.

    offers: it may show machines that are switched off.
    """

    __tablename__ = "cluster_weighings"

    pool: Mapped[str] = mapped_column(_NAME, primary_key=True)
    again: Mapped[datetime]
    problem: Mapped[str] = mapped_column(Text, default="")
    offers: Mapped[bool] = mapped_column(default=False)
