"""One incarnation of a cluster VM: starts, watches, adopts and removes the VM."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from vmjobs.agent.cluster_vms import persistent_disks
from vmjobs.agent.cluster_vms.journal import ClusterVmPaths
from vmjobs.agent.cluster_vms.observations import (
    ClusterVmEvent,
    ImageStaged,
    InstanceEnded,
    TokenRefused,
    TokenRenewed,
)
from vmjobs.agent.cluster_vms.plan import NEW_TOKEN_SIGNAL
from vmjobs.agent.cluster_vms.pool_tokens import PoolTokenCache
from vmjobs.agent.cluster_vms.record import ClusterVmRecord
from vmjobs.agent.cluster_vms.services import ClusterVmServices, script_ticket, vm_limits
from vmjobs.agent.cluster_vms.status_reporter import ConsoleFile
from vmjobs.agent.cluster_vms.vm_end import VmEnd, VmUnwanted, end_by_exit, end_by_failure
from vmjobs.agent.guest import ssh_relay
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.vm.console import ConsoleReader, panic_text, with_last_lines
from vmjobs.agent.vm.events import ExitReported, GuestReady, RunEvent, VmEnded
from vmjobs.agent.vm.job_disk import (
    SIZE_UNIT,
    JobDescription,
    create_blank_disk,
    create_scratch_disk,
    data_disks,
    write_job_disk,
)
from vmjobs.agent.vm.running_vm import RunningVm, serve_guest
from vmjobs.agent.vm.vm_failures import early_end, guest_failure
from vmjobs.agent.vm.vm_watch import VmWatch, watching
from vmjobs.cluster.spec import Lifecycle
from vmjobs.cluster.vm_state import ClusterVmCode, Phase
from vmjobs.cluster.wire import ClusterVmOrder, PoolToken
from vmjobs.errors import (
    HypervisorError,
    LoginUnavailable,
    NoHypervisor,
    Unavailable,
    VMJobsError,
    reason_of,
)
from vmjobs.hypervisor.base import (
    ENDPOINT_ADDRESS,
    SSH_PORT,
    BootImage,
    Hypervisor,
    Network,
    ShutdownCause,
    VmConfig,
    VmNeeds,
    VmState,
)
from vmjobs.model import MIB, ExitStatus, InputFile, NetworkMode, check_cpus, kinds_with_cpus

log = logging.getLogger(__name__)

#: Seconds between reads of a console. The end of a VM is an event, without delay.
CONSOLE_TICK_SECONDS = 1.0
#: Seconds for the report of a VM to reach the service, before its token is requested.
REPORT_SECONDS = 10.0


@dataclass
class VmInstance:
    """The VM of a record. Slow methods are called from separate threads.

    tell: receives events, from any thread.
    """

    services: ClusterVmServices
    order: ClusterVmOrder
    incarnation: int
    tell: Callable[[ClusterVmEvent], object]
    end_requested: threading.Event = field(default_factory=threading.Event)
    driver: Hypervisor | None = None
    name: str = ""
    ready: bool = False
    _exit: ExitStatus | None = None
    _image: BootImage | None = None
    _vm: RunningVm | None = None
    _tokens: PoolTokenCache | None = None
    _relay: ssh_relay.SshRelay | None = None
    #: The image's lease lasts longer than endpoint and watch: until the VM is destroyed.
    _lease: ExitStack = field(default_factory=ExitStack)
    _resources: ExitStack = field(default_factory=ExitStack)

    # ------------------------------------------------------------------ starting

    def stage(self) -> ImageStaged:
        """Fetch the image and choose the hypervisor."""
        if self.order.network is NetworkMode.NONE:
            raise HypervisorError('a cluster VM needs a network: found mode "none"')
        if why := check_cpus(self.order.hypervisor, self.order.cpus, shared=True):
            raise NoHypervisor(why)
        able = kinds_with_cpus(self.order.cpus, shared=True)
        needs = VmNeeds(self.order.hypervisor, able)
        self.services.choose(needs)  # fails before the image is fetched
        image = self._image = self._fetch_image()
        self.driver = self.services.choose(
            replace(
                needs,
                able=[kind for kind in image.kinds if kind in able],
                cloud_init=image.cloud_init,
                architecture=image.architecture,
            )
        )
        disks = self._paths.kept if self._paths.kept.exists() else self._paths.directory
        unenforced = self.driver.unenforced(vm_limits(self.order), disks)
        return ImageStaged(self.driver.kind, "; ".join(unenforced))

    def boot(self, record: ClusterVmRecord) -> None:
        """Make the disks, serve the endpoint and start the VM. The journal already names it."""
        if self._image is None or self.driver is None:
            raise HypervisorError("cannot boot: the image was not fetched")
        paths = self._paths
        paths.begin(self.incarnation)
        self.name = record.machine
        self._write_disks(record, self._image)
        self._check()
        network, watch = self._serve(record, self.driver)
        (paths.vm_directory / "vm").mkdir(mode=0o700)
        self.driver.start(
            VmConfig(
                name=self.name,
                cpus=self.order.cpus,
                memory=self.order.memory,
                image=self._image,
                disks=data_disks(paths.vm_directory, self._scratch),
                console=self._console,
                workdir=paths.vm_directory / "vm",
                network=network,
                overlay=(
                    persistent_disks.root_overlay(paths.kept, self.order.image)
                    if self._persistent
                    else None
                ),
                limits=vm_limits(self.order),
                card=self.services.card(self.order),
                published=self.services.published(self.order),
                shared=True,
            )
        )
        self._record_root()
        self._resources.enter_context(watching(watch))

    # ------------------------------------------------------------------ adopting

    def adopt(self, record: ClusterVmRecord, driver: Hypervisor) -> None:
        """Take over an earlier agent's VM, which may still run: serve its endpoint and watch it."""
        self.driver, self.name = driver, record.machine
        self.ready = record.phase in {Phase.RUNNING, Phase.DRAINING}
        self._record_root()
        _, watch = self._serve(record, driver, running=self.name)
        if driver.state(self.name) is VmState.PAUSED:  # by the earlier agent
            driver.resume(self.name)
        self._resources.enter_context(watching(watch))

    def lease_image(self) -> None:
        """Lease the image of an adopted VM. Takes time; logs a failure."""
        try:
            self._image = self._fetch_image()
        except (VMJobsError, OSError) as error:
            log.warning("cannot lease the image of %s: %s", self.name, error)
        if self.end_requested.is_set():
            self._lease.close()

    # ------------------------------------------------------------------ running

    def expect_heartbeats(self) -> None:
        """Expect heartbeats from now on: a silent guest counts as lost."""
        if self._vm is not None:
            self._vm.expect_heartbeats()

    def signal(self, number: int) -> None:
        """Deliver a signal to the guest's script."""
        if self._vm is not None:
            self._vm.guest_session.send_signal(number)

    def pause(self) -> None:
        """Suspend the VM, and expect no heartbeats while it is. Raises as the driver."""
        if self.driver is not None:
            if self._vm is not None:
                self._vm.ignore_silence()
            self.driver.pause(self.name)

    def resume(self) -> None:
        """Resume the VM. Raises as the driver."""
        if self.driver is not None:
            self.driver.resume(self.name)
            if self.ready:
                self.expect_heartbeats()

    def renew(self) -> None:
        """Replace the guest's token, and signal that to the guest; log a failure."""
        try:
            if self._tokens is not None:
                self._tokens.renew()
        except (VMJobsError, OSError) as error:
            log.warning("the token of %s could not be renewed: %s", self.name, error)
        else:
            self.signal(NEW_TOKEN_SIGNAL)

    def open_session(self, key: str, seconds: float) -> ssh_relay.SshSession:
        """Open an SSH session for the holder of ``key``. Raises LoginUnavailable."""
        if self._relay is None:
            raise LoginUnavailable("the VM is not running")
        return self._relay.open_session(key, seconds)

    # ------------------------------------------------------------------ removing

    def destroy(self) -> None:
        """Remove the VM and its files.

        Raises:
            HypervisorError: the VM could not be verified gone.
        """
        self.end_requested.set()
        if self.name:
            if self.driver is None:
                raise HypervisorError(f"{self.name} needs a hypervisor that this node does not have")
            self.driver.destroy(self.name)
        self.stop_serving()
        self._lease.close()
        self._paths.clear()

    def stop_serving(self) -> None:
        """Stop watching and serving; the VM runs on."""
        if self._tokens is not None:
            self._tokens.close()
        self._resources.close()

    @property
    def _paths(self) -> ClusterVmPaths:
        return self.services.journal.paths(self.order.id)

    @property
    def _console(self) -> Path:
        return self._paths.console(self.incarnation)

    @property
    def _persistent(self) -> bool:
        return self.order.lifecycle is Lifecycle.PERSISTENT

    @property
    def _scratch(self) -> Path:
        paths = self._paths
        return (paths.kept if self._persistent else paths.vm_directory) / persistent_disks.SCRATCH_DISK

    def _fetch_image(self) -> BootImage:
        leased = self.services.images.lease(self.order.image, lambda _done, _all: self._check())
        return self._lease.enter_context(leased)

    def _check(self) -> None:
        if self.end_requested.is_set():
            raise VmUnwanted("the VM is no longer wanted")

    def _write_disks(self, record: ClusterVmRecord, image: BootImage) -> None:
        paths, order = self._paths, self.order
        folder = paths.vm_directory
        inputs = folder / "inputs"
        ticket = script_ticket(order, self.incarnation, self.services.kit, inputs)
        job_description = JobDescription(
            ticket=ticket,
            endpoint=f"http://{ENDPOINT_ADDRESS}",
            token=record.token,
            sentinel=record.sentinel,
            keep=self._persistent,
        )

        def add(file: InputFile, disk: BinaryIO) -> None:
            disk.write((inputs / file.name).read_bytes())

        write_job_disk(folder / "job.disk", job_description, add)
        shutil.rmtree(inputs)
        if not self._persistent:
            create_scratch_disk(self._scratch, order.disk * MIB)
        else:
            persistent_disks.make(paths.kept, order.id, order.disk * MIB)
            persistent_disks.check(paths.kept, order.id, order.image)
            persistent_disks.grow(paths.kept, order.disk * MIB)
        create_blank_disk(folder / "output.disk", SIZE_UNIT)
        if image.cloud_init and self.services.write_seed is not None:
            self.services.write_seed(folder / "seed.disk", ticket)

    def _record_root(self) -> None:
        if self._persistent:
            try:
                persistent_disks.record_root(self._paths.kept, self.order.image)
            except OSError as error:  # retried before the next boot
                log.warning("cannot record the root disk of %s: %s", self.name, reason_of(error))

    def _serve(
        self, record: ClusterVmRecord, driver: Hypervisor, running: str = ""
    ) -> tuple[Network, VmWatch]:
        """Serve the endpoint of the VM; return its network, and its watch, which is not started."""
        settings = self.services.settings
        self._tokens = PoolTokenCache(
            fetch=self._fetch_token,
            on_renewed=lambda due: self.tell(TokenRenewed(due)),
            had=record.renew > 0,
            on_refused=lambda why: self.tell(TokenRefused(why)),
        )
        session = GuestSession(
            token=record.token,
            event_queue=self,
            logs={},
            max_log=0,
            on_output=self._take_output,
            pool_token=self._tokens.get,
            longest_wait=settings.silence_seconds / 4,
        )
        relay = ssh_relay.SshRelay(record.token)
        handlers = {SSH_PORT: partial(ssh_relay.listening, relay)}
        mode = self.order.network
        network = serve_guest(self._resources, driver, session, mode, handlers, running)
        self._relay = relay
        console_file = ConsoleFile(self.order.id, self.incarnation, self._console, settings.max_console)
        watch = VmWatch(
            driver=driver,
            vm_name=self.name,
            event_queue=self,
            reader=ConsoleReader(self._console, record.sentinel),
            max_console=sys.maxsize,  # unreachable: the uploader truncates the file before
            silence=settings.silence_seconds,
            heard=lambda: session.heard,
            on_console=self.services.console_uploader.follow(console_file),
            tick=CONSOLE_TICK_SECONDS,
        )
        self._vm = RunningVm(driver, self.name, session, watch)
        return network, watch

    def _take_output(self, words: bytes) -> None:
        with self._console.open("ab") as file:
            file.write(words)
        self.services.words(self.order.id, self.incarnation, words)

    def _fetch_token(self) -> PoolToken:
        if not self.services.reporter.is_reported(self.order.id, self.incarnation, REPORT_SECONDS):
            raise Unavailable("api", "the service has no report of the VM yet")
        return self.services.source.token(self.order.id, self.incarnation)

    def put(self, seen: RunEvent) -> None:
        """Forward an event of endpoint or watch; one that ends the VM becomes ``InstanceEnded``."""
        if isinstance(seen, GuestReady):
            self.ready = True
            self._record_root()  # a UML kernel makes the overlay after its start
        if isinstance(seen, ExitReported):
            self._exit = self._exit or seen.exit
        if isinstance(seen, VmEnded):
            self.tell(InstanceEnded(self._with_console(self._early_end())))
        elif (failure := guest_failure(seen)) is not None:
            self.tell(InstanceEnded(self._with_console(end_by_failure(failure))))
        else:
            self.tell(seen)

    def _early_end(self) -> VmEnd:
        if self._exit is not None:
            return end_by_exit(self._exit)
        cause = self._vm.shutdown_cause() if self._vm is not None else ShutdownCause.UNKNOWN
        panic = panic_text(self._console)
        if cause is ShutdownCause.UNKNOWN and panic is None:
            message = "the VM is gone, and it is unknown how it ended"
            return VmEnd(ClusterVmCode.GUEST_LOST, message)
        return end_by_failure(early_end(panic=panic, ready=self.ready, shutdown_cause=cause))

    def _with_console(self, end: VmEnd) -> VmEnd:
        return VmEnd(end.code, with_last_lines(end.message, self._console))
