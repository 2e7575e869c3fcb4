"""The agent's metrics for Prometheus, over HTTP. They name no job, user or image.

Present values are read from the agent's objects at each scrape. Durations of steps and failures are
counted from the start of this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, start_http_server
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from vmjobs import __version__
from vmjobs.agent.checks import FaultCause
from vmjobs.cluster.vm_state import Phase
from vmjobs.cluster.wire import ClusterVmReport
from vmjobs.config import host_and_port
from vmjobs.errors import ConfigError, reason_of
from vmjobs.hypervisor.base import ProbeResult
from vmjobs.model import JobState

JOB: Final = "job"
CLUSTER_VM: Final = "member"
#: Seconds, from a step that does nothing to a job that runs for a day.
BUCKETS: Final = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
#: Phases of a job's VM. A run without a report counts as staging, a run whose end has been reported
#: as collecting: its VM is still being removed.
_JOB_PHASES: Final = (
    JobState.STAGING,
    JobState.BOOTING,
    JobState.RUNNING,
    JobState.COLLECTING,
)


class CachedImages(Protocol):
    """A node's image cache. hits, misses: VMs whose image was cached, or was not."""

    hits: int
    misses: int

    def used(self) -> int:
        """Return the bytes of disk that images use."""


class AgentMetrics(Collector):
    """Metrics of an agent. The fields are its sources, set before metrics are served.

    jobs: number of jobs in each state; None: without a report yet. members: the last report of each
    cluster VM. cache: None if images are not fetched.
    """

    def __init__(self) -> None:
        self.jobs: Callable[[], Counter[JobState | None]] = Counter
        self.members: Callable[[], Iterable[ClusterVmReport]] = tuple
        self.probes: Callable[[], Iterable[ProbeResult]] = tuple
        self.faults: Callable[[], Mapping[FaultCause, str]] = dict
        self.cache: CachedImages | None = None
        self.registry = CollectorRegistry()
        self._steps = Histogram(
            "vmjobs_agent_step_seconds",
            "How long the steps of jobs and of cluster VMs took.",
            ["kind", "step"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._failures = CounterMetric(
            "vmjobs_agent_member_failures",
            "Cluster VMs that failed, by the reason's code.",
            ["code"],
            registry=self.registry,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # ------------------------------------------------------------------ counted

    def job_step(self, title: str, seconds: float) -> None:
        """Count a step of a job that has ended."""
        self._steps.labels(JOB, title).observe(seconds)

    def member(self, before: ClusterVmReport | None, after: ClusterVmReport) -> None:
        """Count a cluster VM's report. before: the last one; None: this agent has none."""
        if before is None:
            return
        known = before.seconds if before.incarnation == after.incarnation else {}
        for step, seconds in after.seconds.items():
            if step not in known:
                self._steps.labels(CLUSTER_VM, step).observe(seconds)
        if after.failures > before.failures:
            self._failures.labels(after.code).inc()

    # ------------------------------------------------------------------ read at each scrape

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("vmjobs_agent", "The agent's release.", {"version": __version__})
        yield self._vm_metrics()
        yield self._fault_metrics()
        yield from self._hypervisor_metrics()
        yield from self._cache_metrics()

    def _vm_metrics(self) -> Metric:
        found = GaugeMetricFamily(
            "vmjobs_agent_machines",
            "VMs by kind (job or cluster member) and phase.",
            labels=["kind", "phase"],
        )
        jobs: Counter[JobState] = Counter()
        for state, count in self.jobs().items():
            jobs[_job_phase(state)] += count
        members = Counter(report.phase for report in self.members())
        for state in _JOB_PHASES:
            found.add_metric([JOB, state.lower()], jobs[state])
        for phase in Phase:
            found.add_metric([CLUSTER_VM, phase], members[phase])
        return found

    def _fault_metrics(self) -> Metric:
        found = GaugeMetricFamily(
            "vmjobs_agent_fault",
            "Whether the node takes no jobs because of this cause.",
            labels=["cause"],
        )
        present = self.faults()
        for cause in FaultCause:
            found.add_metric([cause], cause in present)
        return found

    def _hypervisor_metrics(self) -> Iterable[Metric]:
        works = GaugeMetricFamily(
            "vmjobs_agent_hypervisor_works",
            "Whether the last probe booted a guest on it.",
            labels=["hypervisor"],
        )
        seconds = GaugeMetricFamily(
            "vmjobs_agent_hypervisor_probe_seconds",
            "How long the last probe took.",
            labels=["hypervisor"],
        )
        for result in self.probes():
            works.add_metric([result.kind], result.works)
            seconds.add_metric([result.kind], result.seconds)
        return works, seconds

    def _cache_metrics(self) -> Iterable[Metric]:
        size = GaugeMetricFamily("vmjobs_agent_image_cache_bytes", "Bytes of disk that images use.")
        hits = CounterMetricFamily(
            "vmjobs_agent_image_cache_hits", "VMs whose image was already on the node."
        )
        misses = CounterMetricFamily(
            "vmjobs_agent_image_cache_misses", "VMs whose image had to be fetched."
        )
        if self.cache is not None:
            size.add_metric([], self.cache.used())
            hits.add_metric([], self.cache.hits)
            misses.add_metric([], self.cache.misses)
        return size, hits, misses


def _job_phase(state: JobState | None) -> JobState:
    if state is None:
        return JobState.STAGING
    return state if state in _JOB_PHASES else JobState.COLLECTING


@contextmanager
def serving(
    registry: CollectorRegistry, listen: str, setting: str = "metrics_listen"
) -> Iterator[None]:
    """Serve metrics at ``listen`` (HOST:PORT) while the context lasts; ``""``: nowhere.

    setting: the name of ``listen``, for errors.

    Raises:
        ConfigError: the address cannot be used.
    """
    if not listen:
        yield
        return
    host, port = host_and_port(listen)
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot listen at {listen}: {reason_of(error)}",
            hint="use an address of this host and a free port",
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
