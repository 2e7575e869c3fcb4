"""Runs one job: takes the steps of :mod:`vmjobs.agent.run.steps`, undoes them, and reports.

The run verifies that its VM is gone, then delivers everything, then removes its directory. See
:mod:`vmjobs.agent.journal` for the state that a ``kill -9`` leaves at each point.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket as Socket
from typing import Protocol

from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.image_source import ImageSource
from vmjobs.agent.job_source import JobSource
from vmjobs.agent.journal import InterruptedRun, Journal, RunRecord
from vmjobs.agent.run import checkpoint
from vmjobs.agent.run.events import (
    ConsoleLineMatched,
    EventQueue,
    ImageLost,
    LeaseLost,
    RunSuperseded,
    ScriptEnded,
    SignalSent,
)
from vmjobs.agent.run.outcome import (
    STOP_SIGNALS,
    RunEnded,
    RunOutcome,
    blame_full_disk,
    has_errno,
    image_failed,
    is_node_fault,
    requeue_if_retryable,
    run_failed,
    run_stopped,
)
from vmjobs.agent.run.outputs import CollectedFile, DiskContents, OutputCollector
from vmjobs.agent.run.report_uploader import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, ReportUploader
from vmjobs.agent.run.resource_usage import ResourceUsage, measure_files, measure_vm
from vmjobs.agent.run.steps import STEPS, Step
from vmjobs.agent.run.vm_watch import VmWatch
from vmjobs.errors import (
    DISK_FULL_ERRNOS,
    Conflict,
    DigestMismatch,
    HypervisorError,
    NoHypervisor,
    NotFound,
    Unavailable,
    VMJobsError,
    reason_of,
)
from vmjobs.file_transfer import FileTransfer
from vmjobs.hypervisor.base import BootImage, Hypervisor, Network, ProbeResult, ShutdownCause
from vmjobs.model import (
    MIB,
    AttemptClaim,
    Checkpoint,
    ExitStatus,
    HypervisorKind,
    JobState,
    JobTicket,
    ReasonCode,
    Report,
    StreamName,
    check_cpus,
    now,
    reason,
)

log = logging.getLogger(__name__)


class ReportUndelivered(Unavailable):
    """A run ended, but its repository did not receive the final report; ``left`` keeps it."""

    def __init__(self, left: InterruptedRun) -> None:
        super().__init__("api", "the job's final report could not be delivered to its repository")
        self.left = left


class RunLease(Protocol):
    """The client that started the run; receives its progress."""

    def progress(self, report: Report) -> None:
        """Receive a report of a new state. Must not block for long and must not raise."""


@dataclass(frozen=True)
class RunSettings:
    """Limits (bytes) and deadlines (seconds) of runs.

    grace_seconds: for a guest that has delivered everything, or whose script got a stop signal.
    stop_seconds: for a VM whose work is done to power off on request.
    script_handles_stop: without a deadline here: the client that sends stop signals has one, and closes
        its connection then.
    """

    node: str
    max_console: int
    max_log: int
    collect_seconds: float = 1800.0
    deliver_seconds: float = 1800.0
    grace_seconds: float = 10.0
    stop_seconds: float = 60.0
    silence_seconds: float = 120.0
    script_handles_stop: bool = False


class DriverChooser(Protocol):
    """Chooses the driver for a job."""

    def __call__(
        self,
        demanded: HypervisorKind | None,
        able: Sequence[HypervisorKind] = ...,
        cpus: int = ...,
        /,
        *,
        cloud_init: bool = ...,
    ) -> Hypervisor:
        """Return the driver for a job that demands a hypervisor or leaves it open (None).

        able: those that can boot its image; all while the image is unknown. cpus: of its VM.
        cloud_init: its guest looks for NoCloud data.

        Raises:
            NoHypervisor: no driver fits.
        """


@dataclass(frozen=True)
class RunServices:
    """The services of this node that its runs share.

    write_seed: writes the disk with a job's NoCloud data, for images that use cloud-init; raises
        HypervisorError.
    on_step_timed: receives the title and duration (seconds) of each step.
    carrier: transfers VM checkpoints to and from the repository; None: no VM is saved.
    reprobe: probes again whether a hypervisor works; None: not possible.
    """

    images: ImageSource
    choose: DriverChooser
    journal: Journal
    settings: RunSettings
    write_seed: Callable[[Path, JobTicket], object] | None = None
    on_step_timed: Callable[[str, float], object] = lambda _title, _seconds: None
    carrier: FileTransfer | None = None
    reprobe: Callable[[HypervisorKind], ProbeResult] | None = None


@dataclass
class Run:
    """One job's run on this node. Call :meth:`execute` once."""

    source: JobSource
    lease: RunLease
    services: RunServices
    job_id: str
    attempt: str
    event_queue: EventQueue
    #: Handlers of the guest's connections to other ports of the endpoint's address, by port.
    port_handlers: Mapping[int, Callable[[Socket], AbstractContextManager[None]]] = field(
        default_factory=dict
    )
    #: Closes the connections to those ports and rejects new ones while the VM is being saved.
    shut: Callable[[], AbstractContextManager[None]] = nullcontext
    #: Receives the resource usage from time to time, between states. Must neither block nor raise.
    on_usage: Callable[[Report], object] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    usage: ResourceUsage = field(default_factory=ResourceUsage)
    #: Bytes of the image that were fetched before this run needed it; None: not needed yet.
    fetched_before: int | None = None
    sentinel: str = field(default_factory=lambda: secrets.token_hex(16))
    #: VM, endpoint: everything that must be gone before anything is delivered.
    resources: ExitStack = field(default_factory=ExitStack)
    #: The driver is known to boot the image; until then it is the node's first choice.
    has_suitable_driver: bool = False
    #: The image, if no hypervisor of this node boots it.
    unbootable: BootImage | None = None
    watch: VmWatch | None = None
    script_ended: ScriptEnded | None = None
    #: Observed: the reported exit status, the console line that ends the job, the VM's end.
    reported_exit: ExitStatus | None = None
    #: The guest reported that it could not send all outputs.
    undelivered: bool = False
    exit_line: ConsoleLineMatched | None = None
    shutdown_cause: ShutdownCause | None = None
    disk: DiskContents | None = None
    #: Message of the next state, where it replaces the title of its step.
    remark: str = ""
    #: The checkpoint that the VM resumes from; None: it boots.
    resumed: Checkpoint | None = None
    #: The platform that can resume the VM: see ``checkpoint.platform``.
    platform: str = ""
    #: The repository has granted the claim: there is a ticket.
    claimed: bool = False
    #: The VM may be saved now.
    checkpointable: bool = False
    #: The job itself runs: its VM may be suspended now.
    suspendable: bool = False
    #: Seconds that it was suspended, without those since ``suspended_since``, a monotonic time.
    suspended_seconds: float = 0.0
    suspended_since: float = math.inf
    boot_begun: float = 0.0
    run_begun: float = math.inf
    stop_by: float = math.inf
    stopped_by: int = 0
    #: The progress that was reported last; None: none yet, or the run has ended.
    _last_progress: RunOutcome | None = None
    _progress_lock: threading.Lock = field(default_factory=threading.Lock)

    ticket: JobTicket = field(init=False)
    driver: Hypervisor = field(init=False)
    machine: str = field(init=False)
    directory: Path = field(init=False)
    uploader: ReportUploader = field(init=False)
    output_collector: OutputCollector = field(init=False)
    #: The job's image.
    image: BootImage = field(init=False)
    guest_session: GuestSession = field(init=False)
    #: None: the VM has none.
    network: Network | None = None

    def execute(self) -> RunOutcome:
        """Run the job to its end, undo everything and report.

        Raises:
            VMJobsError: the job could not be claimed, or the VM could not be removed.
        """
        claim = AttemptClaim(attempt=self.attempt, node=self.services.settings.node)
        self.ticket = self.source.claim(claim)
        self.claimed = True
        try:
            self.driver = self._choose_driver()
        except NoHypervisor as error:
            return self._report_early_end(run_failed(ReasonCode.NO_HYPERVISOR, error.message).outcome)
        self.machine = self.services.journal.vm_name(self.attempt)
        record = RunRecord(self.attempt, self.job_id, self.machine, self.driver.kind)
        with ExitStack() as stack:
            try:
                begun = self.services.journal.run(record, self.driver)
                self.directory = stack.enter_context(begun)
                self._prepare_outputs()
            except OSError as error:
                log.exception("job %s cannot begin on this node", self.job_id)
                return self._report_early_end(_outcome_of_node_error(error))
            try:
                outcome = self._deliver(self._run_steps(), record)
            finally:
                self.uploader.close()
        with self._progress_lock:
            self._last_progress = None
            self.lease.progress(self._report(outcome))
        return outcome

    def _choose_driver(self) -> Hypervisor:
        """Return the driver that saved the job's VM, if this node has it, or the one for the job."""
        spec, saved = self.ticket.spec, self.ticket.checkpoint
        if why := check_cpus(spec.hypervisor, spec.cpus):
            raise NoHypervisor(why)
        if saved is not None and spec.hypervisor is None:
            with suppress(NoHypervisor):
                return self.services.choose(saved.hypervisor, spec.kinds, spec.cpus)
        return self.services.choose(spec.hypervisor, spec.kinds, spec.cpus)

    def ran(self) -> float:
        """Return the job's run time in seconds, since its first start and without suspensions."""
        before, seen = self.resumed.ran if self.resumed else 0.0, time.monotonic()
        suspended_seconds = self.suspended_seconds + max(0.0, seen - self.suspended_since)
        return before + max(0.0, seen - self.run_begun - suspended_seconds)

    @property
    def waited_for_image(self) -> float:
        """Seconds for which VMs have waited for parts of the job's image."""
        return self.image.live.waited() if self.image.live else 0.0

    @property
    def console(self) -> Path:
        """The file of the VM's console; it exists once the VM does."""
        return self.services.journal.directory(self.attempt) / f"stream-{StreamName.CONSOLE}"

    def stream(self, name: StreamName) -> Path:
        """Return the file of a stream."""
        return self.directory / f"stream-{name}"

    def measure_usage(self) -> None:
        """Measure the bytes transferred and the resources used so far."""
        if self.fetched_before is not None:
            fetched = self.services.images.fetched(self.ticket.image_digest)
            self.usage.raise_to("image", fetched - self.fetched_before)
        if self.watch is not None:
            measure_vm(self.usage, self.driver, self.machine, self.ticket.spec.memory * MIB)
            measure_files(self.usage, self.directory, self.stream)

    def destroy_vm(self) -> None:
        """Measure the VM's resource usage, then destroy it and verify that it is gone."""
        try:
            self.measure_usage()
        finally:
            self.driver.destroy(self.machine)

    def report_usage(self) -> None:
        """Measure the usage and pass it to ``on_usage``.

        The repository gets it with the next state, because each report is a write there.
        """
        self.measure_usage()
        with self._progress_lock:
            if self._last_progress is not None and self.on_usage is not None:
                self.on_usage(self._report(self._last_progress))

    def check_stop(self, wait: float = 0.0) -> None:
        """End the run if it is no longer wanted. For steps before the VM starts."""
        seen = self.event_queue.next(time.monotonic() + wait)
        if isinstance(seen, ImageLost):
            raise image_failed(seen.error)
        unwanted = isinstance(seen, LeaseLost | RunSuperseded)
        if unwanted or (isinstance(seen, SignalSent) and seen.number in STOP_SIGNALS):
            raise run_stopped("stopped before the VM was started")

    def _report_early_end(self, outcome: RunOutcome) -> RunOutcome:
        outcome = requeue_if_retryable(outcome, self.ticket.tries_left)
        for state in (JobState.STAGING, outcome.state):
            report = Report(state=state, reason=outcome.reason, time=now())
            self.source.report(report)
            self.lease.progress(report)
        return outcome

    def _prepare_outputs(self) -> None:
        spec = self.ticket.spec
        self.output_collector = OutputCollector(spec.outputs, spec.disk * MIB)
        self.uploader = ReportUploader(
            self.source, self.event_queue, {n: self.stream(n) for n in StreamName}
        )

    def _run_steps(self) -> RunOutcome:
        outcome = self._outcome_of_steps()
        if self.watch is not None and self.watch.disk_was_full:
            outcome = blame_full_disk(outcome)
        begun = self.run_begun < math.inf
        return outcome if self.resumed is None or begun else checkpoint.as_not_resumed(outcome)

    def _outcome_of_steps(self) -> RunOutcome:
        try:
            with self.resources:
                for step in STEPS:
                    self._take(step)
        except RunEnded as end:
            return end.outcome
        except HypervisorError as error:
            return self._check_hypervisor(error)
        except VMJobsError as error:
            return _outcome_of_error(error)
        except OSError as error:
            log.exception("job %s failed on this node", self.job_id)
            return _outcome_of_node_error(error)
        except Exception as error:
            log.exception("job %s", self.job_id)
            return run_failed(ReasonCode.INTERNAL, f"the agent failed: {type(error).__name__}").outcome
        return run_failed(
            ReasonCode.INTERNAL, "the agent failed: the run ended without an outcome"
        ).outcome

    def _check_hypervisor(self, error: HypervisorError) -> RunOutcome:
        """Blame the job or its image only if the hypervisor still boots its probe."""
        if isinstance(error, NoHypervisor) or self.services.reprobe is None:
            return _outcome_of_error(error)
        found = self.services.reprobe(self.driver.kind)
        if found.works:
            return _outcome_of_error(error)
        if self.has_suitable_driver:
            self.unbootable = self.image
        message = f"{self.driver.kind} no longer works on this node ({found.detail}): {error.message}"
        return run_failed(ReasonCode.NO_HYPERVISOR, message).outcome

    def _take(self, step: Step) -> None:
        if step.state is not None:
            message, self.remark = self.remark or step.title, ""
            self._report_progress(step.state, message)
        if self.watch is None:
            self.check_stop()
        with self._timer(step.phase, step.title):
            step.action(self)

    @contextmanager
    def _timer(self, phase: str, title: str) -> Iterator[None]:
        """Add the time spent in the context to one of the run's phases."""
        begun = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - begun
            self.seconds[phase] = round(self.seconds.get(phase, 0.0) + took, 3)
            self.services.on_step_timed(title, took)
            log.info("job %s: %s took %.3f s", self.job_id, title, took)

    def _report_progress(self, state: JobState, message: str) -> None:
        self.measure_usage()
        with self._progress_lock:
            self._last_progress = RunOutcome(state, reason(ReasonCode.PROGRESS, message))
            report = self._report(self._last_progress)
            self.uploader.report(report)
            self.lease.progress(report)

    def _report(self, outcome: RunOutcome) -> Report:
        return Report(
            state=outcome.state,
            reason=outcome.reason,
            time=now(),
            hypervisor=self.driver.kind if self.has_suitable_driver else None,
            exit=outcome.exit,
            seconds=dict(self.seconds),
            bytes=dict(self.usage.bytes),
            cpu_seconds=round(self.usage.cpu_seconds, 2),
            rejected=tuple(self.output_collector.rejected),
        )

    def _deliver(self, outcome: RunOutcome, record: RunRecord) -> RunOutcome:
        """Verify that the VM is gone, then deliver outputs, streams and the final report."""
        self.driver.destroy(self.machine)
        patience = self.services.settings.deliver_seconds
        if not self.uploader.superseded and outcome.state is not JobState.PREEMPTED:
            with self._timer("collecting", "deliver"):
                outcome = self._deliver_outputs(outcome)
                self.uploader.flush(patience)
        outcome = requeue_if_retryable(outcome, self.ticket.tries_left)
        self.measure_usage()
        report = left = self._report(outcome)
        if outcome.state is not JobState.PREEMPTED and self.uploader.has_undelivered():
            # This run's files are removed: a report delivered later must not promise this output.
            message = f"the job's printed output could not be delivered within {patience:.0f} s"
            left = self._report(run_failed(ReasonCode.INTERNAL, message, outcome.exit).outcome)
        try:
            self.services.journal.record_outcome(self.attempt, left.model_dump_json())
        except OSError as error:  # a full disk may have ended the run: report it all the same
            log.error("job %s: its final report cannot be stored here: %s", self.job_id, error)
        self.uploader.report(report)
        if self.uploader.flush(patience):
            return outcome
        if not self.uploader.superseded:
            raise ReportUndelivered(InterruptedRun(record, left.model_dump_json()))
        log.warning("job %s: its final report was refused: %s", self.job_id, self.uploader.superseded)
        return outcome

    def _deliver_outputs(self, outcome: RunOutcome) -> RunOutcome:
        deadline = time.monotonic() + self.services.settings.deliver_seconds
        self.usage.add("output", 0)  # there may be none
        for collected in self.output_collector.collected.values():
            try:
                self._deliver_output(collected, deadline)
            except Conflict as error:
                log.warning("job %s: outputs are no longer wanted: %s", self.job_id, error)
                return outcome
            except (VMJobsError, OSError) as error:
                message = f"output {collected.path} could not be delivered: {reason_of(error)}"
                here = isinstance(error, OSError)
                code = ReasonCode.NODE_FAILED if here else ReasonCode.INTERNAL
                node_at_fault = here and is_node_fault(error)
                return run_failed(code, message, outcome.exit, node_at_fault=node_at_fault).outcome
        return outcome

    def _deliver_output(self, collected: CollectedFile, deadline: float) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                with collected.open() as source:
                    self.source.put_output(collected.path, source, collected.size)
                self.usage.add("output", collected.size)
                return
            except Unavailable:
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)  # no event signals that the repository is back
                pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _outcome_of_error(error: VMJobsError) -> RunOutcome:
    """Return the job's outcome after an error of a step."""
    if isinstance(error, Conflict):
        return run_stopped(error.message).outcome
    if isinstance(error, NoHypervisor):
        return run_failed(ReasonCode.NO_HYPERVISOR, error.message).outcome
    if isinstance(error, HypervisorError):
        full = has_errno(error, DISK_FULL_ERRNOS)
        code = ReasonCode.NODE_FAILED if full else ReasonCode.BOOT_FAILED
        return run_failed(code, error.message, node_at_fault=full).outcome
    if isinstance(error, NotFound | Unavailable | DigestMismatch):
        return run_failed(ReasonCode.INPUT_UNAVAILABLE, error.message).outcome
    return run_failed(ReasonCode.INTERNAL, error.message).outcome


def _outcome_of_node_error(error: OSError) -> RunOutcome:
    message, at_fault = f"the node failed: {reason_of(error)}", is_node_fault(error)
    return run_failed(ReasonCode.NODE_FAILED, message, node_at_fault=at_fault).outcome
