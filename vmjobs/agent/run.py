"""Runs one job: takes the steps of :mod:`vmjobs.agent.steps`, undoes them, and reports.

The run verifies that its VM is gone, then delivers everything, then removes its directory. See
:mod:`vmjobs.agent.journal` for the state that a ``kill -9`` leaves at each point.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket as Socket
from typing import Protocol

from vmjobs.agent import checkpoint
from vmjobs.agent.guest_link import GuestLink
from vmjobs.agent.inbox import (
    ImageLost,
    Inbox,
    LeaseLost,
    LineSeen,
    ScriptEnded,
    SignalSent,
    Superseded,
)
from vmjobs.agent.journal import Journal, Leftover, RunRecord
from vmjobs.agent.outputs import DiskContents, Kept, OutputTray
from vmjobs.agent.report_uploader import FIRST_PAUSE, ReportUploader
from vmjobs.agent.resource_usage import ResourceUsage, count_files, count_machine
from vmjobs.agent.steps import STEPS, Step
from vmjobs.agent.verdict import (
    NO_ROOM,
    STOPPING,
    Ended,
    Verdict,
    comes_of,
    failed,
    is_of_the_node,
    mended_elsewhere,
    stopped,
    with_a_full_disk,
    without_image,
)
from vmjobs.agent.watch import Watch
from vmjobs.errors import (
    Conflict,
    DigestMismatch,
    HypervisorError,
    NoHypervisor,
    NotFound,
    Unavailable,
    VMJobsError,
    reason_of,
)
from vmjobs.hypervisor.base import BootImage, Ending, Hypervisor, Network, ProbeResult
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
    cannot_have,
    now,
    reason,
)
from vmjobs.ports import ContentCarrier, ImageSource, JobSource, LiveImage, LiveSource, SeedSource

log = logging.getLogger(__name__)


class Untold(Unavailable):
    """A run ended, but its repository did not receive the final report; ``left`` keeps it."""

    def __init__(self, left: Leftover) -> None:
        super().__init__("api", "the job's final report could not be delivered to its repository")
        self.left = left


class Lease(Protocol):
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
    patient: bool = False


class Choose(Protocol):
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


def _unheard(_step: str, _seconds: float) -> None:
    """Discard a step's duration."""


@dataclass(frozen=True)
class Parts:
    """The services of this node that its runs share.

    seeds: for images that use cloud-init data.
    live: provides images before they are complete; None: a VM waits for the whole image.
    on_step_timed: receives the title and duration (seconds) of each step.
    carrier: transfers VM checkpoints to and from the repository; None: no VM is saved.
    recheck: probes again whether a hypervisor works; None: not possible.
    """

    images: ImageSource
    choose: Choose
    journal: Journal
    settings: RunSettings
    seeds: SeedSource | None = None
    live: LiveSource | None = None
    timed: Callable[[str, float], object] = _unheard
    carrier: ContentCarrier | None = None
    recheck: Callable[[HypervisorKind], ProbeResult] | None = None


@dataclass
class Run:
    """One job's run on this node. Call :meth:`execute` once."""

    source: JobSource
    lease: Lease
    parts: Parts
    job_id: str
    attempt: str
    inbox: Inbox
    #: Handlers of the guest's connections to other ports of the endpoint's address, by port.
    doors: Mapping[int, Callable[[Socket], AbstractContextManager[None]]] = field(default_factory=dict)
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
    settled: bool = False
    #: The image, if no hypervisor of this node boots it.
    unbootable: BootImage | None = None
    watch: Watch | None = None
    script_ended: ScriptEnded | None = None
    #: Observed: the reported exit status, the console line that ends the job, the VM's end.
    reported: ExitStatus | None = None
    #: The guest reported that it could not send all outputs.
    undelivered: bool = False
    matched: LineSeen | None = None
    ending: Ending | None = None
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
    savable: bool = False
    #: The job itself runs: its VM may be suspended now.
    pausable: bool = False
    #: Seconds that it was suspended, without those since ``suspended_since``, a monotonic time.
    stood: float = 0.0
    standing_since: float = math.inf
    boot_begun: float = 0.0
    run_begun: float = math.inf
    stop_by: float = math.inf
    stopped_by: int = 0
    #: The progress that was reported last; None: none yet, or the run has ended.
    _told: Verdict | None = None
    _telling: threading.Lock = field(default_factory=threading.Lock)

    ticket: JobTicket = field(init=False)
    driver: Hypervisor = field(init=False)
    machine: str = field(init=False)
    directory: Path = field(init=False)
    uploader: ReportUploader = field(init=False)
    tray: OutputTray = field(init=False)
    live: LiveImage = field(init=False)
    link: GuestLink = field(init=False)
    #: None: the VM has none.
    network: Network | None = None

    def execute(self) -> Verdict:
        """Run the job to its end, undo everything and report.

        Raises:
            VMJobsError: the job could not be claimed, or the VM could not be removed.
        """
        claim = AttemptClaim(attempt=self.attempt, node=self.parts.settings.node)
        self.ticket = self.source.claim(claim)
        self.claimed = True
        try:
            self.driver = self._first_choice()
        except NoHypervisor as error:
            verdict = failed(ReasonCode.NO_HYPERVISOR, error.message).verdict
            return self._refuse(mended_elsewhere(verdict, self.ticket.tries_left))
        self.machine = self.parts.journal.machine_name(self.attempt)
        record = RunRecord(self.attempt, self.job_id, self.machine, self.driver.kind)
        with ExitStack() as stack:
            try:
                begun = self.parts.journal.run(record, self.driver)
                self.directory = stack.enter_context(begun)
                self._open()
            except OSError as error:
                log.exception("job %s cannot begin on this node", self.job_id)
                return self._refuse(mended_elsewhere(_node_failed(error), self.ticket.tries_left))
            try:
                verdict = self._deliver(self._go_through(STEPS), record)
            finally:
                self.uploader.close()
        with self._telling:
            self._told = None
            self.lease.progress(self._report(verdict))
        return verdict

    def _first_choice(self) -> Hypervisor:
        """Return the driver that saved the job's VM, if this node has it, or the one for the job."""
        spec, saved = self.ticket.spec, self.ticket.checkpoint
        if why := cannot_have(spec.hypervisor, spec.cpus):
            raise NoHypervisor(why)
        if saved is not None and spec.hypervisor is None:
            with suppress(NoHypervisor):
                return self.parts.choose(saved.hypervisor, spec.kinds, spec.cpus)
        return self.parts.choose(spec.hypervisor, spec.kinds, spec.cpus)

    def ran(self) -> float:
        """Return the job's run time in seconds, since its first start and without suspensions."""
        before, seen = self.resumed.ran if self.resumed else 0.0, time.monotonic()
        stood = self.stood + max(0.0, seen - self.standing_since)
        return before + max(0.0, seen - self.run_begun - stood)

    @property
    def image(self) -> BootImage:
        """The job's image."""
        return self.live.image

    @property
    def console(self) -> Path:
        """The file of the VM's console; it exists once the VM does."""
        return self.parts.journal.directory(self.attempt) / f"stream-{StreamName.CONSOLE}"

    def stream(self, name: StreamName) -> Path:
        """Return the file of a stream."""
        return self.directory / f"stream-{name}"

    def count(self) -> None:
        """Measure the bytes transferred and the resources used so far."""
        if self.fetched_before is not None:
            fetched = self.parts.images.fetched(self.ticket.image_digest)
            self.usage.reached("image", fetched - self.fetched_before)
        if self.watch is not None:
            count_machine(self.usage, self.driver, self.machine, self.ticket.spec.memory * MIB)
            count_files(self.usage, self.directory, self.stream)

    def end_machine(self) -> None:
        """Measure the VM's resource usage, then destroy it and verify that it is gone."""
        try:
            self.count()
        finally:
            self.driver.destroy(self.machine)

    def tell_usage(self) -> None:
        """Measure the usage and pass it to ``on_usage``.

        The repository gets it with the next state, because each report is a write there.
        """
        self.count()
        with self._telling:
            if self._told is not None and self.on_usage is not None:
                self.on_usage(self._report(self._told))

    def check_stop(self, wait: float = 0.0) -> None:
        """End the run if it is no longer wanted. For steps before the VM starts."""
        seen = self.inbox.next(time.monotonic() + wait)
        if isinstance(seen, ImageLost):
            raise without_image(seen.error)
        unwanted = isinstance(seen, LeaseLost | Superseded)
        if unwanted or (isinstance(seen, SignalSent) and seen.number in STOPPING):
            raise stopped("stopped before the VM was started")

    def _refuse(self, verdict: Verdict) -> Verdict:
        for state in (JobState.STAGING, verdict.state):
            report = Report(state=state, reason=verdict.reason, time=now())
            self.source.report(report)
            self.lease.progress(report)
        return verdict

    def _open(self) -> None:
        spec = self.ticket.spec
        self.tray = OutputTray(spec.outputs, spec.disk * MIB)
        self.uploader = ReportUploader(self.source, self.inbox, {n: self.stream(n) for n in StreamName})

    def _go_through(self, steps: tuple[Step, ...]) -> Verdict:
        verdict = self._end_of(steps)
        if self.watch is not None and self.watch.was_full:
            verdict = with_a_full_disk(verdict)
        begun = self.run_begun < math.inf
        return verdict if self.resumed is None or begun else checkpoint.not_resumed(verdict)

    def _end_of(self, steps: tuple[Step, ...]) -> Verdict:
        try:
            with self.resources:
                for step in steps:
                    self._take(step)
        except Ended as end:
            return end.verdict
        except HypervisorError as error:
            return self._without_hypervisor(error)
        except VMJobsError as error:
            return _verdict_of(error)
        except OSError as error:
            log.exception("job %s failed on this node", self.job_id)
            return _node_failed(error)
        except Exception as error:
            log.exception("job %s", self.job_id)
            return failed(ReasonCode.INTERNAL, f"the agent failed: {type(error).__name__}").verdict
        return failed(ReasonCode.INTERNAL, "the agent failed: the run ended without an outcome").verdict

    def _without_hypervisor(self, error: HypervisorError) -> Verdict:
        """Blame the job or its image only if the hypervisor still boots its probe."""
        if isinstance(error, NoHypervisor) or self.parts.recheck is None:
            return _verdict_of(error)
        found = self.parts.recheck(self.driver.kind)
        if found.works:
            return _verdict_of(error)
        if self.settled:
            self.unbootable = self.image
        message = f"{self.driver.kind} no longer works on this node ({found.detail}): {error.message}"
        return failed(ReasonCode.NO_HYPERVISOR, message).verdict

    def _take(self, step: Step) -> None:
        if step.state is not None:
            message, self.remark = self.remark or step.title, ""
            self._tell(step.state, message)
        if self.watch is None:
            self.check_stop()
        with self._clock(step.phase, step.title):
            step.action(self)

    def _clock(self, phase: str, title: str) -> _Clock:
        return _Clock(self, phase, title)

    def _tell(self, state: JobState, message: str) -> None:
        self.count()
        with self._telling:
            self._told = Verdict(state, reason(ReasonCode.PROGRESS, message))
            report = self._report(self._told)
            self.uploader.report(report)
            self.lease.progress(report)

    def _report(self, verdict: Verdict) -> Report:
        return Report(
            state=verdict.state,
            reason=verdict.reason,
            time=now(),
            hypervisor=self.driver.kind if self.settled else None,
            exit=verdict.exit,
            seconds=dict(self.seconds),
            bytes=dict(self.usage.bytes),
            cpu_seconds=round(self.usage.cpu_seconds, 2),
            rejected=tuple(self.tray.rejected),
        )

    def _deliver(self, verdict: Verdict, record: RunRecord) -> Verdict:
        """Verify that the VM is gone, then deliver outputs, streams and the final report."""
        self.driver.destroy(self.machine)
        patience = self.parts.settings.deliver_seconds
        if not self.uploader.superseded and verdict.state is not JobState.PREEMPTED:
            with self._clock("collecting", "deliver"):
                verdict = self._deliver_outputs(verdict)
                self.uploader.flush(patience)
        verdict = mended_elsewhere(verdict, self.ticket.tries_left)
        self.count()
        report = left = self._report(verdict)
        if verdict.state is not JobState.PREEMPTED and self.uploader.owes():
            # This run's files are removed: a report delivered later must not promise this output.
            message = f"the job's printed output could not be delivered within {patience:.0f} s"
            left = self._report(failed(ReasonCode.INTERNAL, message, verdict.exit).verdict)
        try:
            self.parts.journal.conclude(self.attempt, left.model_dump_json())
        except OSError as error:  # a full disk may have ended the run: report it all the same
            log.error("job %s: its final report cannot be stored here: %s", self.job_id, error)
        self.uploader.report(report)
        if self.uploader.flush(patience):
            return verdict
        if not self.uploader.superseded:
            raise Untold(Leftover(record, left.model_dump_json()))
        log.warning("job %s: its final report was refused: %s", self.job_id, self.uploader.superseded)
        return verdict

    def _deliver_outputs(self, verdict: Verdict) -> Verdict:
        deadline = time.monotonic() + self.parts.settings.deliver_seconds
        self.usage.add("output", 0)  # there may be none
        for kept in self.tray.kept.values():
            try:
                self._deliver_output(kept, deadline)
            except Conflict as error:
                log.warning("job %s: outputs are no longer wanted: %s", self.job_id, error)
                return verdict
            except (VMJobsError, OSError) as error:
                message = f"output {kept.path} could not be delivered: {reason_of(error)}"
                here = isinstance(error, OSError)
                code = ReasonCode.NODE_FAILED if here else ReasonCode.INTERNAL
                unfit = here and is_of_the_node(error)
                return failed(code, message, verdict.exit, unfit=unfit).verdict
        return verdict

    def _deliver_output(self, kept: Kept, deadline: float) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                with kept.open() as source:
                    self.source.put_output(kept.path, source, kept.size)
                self.usage.add("output", kept.size)
                return
            except Unavailable:
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)  # no event signals that the repository is back
                pause = min(2 * pause, 15.0)


class _Clock:
    """Adds the time spent in its context to one of the run's phases."""

    def __init__(self, run: Run, phase: str, title: str) -> None:
        self._run, self._phase, self._title = run, phase, title

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *_: object) -> None:
        took = time.monotonic() - self._begun
        seconds = self._run.seconds
        seconds[self._phase] = round(seconds.get(self._phase, 0.0) + took, 3)
        self._run.parts.timed(self._title, took)
        log.info("job %s: %s took %.3f s", self._run.job_id, self._title, took)


def _verdict_of(error: VMJobsError) -> Verdict:
    """Return the job's outcome after an error of a step."""
    if isinstance(error, Conflict):
        return stopped(error.message).verdict
    if isinstance(error, NoHypervisor):
        return failed(ReasonCode.NO_HYPERVISOR, error.message).verdict
    if isinstance(error, HypervisorError):
        full = comes_of(error, NO_ROOM)
        code = ReasonCode.NODE_FAILED if full else ReasonCode.BOOT_FAILED
        return failed(code, error.message, unfit=full).verdict
    if isinstance(error, NotFound | Unavailable | DigestMismatch):
        return failed(ReasonCode.INPUT_UNAVAILABLE, error.message).verdict
    return failed(ReasonCode.INTERNAL, error.message).verdict


def _node_failed(error: OSError) -> Verdict:
    unfit = is_of_the_node(error)
    return failed(ReasonCode.NODE_FAILED, f"the node failed: {reason_of(error)}", unfit=unfit).verdict
