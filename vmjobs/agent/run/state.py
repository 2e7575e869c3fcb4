"""The state of a run: what was asked for, what its steps have made, what it has observed.

The functions of :mod:`vmjobs.agent.run.steps` and :mod:`vmjobs.agent.run.monitor` read it, and return
what they made; only the run's own loop (:mod:`vmjobs.agent.run.job_run`) stores that here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.job_source import JobSource
from vmjobs.agent.run.observations import Observations, RunClock, RunControl
from vmjobs.agent.run.outcome import STOP_SIGNALS, image_failed, run_stopped
from vmjobs.agent.run.outputs import OutputCollector
from vmjobs.agent.run.reports import RunReports
from vmjobs.agent.run.resource_usage import ResourceUsage, measure_files, measure_vm
from vmjobs.agent.run.services import RunServices, RunSettings
from vmjobs.agent.vm.events import EventQueue, ImageLost, LeaseLost, RunSuperseded, SignalSent
from vmjobs.agent.vm.running_vm import PortHandler, RunningVm
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import BootImage, Hypervisor, Network
from vmjobs.model import MIB, Checkpoint, JobSpec, JobTicket, Report, StreamName


@dataclass(frozen=True)
class RunRequest:
    """A job to run on this node.

    attempt: id of this attempt at the job. remark: message of the first state, if not its step's title.
    port_handlers: handlers of the guest's connections to further ports of its endpoint's address.
    shut: closes the connections to those ports and rejects new ones while the VM is being saved.
    on_report, on_usage: see ``RunReports``.
    """

    source: JobSource
    on_report: Callable[[Report], object]
    services: RunServices
    job_id: str
    attempt: str
    event_queue: EventQueue
    port_handlers: Mapping[int, PortHandler] = field(default_factory=dict)
    shut: Callable[[], AbstractContextManager[None]] = nullcontext
    on_usage: Callable[[Report], object] | None = None
    remark: str = ""


@dataclass(frozen=True)
class VmChoice:
    """The hypervisor and the name of a run's VM.

    sentinel: marks the guest's lines on the console.
    resumed: the checkpoint that the VM resumes from; None: it boots.
    platform: see ``checkpoint.resume_platform``. remark: for the user.
    image: the job's, if it had to be leased again.
    """

    driver: Hypervisor
    vm_name: str
    sentinel: str
    resumed: Checkpoint | None = None
    platform: str = ""
    remark: str = ""
    image: BootImage | None = None


@dataclass
class Run:
    """One job's run on this node. remark: message of the next state, if not its step's title.

    resources: VM, endpoint: everything that must be gone before anything is delivered.
    claimed: the repository has granted the claim: there is a ticket.
    """

    request: RunRequest
    clock: RunClock = field(default_factory=RunClock)
    usage: ResourceUsage = field(default_factory=ResourceUsage)
    observed: Observations = field(default_factory=Observations)
    control: RunControl = field(default_factory=RunControl)
    resources: ExitStack = field(default_factory=ExitStack)
    claimed: bool = False
    #: Bytes of the image that were fetched before this run needed it; None: not needed yet.
    fetched_before: int | None = None

    remark: str = field(init=False)
    # From here on in the order in which they are made.
    ticket: JobTicket = field(init=False)
    choice: VmChoice = field(init=False)
    directory: Path = field(init=False)
    output_collector: OutputCollector = field(init=False)
    reports: RunReports = field(init=False)
    image: BootImage = field(init=False)
    guest_session: GuestSession = field(init=False)
    #: None: the VM has none, or is not started yet.
    network: Network | None = None
    running_vm: RunningVm | None = None

    def __post_init__(self) -> None:
        self.remark = self.request.remark

    @property
    def settings(self) -> RunSettings:
        return self.request.services.settings

    @property
    def spec(self) -> JobSpec:
        return self.ticket.spec

    @property
    def waited_for_image(self) -> float:
        """Seconds for which VMs have waited for parts of the job's image."""
        return self.image.live.waited() if self.image.live else 0.0

    @property
    def console(self) -> Path:
        """The file of the VM's console; it exists once the VM does."""
        directory = self.request.services.journal.directory(self.request.attempt)
        return directory / f"stream-{StreamName.CONSOLE}"

    @property
    def vm(self) -> RunningVm:
        """The VM.

        Raises:
            HypervisorError: it was not started yet.
        """
        if self.running_vm is None:
            raise HypervisorError("the VM was not started")
        return self.running_vm

    def stream(self, name: StreamName) -> Path:
        return self.directory / f"stream-{name}"

    def measure_usage(self) -> None:
        """Measure the bytes transferred and the resources used so far."""
        if self.fetched_before is not None:
            fetched = self.request.services.images.fetched(self.ticket.image_digest)
            self.usage.raise_to("image", fetched - self.fetched_before)
        if self.running_vm is not None:
            self._measure_vm(self.running_vm)

    def _measure_vm(self, vm: RunningVm) -> None:
        measure_vm(self.usage, vm.driver, vm.name, self.spec.memory * MIB)
        measure_files(self.usage, self.directory, self.stream)

    def destroy_vm(self, vm: RunningVm) -> None:
        """Measure the resource usage of a VM, then destroy it and verify that it is gone."""
        try:
            self._measure_vm(vm)
        finally:
            vm.driver.destroy(vm.name)

    def begin_fetch(self) -> None:
        """Note how much of the image was fetched before this run."""
        self.fetched_before = self.request.services.images.fetched(self.ticket.image_digest)

    def check_stop(self, wait: float = 0.0) -> None:
        """End the run if it is no longer wanted. For steps before the VM starts."""
        seen = self.request.event_queue.next(time.monotonic() + wait)
        if isinstance(seen, ImageLost):
            raise image_failed(seen.error)
        unwanted = isinstance(seen, LeaseLost | RunSuperseded)
        if unwanted or (isinstance(seen, SignalSent) and seen.number in STOP_SIGNALS):
            raise run_stopped("stopped before the VM was started")
