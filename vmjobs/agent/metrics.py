"""The agent's state for Prometheus, served over HTTP. It names no job, no user and no image.

How things are now is read from the objects that know when it is asked for. How long steps took and
what failed is counted from when this process began.
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
from vmjobs.agent.checks import Cause
from vmjobs.cluster.member import Phase
from vmjobs.cluster.wire import MemberReport
from vmjobs.config import host_and_port
from vmjobs.errors import ConfigError, reason_of
from vmjobs.hypervisor.base import ProbeResult
from vmjobs.model import JobState

JOB: Final = "job"
MEMBER: Final = "member"
#: Seconds. From a step that does nothing to a job that runs for a day.
BUCKETS: Final = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
#: Phases of a job's machine. A run of which nothing was told yet has begun to be staged; one whose
#: end was told is still being cleared away.
_JOB_PHASES: Final = (
    JobState.STAGING,
    JobState.BOOTING,
    JobState.RUNNING,
    JobState.COLLECTING,
)


class CachedImages(Protocol):
    """A node's image cache. hits, misses: machines whose image was here, or was not."""

    hits: int
    misses: int

    def used(self) -> int:
        """Bytes of disk that images take."""


class AgentMetrics(Collector):
    """What an agent shows. The fields are where it looks; they are set before it is served.

    jobs: how many jobs are in each state; None: nothing was told yet. members: what was reported last
    of each machine of a cluster. cache: None where images are not fetched.
    """

    def __init__(self) -> None:
        self.jobs: Callable[[], Counter[JobState | None]] = Counter
        self.members: Callable[[], Iterable[MemberReport]] = tuple
        self.probes: Callable[[], Iterable[ProbeResult]] = tuple
        self.faults: Callable[[], Mapping[Cause, str]] = dict
        self.cache: CachedImages | None = None
        self.registry = CollectorRegistry()
        self._steps = Histogram(
            "vmjobs_agent_step_seconds",
            "How long the steps of jobs and of machines of clusters took.",
            ["kind", "step"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._failures = CounterMetric(
            "vmjobs_agent_member_failures",
            "Machines of clusters that failed, by the reason's code.",
            ["code"],
            registry=self.registry,
        )
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # ------------------------------------------------------------------ what is counted

    def job_step(self, title: str, seconds: float) -> None:
        """A step of a job has ended."""
        self._steps.labels(JOB, title).observe(seconds)

    def member(self, before: MemberReport | None, after: MemberReport) -> None:
        """A machine of a cluster was reported; before it, this was. None: an earlier agent's."""
        if before is None:
            return
        known = before.seconds if before.incarnation == after.incarnation else {}
        for step, seconds in after.seconds.items():
            if step not in known:
                self._steps.labels(MEMBER, step).observe(seconds)
        if after.failures > before.failures:
            self._failures.labels(after.code).inc()

    # ------------------------------------------------------------------ what is looked up

    def collect(self) -> Iterable[Metric]:
        """The node as it is now."""
        yield InfoMetricFamily("vmjobs_agent", "The agent's release.", {"version": __version__})
        yield self._machines()
        yield self._faults()
        yield from self._hypervisors()
        yield from self._cache()

    def _machines(self) -> Metric:
        found = GaugeMetricFamily(
            "vmjobs_agent_machines",
            "Machines by what they are for and how far they are.",
            labels=["kind", "phase"],
        )
        jobs: Counter[JobState] = Counter()
        for state, count in self.jobs().items():
            jobs[_job_phase(state)] += count
        members = Counter(report.phase for report in self.members())
        for state in _JOB_PHASES:
            found.add_metric([JOB, state.lower()], jobs[state])
        for phase in Phase:
            found.add_metric([MEMBER, phase], members[phase])
        return found

    def _faults(self) -> Metric:
        found = GaugeMetricFamily(
            "vmjobs_agent_fault",
            "Whether the node takes no jobs for this cause.",
            labels=["cause"],
        )
        present = self.faults()
        for cause in Cause:
            found.add_metric([cause], cause in present)
        return found

    def _hypervisors(self) -> Iterable[Metric]:
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

    def _cache(self) -> Iterable[Metric]:
        size = GaugeMetricFamily("vmjobs_agent_image_cache_bytes", "Bytes of disk that images take.")
        hits = CounterMetricFamily(
            "vmjobs_agent_image_cache_hits", "Machines whose image was on the node already."
        )
        misses = CounterMetricFamily(
            "vmjobs_agent_image_cache_misses", "Machines whose image had to be fetched."
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
def serving(metrics: AgentMetrics, listen: str) -> Iterator[None]:
    """Answer scrapes at ``listen`` (HOST:PORT) while the context lasts; empty: nowhere.

    Raises:
        ConfigError: nothing can be served there.
    """
    if not listen:
        yield
        return
    host, port = host_and_port(listen)
    try:
        server, _ = start_http_server(port, host, metrics.registry)
    except OSError as error:
        raise ConfigError(
            f"metrics_listen: nothing can be served at {listen}: {reason_of(error)}",
            hint="name an address of this machine and a port that nobody else has",
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
