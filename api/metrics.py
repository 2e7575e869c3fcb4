"""The service's state for Prometheus. Everything is read from the database when it is asked for.

No process counts anything by itself: requests of one scraper are answered by several.
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

from api.operation import Binary, Reply, anyone_with, backend, operation
from api.tokens import Scope
from repository.clusters.history import Happened
from repository.metrics import ClusterFigures, Figures, GuardFigures, SiteFigures, figures
from vmjobs import __version__
from vmjobs.cluster.guard import GuardState
from vmjobs.cluster.member import MemberState
from vmjobs.model import MIB, JobState, now
from vmjobs.wire import BuildState

blueprint = Blueprint("metrics", __name__)

TAG: Final = "service"
READ: Final = anyone_with(Scope.COMPUTE_READ, Scope.ADMIN)
MEDIA: Final = "text/plain"
#: The format that every release of Prometheus reads, whatever the library's own default is.
CONTENT_TYPE: Final = f"{MEDIA}; version=0.0.4; charset=utf-8"

_Key = TypeVar("_Key", bound=Sequence[str])
_State = TypeVar("_State", bound=StrEnum)


@blueprint.get("/metrics")
@operation(
    "getMetrics",
    tag=TAG,
    access=READ,
    replies={200: Reply("the service in numbers", Binary("Prometheus' text format", MEDIA))},
)
def metrics() -> Response:
    """Show the service's state to Prometheus.

    All are of the whole service: every process gives the same answer.
    """
    repository = backend().repository
    found = figures(repository.database, repository.clusters.lease, now())
    text = generate_latest(ServiceMetrics(found))
    return Response(text, content_type=CONTENT_TYPE, headers={"Cache-Control": "no-cache"})


class ServiceMetrics(Collector):
    """Figures as metrics. No label has a value that a user chose: images are there by digest."""

    def __init__(self, found: Figures) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        """All metrics; those of clusters, sites and pools have no samples where there are none."""
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
            "Bytes that images take in the storage: compressed, what they share once.",
            [],
            {(): found.stored_bytes},
        )
        yield from _of_clusters(found.clusters)
        yield from _of_guards(found.guards)
        yield from _of_sites(found.sites)
        yield _gauge(
            "vmjobs_pool_up",
            "Whether the pool answered when it was asked last.",
            ["pool"],
            {(name,): answers for name, answers in found.pools.items()},
        )


def _of_clusters(clusters: Mapping[str, ClusterFigures]) -> Iterable[Metric]:
    yield _gauge(
        "vmjobs_cluster_target_members",
        "Machines that the cluster is to have; 0 while it drains or is being deleted.",
        ["cluster"],
        {(name,): cluster.target for name, cluster in clusters.items()},
    )
    yield _gauge(
        "vmjobs_cluster_members",
        "Machines of the cluster; those that are UP take jobs.",
        ["cluster", "state"],
        {
            (name, state): cluster.members[state]
            for name, cluster in clusters.items()
            for state in MemberState
        },
    )
    yield _gauge(
        "vmjobs_cluster_busy_members",
        "Machines of the cluster in which a job runs.",
        ["cluster"],
        {(name,): cluster.busy for name, cluster in clusters.items()},
    )
    yield _gauge(
        "vmjobs_cluster_member_failures",
        "Failures in a row, of all machines of the cluster since each was up last.",
        ["cluster"],
        {(name,): cluster.failures for name, cluster in clusters.items()},
    )
    yield _gauge(
        "vmjobs_cluster_outdated_members",
        "Machines of the cluster that are still as it was declared before.",
        ["cluster"],
        {(name,): cluster.outdated for name, cluster in clusters.items()},
    )
    yield _counter(
        "vmjobs_cluster_changes_total",
        "What happened to the cluster: declared anew, drained, rolled back and so on.",
        ["cluster", "change"],
        {
            (name, what.value.lower()): cluster.happened[what]
            for name, cluster in clusters.items()
            for what in Happened
        },
    )
    yield _counter(
        "vmjobs_cluster_member_changes_total",
        "How often machines of the cluster came to be in a state.",
        ["cluster", "state"],
        {
            (name, state): cluster.states[state]
            for name, cluster in clusters.items()
            for state in MemberState
        },
    )


def _of_guards(guards: Sequence[GuardFigures]) -> Iterable[Metric]:
    shut = [state for state in GuardState if state is not GuardState.OPEN]
    yield _gauge(
        "vmjobs_cluster_guards",
        "Guards that are not open: images that are tried nowhere, or not on a node, for now.",
        ["state"],
        {(state.value,): sum(guard.state is state for guard in guards) for state in shut},
    )
    yield _gauge(
        "vmjobs_cluster_guard_failures",
        "Failures in a row of an image on a node, or on all (no node), whose guard is not open.",
        ["image", "node", "state"],
        {(guard.image, guard.node, guard.state.value): guard.failures for guard in guards},
    )


def _of_sites(sites: Mapping[str, SiteFigures]) -> Iterable[Metric]:
    def room(name: str, what: str, values: Mapping[str, int]) -> Metric:
        return _gauge(name, what, ["site"], {(site,): value for site, value in values.items()})

    tokens = {(name, "given"): site.tokens for name, site in sites.items()}
    tokens |= {(name, "refused"): site.refusals for name, site in sites.items()}
    yield _counter(
        "vmjobs_cluster_tokens_total",
        "Requests of nodes for a machine's token for its pool, by their outcome.",
        ["site", "outcome"],
        tokens,
    )
    nodes = {(name, "alive"): site.alive for name, site in sites.items()}
    nodes |= {(name, "lost"): site.lost for name, site in sites.items()}
    yield _gauge(
        "vmjobs_nodes", "Execute nodes, by whether they are heard of.", ["site", "state"], nodes
    )
    yield room(
        "vmjobs_cluster_offered_cpus",
        "Processors that nodes offer to machines of clusters.",
        {name: site.offered_cpus for name, site in sites.items()},
    )
    yield room(
        "vmjobs_cluster_taken_cpus",
        "Processors that machines of clusters take.",
        {name: site.taken_cpus for name, site in sites.items()},
    )
    yield room(
        "vmjobs_cluster_offered_memory_bytes",
        "Memory that nodes offer to machines of clusters.",
        {name: site.offered_memory * MIB for name, site in sites.items()},
    )
    yield room(
        "vmjobs_cluster_taken_memory_bytes",
        "Memory that machines of clusters take.",
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
    """Every state, so that none vanishes from a graph when it has nobody."""
    return {(state.value,): counts.get(state, 0) for state in states}
