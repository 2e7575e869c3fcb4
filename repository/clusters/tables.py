"""The tables of virtual clusters. ``vmjobs.cluster`` defines the meaning of their rows."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from repository.db.models import DIGEST, ID, STATE, Base

_CASCADE = "CASCADE"
_CODE = String(32)
_NAME = String(255)
#: Length of a cluster's name, and of a cluster VM's, which is its host name.
_CLUSTER = String(32)
_MEMBER = String(63)
#: Length of the name of a VM's operating system.
MAX_SYSTEM: Final = 128


class ClusterRow(Base):
    """A cluster.

    kinds: hypervisors that boot its image. deleting: how its VMs end; empty: it is not being deleted.
    stalled: the generation whose rollout was recorded as failed. happened: counts of events since it
    was first declared, with the keys of ``history``.
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


class ClusterVmRow(Base):
    """A cluster VM: its order, the agent's last report, and the pool's last data.

    orders: the constant part of its order. pool, cpus, memory, disk: copies from the order.
    admitted: the last registered incarnation. condemned: the last incarnation to be replaced; why,
    why_message: the reason. phase: empty before the agent's first report. code, message: the agent's,
    or why the VM has no node. advertised: the incarnation whose ad the pool has; 0: none. withdrawn:
    the last incarnation whose ad was withdrawn. waiting: start of the wait for its ad or probe job.
    system: from its last ad. state, since: as last recorded in the history.
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
    """One line of a cluster's history. member: name of a VM; empty: the cluster itself."""

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

    standing: ``good``: the last one that was fully up. ``failed``: declared, and rolled back.
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


class BackoffRow(Base):
    """A backoff of ``vmjobs.cluster.failure_backoff``. told: ``until`` as histories have it."""

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


class AssignmentRow(Base):
    """The assignment of cluster VMs to a node: its revision, and the agent's last contact.

    tokens, refusals: counts of pool tokens that the agent was granted and refused.
    """

    __tablename__ = "node_shares"

    node: Mapped[str] = mapped_column(_NAME, primary_key=True)
    revision: Mapped[int] = mapped_column(BigInteger, default=0)
    heard: Mapped[datetime | None]
    tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    refusals: Mapped[int] = mapped_column(BigInteger, default=0)


class PoolRow(Base):
    """A pool: the time of the last query, and why it failed; empty: it did not."""

    __tablename__ = "cluster_pools"

    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    asked: Mapped[datetime]
    problem: Mapped[str] = mapped_column(Text, default="")


class DemandRow(Base):
    """The demand for an autoscaled cluster.

    since, most: since when it has more VMs than the demand, and the highest demand since then.
    known: attributes of its VMs' ads; kind: a digest of the VM settings behind them.
    woken: the time of a wake request that still keeps a VM.
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


class PoolDemandRow(Base):
    """A pool whose idle jobs are counted. again: time of the next query.

    problem: why the last query failed; empty: it did not. offers: the pool may have ads of VMs that
    could be started.
    """

    __tablename__ = "cluster_weighings"

    pool: Mapped[str] = mapped_column(_NAME, primary_key=True)
    again: Mapped[datetime]
    problem: Mapped[str] = mapped_column(Text, default="")
    offers: Mapped[bool] = mapped_column(default=False)
