"""The service's state for Prometheus, read from the database for each request.

Processes keep no counters of their own, because several of them answer one scraper's requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeVar

from flask import Blueprint
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from werkzeug.wrappers import Response

from api.operation import BinaryBody, Reply, access_for, backend, operation
from api.tokens import Scope
from repository.clusters.history import ClusterEventKind
from repository.metrics import BackoffFigures, ClusterFigures, Figures, SiteFigures, figures
from vmjobs import __version__
from vmjobs.cluster.failure_backoff import BackoffState
from vmjobs.cluster.vm_state import ClusterVmState
from vmjobs.model import MIB, JobState, now
from vmjobs.wire import BuildState

blueprint = Blueprint("metrics", __name__)

READ: Final = access_for(Scope.COMPUTE_READ, Scope.ADMIN)
MEDIA: Final = "text/plain"
#: The format that every release of Prometheus reads, whatever the library's own default is.
CONTENT_TYPE: Final = f"{MEDIA}; version=0.0.4; charset=utf-8"

_Key = TypeVar("_Key", bound=Sequence[str])
_State = TypeVar("_State", bound=StrEnum)


@blueprint.get("/metrics")
@operation(
    "getMetrics",
    access=READ,
    replies={200: Reply("the metrics", BinaryBody("Prometheus' text format", MEDIA))},
)
def metrics() -> Response:
    """Show the service's state to Prometheus.

    The metrics cover the whole service: every process gives the same answer.
    """
    repository = backend().repository
    found = figures(repository.database, repository.clusters.lease, now())
    text = generate_latest(ServiceMetrics(found))
    return Response(text, content_type=CONTENT_TYPE, headers={"Cache-Control": "no-cache"})


class ServiceMetrics(Collector):
    """Figures as metrics. Labels hold no user's text: images appear by digest."""

    def __init__(self, found: Figures) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; clusters, sites and pools have samples if they exist."""
        found = self._found
        yield InfoMetricFamily("vmjobs", "The service's release.", {"version": __version__})
        yield _gauge("vmjobs_jobs", "Jobs.", ["state"], _states(found.jobs, JobState))
        yield _gauge("vmjobs_builds", "Builds of images.", ["state"], _states(found.builds, BuildState))
        yield _gauge("vmjobs_images", "Images.", [], {(): found.images})
        yield _gauge(
            "vmjobs_images_bytes", "Bytes of all images, each whole.", [], {(): found.image_bytes}
        )
        yield _gauge(
            "vmjobs_images_stored_bytes",
            "Stored bytes of images: compressed, shared data counted once.",
            [],
            {(): found.stored_bytes},
        )
        yield from _cluster_metrics(found.clusters)
        yield from _backoff_metrics(found.guards)
        yield from _site_metrics(found.sites)
        yield _gauge(
            "vmjobs_pool_up",
            "Whether the pool answered when it was asked last.",
            ["pool"],
            {(name,): answers for name, answers in found.pools.items()},
        )


def _cluster_metrics(clusters: Mapping[str, ClusterFigures]) -> Iterable[Metric]:
    yield _gauge(
        "vmjobs_cluster_target_members",
        "VMs that the cluster shall have; 0 while it drains or is being deleted.",
        ["cluster"],
        {(name,): cluster.target for name, cluster in clusters.items()},
    )
    yield _gauge(
        "vmjobs_cluster_members",
        "VMs of the cluster; those that are UP take jobs.",
        ["cluster", "state"],
        {
            (name, state): cluster.members[state]
            for name, cluster in clusters.items()
            for state in ClusterVmState
        },
    )
    yield _gauge(
        "vmjobs_cluster_busy_members",
        "VMs of the cluster that run a job.",
        ["cluster"],
        {(name,): cluster.busy for name, cluster in clusters.items()},
    )
    yield _gauge(
        "vmjobs_cluster_member_failures",
        "Failures in a row of all VMs of the cluster, since each was last up.",
        ["cluster"],
        {(name,): cluster.failures for name, cluster in clusters.items()},
    )
    yield _gauge(
        "vmjobs_cluster_outdated_members",
        "VMs of the cluster that still have an earlier specification.",
        ["cluster"],
        {(name,): cluster.outdated for name, cluster in clusters.items()},
    )
    yield _counter(
        "vmjobs_cluster_changes_total",
        "Changes of the cluster: updated, drained, rolled back and so on.",
        ["cluster", "change"],
        {
            (name, what.value.lower()): cluster.event_count[what]
            for name, cluster in clusters.items()
            for what in ClusterEventKind
        },
    )
    yield _counter(
        "vmjobs_cluster_member_changes_total",
        "How often VMs of the cluster entered a state.",
        ["cluster", "state"],
        {
            (name, state): cluster.states[state]
            for name, cluster in clusters.items()
            for state in ClusterVmState
        },
    )


def _backoff_metrics(guards: Sequence[BackoffFigures]) -> Iterable[Metric]:
    shut = [state for state in BackoffState if state is not BackoffState.OPEN]
    yield _gauge(
        "vmjobs_cluster_guards",
        "Failure backoffs in force: images that no node, or one node, does not try for now.",
        ["state"],
        {(state.value,): sum(guard.state is state for guard in guards) for state in shut},
    )
    yield _gauge(
        "vmjobs_cluster_guard_failures",
        "Failures in a row of an image with a backoff, on a node, or on all (no node).",
        ["image", "node", "state"],
        {(guard.image, guard.node, guard.state.value): guard.failures for guard in guards},
    )


def _site_metrics(sites: Mapping[str, SiteFigures]) -> Iterable[Metric]:
    def site_gauge(name: str, what: str, values: Mapping[str, int]) -> Metric:
        return _gauge(name, what, ["site"], {(site,): value for site, value in values.items()})

    tokens = {(name, "given"): site.tokens for name, site in sites.items()}
    tokens |= {(name, "refused"): site.refusals for name, site in sites.items()}
    yield _counter(
        "vmjobs_cluster_tokens_total",
        "Requests of nodes for a VM's token for its pool, by outcome.",
        ["site", "outcome"],
        tokens,
    )
    nodes = {(name, "alive"): site.alive for name, site in sites.items()}
    nodes |= {(name, "lost"): site.lost for name, site in sites.items()}
    yield _gauge("vmjobs_nodes", "Execute nodes, by whether they report.", ["site", "state"], nodes)
    yield site_gauge(
        "vmjobs_cluster_offered_cpus",
        "Processors that nodes offer to VMs of clusters.",
        {name: site.offered_cpus for name, site in sites.items()},
    )
    yield site_gauge(
        "vmjobs_cluster_taken_cpus",
        "Processors that VMs of clusters use.",
        {name: site.taken_cpus for name, site in sites.items()},
    )
    yield site_gauge(
        "vmjobs_cluster_offered_memory_bytes",
        "Memory that nodes offer to VMs of clusters.",
        {name: site.offered_memory * MIB for name, site in sites.items()},
    )
    yield site_gauge(
        "vmjobs_cluster_taken_memory_bytes",
        "Memory that VMs of clusters use.",
        {name: site.taken_memory * MIB for name, site in sites.items()},
    )


def _gauge(name: str, what: str, labels: Sequence[str], values: Mapping[_Key, float]) -> Metric:
    family = GaugeMetricFamily(name, what, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _counter(name: str, what: str, labels: Sequence[str], values: Mapping[_Key, float]) -> Metric:
    family = CounterMetricFamily(name, what, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _states(counts: Mapping[_State, int], states: type[_State]) -> dict[tuple[str], int]:
    """Return counts of all states, so that zeros stay in a graph."""
    return {(state.value,): counts.get(state, 0) for state in states}
