"""The service's state as metrics of Prometheus, read from the database for each request.

Processes keep no counters of their own, because several of them answer one scraper's requests.
Labels hold no user's text: images appear by digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from sqlalchemy import func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from repository.clusters.backoff import backoff_of
from repository.clusters.history import CLUSTER_EVENTS, event_count, present_state, state_entry_count
from repository.clusters.snapshots import Snapshot, load_snapshot
from repository.clusters.tables import AssignmentRow, BackoffRow
from repository.db.database import Database
from repository.db.models import BuildRow, JobRow
from repository.images.tables import ImageRow, SegmentRow
from vmjobs import __version__
from vmjobs.cluster.failure_backoff import BackoffState
from vmjobs.cluster.vm_state import ClusterVmState, Phase
from vmjobs.model import MIB, JobState
from vmjobs.wire import BuildState

#: Help text and labels of each metric. The names of counters end with ``_total``.
METRICS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "vmjobs_jobs": ("Jobs.", ("state",)),
    "vmjobs_builds": ("Builds of images.", ("state",)),
    "vmjobs_images": ("Images.", ()),
    "vmjobs_images_bytes": ("Bytes of all images, each whole.", ()),
    "vmjobs_images_stored_bytes": (
        "Stored bytes of images: compressed, shared data counted once.",
        (),
    ),
    "vmjobs_cluster_target_members": (
        "VMs that the cluster shall have; 0 while it drains or is being deleted.",
        ("cluster",),
    ),
    "vmjobs_cluster_members": (
        "VMs of the cluster; those that are UP take jobs.",
        ("cluster", "state"),
    ),
    "vmjobs_cluster_busy_members": ("VMs of the cluster that run a job.", ("cluster",)),
    "vmjobs_cluster_member_failures": (
        "Failures in a row of all VMs of the cluster, since each was last up.",
        ("cluster",),
    ),
    "vmjobs_cluster_outdated_members": (
        "VMs of the cluster that still have an earlier specification.",
        ("cluster",),
    ),
    "vmjobs_cluster_changes_total": (
        "Changes of the cluster: updated, drained, rolled back and so on.",
        ("cluster", "change"),
    ),
    "vmjobs_cluster_member_changes_total": (
        "How often VMs of the cluster entered a state.",
        ("cluster", "state"),
    ),
    "vmjobs_cluster_guards": (
        "Failure backoffs in force: images that no node, or one node, does not try for now.",
        ("state",),
    ),
    "vmjobs_cluster_guard_failures": (
        "Failures in a row of an image with a backoff, on a node, or on all (no node).",
        ("image", "node", "state"),
    ),
    "vmjobs_cluster_tokens_total": (
        "Requests of nodes for a VM's token for its pool, by outcome.",
        ("site", "outcome"),
    ),
    "vmjobs_nodes": ("Execute nodes, by whether they report.", ("site", "state")),
    "vmjobs_cluster_offered_cpus": ("Processors that nodes offer to VMs of clusters.", ("site",)),
    "vmjobs_cluster_taken_cpus": ("Processors that VMs of clusters use.", ("site",)),
    "vmjobs_cluster_offered_memory_bytes": ("Memory that nodes offer to VMs of clusters.", ("site",)),
    "vmjobs_cluster_taken_memory_bytes": ("Memory that VMs of clusters use.", ("site",)),
    "vmjobs_pool_up": ("Whether the pool answered when it was asked last.", ("pool",)),
}

#: By metric, and the values of its labels.
_Values = dict[str, Counter[tuple[str, ...]]]


def read_metrics(database: Database, lease: timedelta, present: datetime) -> list[Metric]:
    """Read all metrics as of ``present``.  Raises Unavailable("database").

    lease: time without contact after which a node counts as lost.
    """
    values: _Values = {name: Counter() for name in METRICS}
    with database.read() as session:
        snapshot = load_snapshot(session, lease, present, planning=False)
        values["vmjobs_jobs"] = _count_by_state(session, JobRow.state, JobState)
        values["vmjobs_builds"] = _count_by_state(session, BuildRow.state, BuildState)
        _measure_images(session, values)
        _measure_clusters(snapshot, values)
        _measure_backoffs(session, present, values)
        _measure_sites(session, snapshot, values)
        for name, row in snapshot.pools.items():
            values["vmjobs_pool_up"][name,] = not row.problem
    release = InfoMetricFamily("vmjobs", "The service's release.", {"version": __version__})
    return [release, *(metric_family(name, samples) for name, samples in values.items())]


def metric_family(name: str, samples: Mapping[tuple[str, ...], float]) -> Metric:
    """Return a metric of the table. samples: by the values of its labels."""
    text, labels = METRICS[name]
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, text, labels=labels)
    for key, value in samples.items():
        family.add_metric(key, value)
    return family


def _count_by_state(
    session: Session, column: InstrumentedAttribute[str], states: type[StrEnum]
) -> Counter[tuple[str, ...]]:
    """Count rows by state; states without rows have zeros, so that these stay in a graph."""
    found = session.execute(select(column, func.count()).group_by(column))
    return Counter({(state,): 0 for state in states} | {(state,): count for state, count in found})


def _measure_images(session: Session, values: _Values) -> None:
    images = select(func.count(), func.coalesce(func.sum(ImageRow.size), 0)).select_from(ImageRow)
    count, size = session.execute(images).one()
    stored = session.scalar(select(func.coalesce(func.sum(SegmentRow.stored), 0)))
    values["vmjobs_images"][()] = count
    values["vmjobs_images_bytes"][()] = int(size)
    values["vmjobs_images_stored_bytes"][()] = int(stored or 0)


def _measure_clusters(snapshot: Snapshot, values: _Values) -> None:
    for name, cluster in snapshot.clusters.items():
        ends = cluster.deleting or cluster.draining
        values["vmjobs_cluster_target_members"][name,] = 0 if ends else cluster.target
        for counted in ("busy_members", "member_failures", "outdated_members"):
            values[f"vmjobs_cluster_{counted}"][name,] = 0
        for what in CLUSTER_EVENTS:
            count = event_count(cluster, what)
            values["vmjobs_cluster_changes_total"][name, what.lower()] = count
        for state in ClusterVmState:
            values["vmjobs_cluster_members"][name, state] = 0
            count = state_entry_count(cluster, state)
            values["vmjobs_cluster_member_changes_total"][name, state] = count
    for row in snapshot.vms.values():
        name = row.cluster
        state = present_state(row, snapshot.heard(row))
        values["vmjobs_cluster_members"][name, state] += 1
        values["vmjobs_cluster_busy_members"][name,] += row.busy
        values["vmjobs_cluster_member_failures"][name,] += row.failures
        is_outdated = row.generation != snapshot.clusters[name].generation
        values["vmjobs_cluster_outdated_members"][name,] += is_outdated


def _measure_backoffs(session: Session, present: datetime, values: _Values) -> None:
    for state in BackoffState:
        if state is not BackoffState.OPEN:
            values["vmjobs_cluster_guards"][state,] = 0
    query = (
        select(BackoffRow)
        .where(BackoffRow.until.is_not(None))
        .order_by(BackoffRow.image, BackoffRow.node)
    )
    for guard in map(backoff_of, session.scalars(query)):
        state = guard.state(present)
        if state is not BackoffState.OPEN:
            values["vmjobs_cluster_guards"][state,] += 1
        values["vmjobs_cluster_guard_failures"][guard.image, guard.node, state] = guard.failures


def _measure_sites(session: Session, snapshot: Snapshot, values: _Values) -> None:
    """Measure the nodes of each site. Only live ones count for offered and taken resources."""
    asked = session.execute(select(AssignmentRow.node, AssignmentRow.tokens, AssignmentRow.refusals))
    nodes, assignments = snapshot.nodes, asked.all()
    site_by_node = {row.node: "" for row in assignments} | {name: n.site for name, n in nodes.items()}
    for site in site_by_node.values():
        for what in ("given", "refused"):
            values["vmjobs_cluster_tokens_total"][site, what] = 0
        for what in ("alive", "lost"):
            values["vmjobs_nodes"][site, what] = 0
        for what in ("offered_cpus", "taken_cpus", "offered_memory_bytes", "taken_memory_bytes"):
            values[f"vmjobs_cluster_{what}"][site,] = 0
    for row in assignments:
        values["vmjobs_cluster_tokens_total"][site_by_node[row.node], "given"] += row.tokens
        values["vmjobs_cluster_tokens_total"][site_by_node[row.node], "refused"] += row.refusals
    for node in nodes.values():
        values["vmjobs_nodes"][node.site, "alive" if node.alive else "lost"] += 1
        if node.alive:
            values["vmjobs_cluster_offered_cpus"][node.site,] += node.cpus
            values["vmjobs_cluster_offered_memory_bytes"][node.site,] += node.memory * MIB
    for vm in snapshot.vms.values():
        # In phase GONE a VM has ended and uses no resources of its node.
        if vm.phase != Phase.GONE.value and snapshot.heard(vm):
            site = site_by_node[vm.node]
            values["vmjobs_cluster_taken_cpus"][site,] += vm.cpus
            values["vmjobs_cluster_taken_memory_bytes"][site,] += vm.memory * MIB
