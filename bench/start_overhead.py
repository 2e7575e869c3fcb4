"""Benchmark 1: from a run's start to a ready guest, over the bare command line."""

from __future__ import annotations

import logging
import re
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.figures import Finding, compare, in_turns, spread
from bench.raw_boot import raw_boot
from vmjobs.agent.run import job_run
from vmjobs.agent.run.services import RunServices
from vmjobs.agent.run.state import Run, RunRequest
from vmjobs.agent.vm.events import EventQueue
from vmjobs.local import LocalJob
from vmjobs.model import HypervisorKind, JobSpec, JobState, NetworkMode, Report, StreamName
from vmjobs.terminal import ByteSink

#: The targets in docs/benchmarks.md.
TARGETS = {HypervisorKind.UML: 1.05, HypervisorKind.KVM: 1.25, HypervisorKind.QEMU: 1.25}


class _Stopwatch:
    """Notes when the run's guest becomes ready."""

    ready = 0.0

    def progress(self, report: Report) -> None:
        """RUNNING begins when the guest is ready."""
        if report.state is JobState.RUNNING:
            self.ready = time.monotonic()


class _Steps(logging.Handler):
    """Collects the times of the run's steps, which the agent logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def emit(self, record: logging.LogRecord) -> None:
        found = re.fullmatch(r"job \S+: (.+) took ([0-9.]+) s", record.getMessage())
        if found:
            self.seconds[found[1]].append(float(found[2]))


def start_overhead(
    made: RunServices, digest: str, kinds: list[HypervisorKind], pairs: int, few: int
) -> Iterator[Finding]:
    """Compare for each hypervisor, without network and with the endpoint. few: for slow ones."""
    for kind in kinds:
        # A tight target needs many pairs to show a difference.
        count = 2 * pairs if TARGETS[kind] < 1.1 else few
        for mode in (NetworkMode.NONE, NetworkMode.REPOSITORY):
            yield _compare(made, digest, kind, mode, count)


def empty_job(image: str, kind: HypervisorKind, mode: NetworkMode) -> JobSpec:
    """A job that ends at once."""
    return JobSpec(image=image, script="exit 0\n", memory=128, disk=64, hypervisor=kind, network=mode)


def _compare(
    made: RunServices, digest: str, kind: HypervisorKind, mode: NetworkMode, pairs: int
) -> Finding:
    image, spec = made.images.prepare(digest), empty_job(digest, kind, mode)

    def theirs() -> float:
        with tempfile.TemporaryDirectory(prefix="by-hand-") as directory:
            return raw_boot(kind, image, spec, Path(directory))

    run_once(made, digest, spec), theirs()  # fills the cache; not counted
    with step_times() as steps:
        seen = in_turns(pairs, lambda: run_once(made, digest, spec), theirs)
    details = {title: spread(times) for title, times in steps.seconds.items()}
    what = f"start to ready, {kind}, network {mode}"
    return compare(1, what, seen, TARGETS[kind], measure="agent / by hand", details={"steps": details})


def run_once(made: RunServices, digest: str, spec: JobSpec) -> float:
    """Seconds from the start of a run to a ready guest."""
    watch = _Stopwatch()
    began = time.monotonic()
    execute(made, digest, spec, watch.progress)
    return watch.ready - began


def execute(
    made: RunServices,
    digest: str,
    spec: JobSpec,
    on_report: Callable[[Report], object] = lambda _report: None,
    files: Mapping[str, Path] | None = None,
    sinks: Mapping[StreamName, ByteSink] | None = None,
) -> Run:
    """Run a job to its end, and keep only its streams in ``sinks``.

    Raises:
        RuntimeError: it did not complete.
    """
    with tempfile.TemporaryDirectory(prefix="outputs-") as outputs:
        job = LocalJob(
            job_id=f"bench-{uuid.uuid4().hex[:12]}",
            spec=spec,
            image_digest=digest,
            files=files or {},
            output_directory=Path(outputs),
            on_report=lambda report: None,
            sinks=sinks or {},
        )
        run = Run(RunRequest(job, on_report, made, job.job_id, uuid.uuid4().hex, EventQueue()))
        outcome = job_run.execute(run)
    if outcome.state is not JobState.COMPLETED:
        raise RuntimeError(f"the measured job ended as {outcome.state}: {outcome.reason.message}")
    return run


@contextmanager
def step_times() -> Iterator[_Steps]:
    """Collect the durations of the steps of the runs within."""
    handler = _Steps()
    logger = logging.getLogger("vmjobs.agent.run.job_run")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = True
