"""One incarnation of a cluster VM: starts, watches, adopts and removes the VM."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from vmjobs.agent import door
from vmjobs.agent.console import ConsoleReader, last_lines, panic_text
from vmjobs.agent.endpoint import serving
from vmjobs.agent.guest_link import GuestLink
from vmjobs.agent.inbox import ExitReported, GuestSilent, MachineGone, Observation, Panicked, Ready
from vmjobs.agent.jobdisk import (
    BLOCK,
    Briefing,
    blank_disk,
    write_job_disk,
)
from vmjobs.agent.members import kept_disks
from vmjobs.agent.members.journal import MemberPlace
from vmjobs.agent.members.parts import MemberParts, limits_of, ticket_of
from vmjobs.agent.members.plan import ended
from vmjobs.agent.members.record import End, Record
from vmjobs.agent.members.telling import Console
from vmjobs.agent.members.tokens import PoolTokens
from vmjobs.agent.verdict import judge_early_end, panicked, with_console, without_image
from vmjobs.agent.watch import Watch, watching
from vmjobs.cluster.member import MemberCode, Phase
from vmjobs.cluster.spec import Lifecycle
from vmjobs.cluster.wire import MemberOrder, PoolToken
from vmjobs.errors import (
    HypervisorError,
    NoHypervisor,
    NoLogin,
    Unavailable,
    VMJobsError,
    reason_of,
)
from vmjobs.hypervisor.base import (
    DOOR_PORT,
    ENDPOINT_ADDRESS,
    ENDPOINT_PORT,
    BootImage,
    DataDisk,
    Ending,
    Hypervisor,
    Machine,
    MachineState,
    Network,
)
from vmjobs.model import (
    MIB,
    ExitStatus,
    HypervisorKind,
    InputFile,
    JobTicket,
    NetworkMode,
    ReasonCode,
    cannot_have,
    with_cpus,
)

log = logging.getLogger(__name__)

#: Seconds between reads of a console. The end of a VM is an event, without delay.
CONSOLE_TICK = 1.0
#: Seconds for the report of a VM to reach the service, before its token is requested.
TOLD_SECONDS = 10.0


class Unwanted(VMJobsError):
    """The VM's end was requested before it was started."""


@dataclass(frozen=True)
class Renewed:
    """A guest's token was replaced; the next one is due then (seconds since 1970)."""

    due: float


@dataclass(frozen=True)
class TokenRefused:
    """The service refused the guest its first token."""

    why: str


@dataclass(frozen=True)
class Over:
    """The VM has ended, or its guest is lost."""

    end: End


#: The events of a running VM.
News = Observation | Renewed | TokenRefused | Over


@dataclass
class MemberMachine:
    """The VM of a record. Slow methods are called from separate threads.

    tell: receives events, from any thread. unenforced: the limits that its hypervisor cannot enforce.
    """

    parts: MemberParts
    order: MemberOrder
    incarnation: int
    tell: Callable[[News], object]
    unwanted: threading.Event = field(default_factory=threading.Event)
    driver: Hypervisor | None = None
    name: str = ""
    unenforced: str = ""
    ready: bool = False
    _exit: ExitStatus | None = None
    _image: BootImage | None = None
    _link: GuestLink | None = None
    _watch: Watch | None = None
    _tokens: PoolTokens | None = None
    _door: door.Door | None = None
    #: The image's lease lasts longer than endpoint and watch: until the VM is destroyed.
    _lease: ExitStack = field(default_factory=ExitStack)
    _around: ExitStack = field(default_factory=ExitStack)

    # ------------------------------------------------------------------ starting

    def stage(self) -> HypervisorKind:
        """Fetch the image and choose the hypervisor."""
        if self.order.network is NetworkMode.NONE:
            raise HypervisorError('a cluster VM needs a network: found mode "none"')
        if why := cannot_have(self.order.hypervisor, self.order.cpus, shared=True):
            raise NoHypervisor(why)
        able = with_cpus(self.order.cpus, shared=True)
        self.parts.choose(self.order.hypervisor, able)  # fails before the image is fetched
        leased = self.parts.images.lease(self.order.image, lambda _done, _all: self._check())
        self._image = self._lease.enter_context(leased)
        kinds = [kind for kind in self._image.kinds if kind in able]
        seeded = self._image.cloud_init
        self.driver = self.parts.choose(self.order.hypervisor, kinds, cloud_init=seeded)
        unenforced = self.driver.unenforced(limits_of(self.order), self._place.directory)
        self.unenforced = "; ".join(unenforced)
        return self.driver.kind

    def boot(self, record: Record) -> None:
        """Make the disks, serve the endpoint and start the VM. The journal already names it."""
        if self._image is None or self.driver is None:
            raise HypervisorError("cannot boot: the image was not fetched")
        place = self._place
        place.begin(self.incarnation)
        self.name = record.machine
        ticket = self._lay_out(place, record)
        self._check()
        network = self._serve(place, record, self.driver)
        (place.machine / "vm").mkdir(mode=0o700)
        self.driver.start(
            Machine(
                name=self.name,
                cpus=self.order.cpus,
                memory=self.order.memory,
                image=self._image,
                disks=tuple(self._disks(place, ticket)),
                console=place.console(self.incarnation),
                workdir=place.machine / "vm",
                network=network,
                overlay=place.kept / kept_disks.ROOT if self._persistent else None,
                limits=limits_of(self.order),
                card=self.parts.card(self.order),
                shared=True,
            )
        )
        self._note_root()
        self._look(place, record)

    # ------------------------------------------------------------------ adopting

    def adopt(self, record: Record, driver: Hypervisor) -> None:
        """Take over an earlier agent's VM, which may still run: serve its endpoint and watch it."""
        self.driver, self.name = driver, record.machine
        self.ready = record.phase in {Phase.RUNNING, Phase.DRAINING}
        self._note_root()
        self._serve(self._place, record, driver, running=self.name)
        if driver.state(self.name) is MachineState.PAUSED:  # by the earlier agent
            driver.resume(self.name)
        self._look(self._place, record)

    def hold_image(self) -> None:
        """Lease the image of an adopted VM. Takes time; logs a failure."""
        try:
            leased = self.parts.images.lease(self.order.image, lambda _done, _all: self._check())
            self._image = self._lease.enter_context(leased)
        except (VMJobsError, OSError) as error:
            log.warning("cannot lease the image of %s: %s", self.name, error)
        if self.unwanted.is_set():
            self._lease.close()

    # ------------------------------------------------------------------ running

    def listen(self) -> None:
        """Expect heartbeats from now on: a silent guest counts as lost."""
        if self._link is not None and self._watch is not None:
            self._link.heard = time.monotonic()
            self._watch.listening = True

    def signal(self, number: int) -> None:
        """Deliver a signal to the guest's script."""
        if self._link is not None:
            self._link.send_signal(number)

    def pause(self) -> None:
        """Suspend the VM, and expect no heartbeats while it is. Raises as the driver."""
        if self.driver is not None:
            if self._watch is not None:
                self._watch.listening = False
            self.driver.pause(self.name)

    def resume(self) -> None:
        """Resume the VM. Raises as the driver."""
        if self.driver is not None:
            self.driver.resume(self.name)
            if self.ready:
                self.listen()

    def renew(self) -> None:
        """Replace the guest's token. Raises as ``ShareSource.token``."""
        if self._tokens is not None:
            self._tokens.renew()

    def knock(self, key: str, seconds: float) -> door.Visit:
        """Open an SSH session for the holder of ``key``. Raises NoLogin."""
        if self._door is None:
            raise NoLogin("the VM is not running")
        return self._door.knock(key, seconds)

    # ------------------------------------------------------------------ removing

    def destroy(self) -> None:
        """Remove the VM and its files.

        Raises:
            HypervisorError: the VM could not be verified gone.
        """
        self.unwanted.set()
        if self.name:
            if self.driver is None:
                raise HypervisorError(f"{self.name} needs a hypervisor that this node does not have")
            self.driver.destroy(self.name)
        self.leave()
        self._lease.close()
        self._place.clear()

    def leave(self) -> None:
        """Stop watching and serving; the VM runs on."""
        if self._tokens is not None:
            self._tokens.close()
        self._around.close()

    # ------------------------------------------------------------------ inside

    @property
    def _place(self) -> MemberPlace:
        return self.parts.journal.place(self.order.id)

    @property
    def _persistent(self) -> bool:
        return self.order.lifecycle is Lifecycle.PERSISTENT

    def _scratch(self, place: MemberPlace) -> Path:
        return (place.kept if self._persistent else place.machine) / kept_disks.SCRATCH

    def _check(self) -> None:
        if self.unwanted.is_set():
            raise Unwanted("the VM is no longer wanted")

    def _lay_out(self, place: MemberPlace, record: Record) -> JobTicket:
        folder, order = place.machine, self.order
        inputs = folder / "inputs"
        ticket = ticket_of(order, self.incarnation, self.parts.kit, inputs)
        briefing = Briefing(
            ticket=ticket,
            endpoint=f"http://{ENDPOINT_ADDRESS}",
            token=record.token,
            sentinel=record.sentinel,
            keep=self._persistent,
        )

        def add(file: InputFile, disk: BinaryIO) -> None:
            disk.write((inputs / file.name).read_bytes())

        write_job_disk(folder / "job.disk", briefing, add)
        shutil.rmtree(inputs)
        if not self._persistent:
            blank_disk(self._scratch(place), order.disk * MIB)
        else:
            kept_disks.make(place.kept, order.id, order.disk * MIB)
            kept_disks.check(place.kept, order.id)
        blank_disk(folder / "output.disk", BLOCK)
        return ticket

    def _note_root(self) -> None:
        if self._persistent:
            try:
                kept_disks.note_root(self._place.kept)
            except OSError as error:  # retried before the next boot
                log.warning("cannot record the root disk of %s: %s", self.name, reason_of(error))

    def _disks(self, place: MemberPlace, ticket: JobTicket) -> list[DataDisk]:
        folder = place.machine
        disks = [
            DataDisk(folder / "job.disk", read_only=True),
            DataDisk(self._scratch(place)),
            DataDisk(folder / "output.disk"),
        ]
        if self._image is not None and self._image.cloud_init and self.parts.seeds is not None:
            self.parts.seeds.write(folder / "seed.disk", ticket)
            disks.append(DataDisk(folder / "seed.disk", read_only=True))
        return disks

    def _serve(
        self, place: MemberPlace, record: Record, driver: Hypervisor, running: str = ""
    ) -> Network:
        console, silence = place.console(self.incarnation), self.parts.settings.silence_seconds
        self._tokens = PoolTokens(
            fetch=self._fetch_token,
            fetched=lambda due: self.tell(Renewed(due)),
            had=record.renew > 0,
            refused=lambda why: self.tell(TokenRefused(why)),
        )
        self._link = GuestLink(
            token=record.token,
            inbox=self,
            logs={},
            max_log=0,
            on_words=lambda words: self._take_words(console, words),
            pool_token=self._tokens.get,
            longest_wait=silence / 4,
        )
        ports = ENDPOINT_PORT, DOOR_PORT
        network = driver.open_network(self.order.network, ports, running=running)
        self._around.callback(network.close)
        self._around.enter_context(serving(self._link, network))
        self._door = door.Door(record.token)
        self._around.enter_context(door.listening(self._door, network.listening[DOOR_PORT]))
        return network

    def _take_words(self, console: Path, words: bytes) -> None:
        _append(console, words)
        self.parts.words(self.order.id, self.incarnation, words)

    def _fetch_token(self) -> PoolToken:
        if not self.parts.reporter.has_told(self.order.id, self.incarnation, TOLD_SECONDS):
            raise Unavailable("api", "the service has no report of the VM yet")
        return self.parts.source.token(self.order.id, self.incarnation)

    def _look(self, place: MemberPlace, record: Record) -> None:
        if self.driver is None or self._link is None:
            raise HypervisorError(f"{self.name} cannot be watched")
        console, link = place.console(self.incarnation), self._link
        settings = self.parts.settings
        shipped = Console(self.order.id, self.incarnation, console, settings.max_console)
        self._watch = Watch(
            driver=self.driver,
            machine=self.name,
            inbox=self,
            reader=ConsoleReader(console, record.sentinel),
            max_console=sys.maxsize,  # unreachable: the uploader truncates the file before
            silence=settings.silence_seconds,
            heard=lambda: link.heard,
            on_console=self.parts.shipper.follow(shipped),
            tick=CONSOLE_TICK,
        )
        self._around.enter_context(watching(self._watch))

    def put(self, seen: Observation) -> None:
        """Forward an event of endpoint or watch; one that ends the VM becomes ``InstanceEnded``."""
        if isinstance(seen, Ready):
            self.ready = True
            self._note_root()  # a UML kernel makes the overlay after its start
        if isinstance(seen, ExitReported):
            self._exit = self._exit or seen.exit
        console = self._place.console(self.incarnation)
        if isinstance(seen, MachineGone):
            self.tell(Over(self._early_end(console)))
        elif isinstance(seen, Panicked):
            code, message = panicked(seen.cause)
            self.tell(Over(_end(_CODES[code], with_console(message, last_lines(console)))))
        elif isinstance(seen, GuestSilent):
            message = f"the guest sent no heartbeat for {seen.seconds:.0f} s"
            self.tell(Over(_end(MemberCode.GUEST_LOST, with_console(message, last_lines(console)))))
        else:
            self.tell(seen)

    def _early_end(self, console: Path) -> End:
        if self._exit is not None:
            message = with_console(ended(self._exit), last_lines(console))
            return _end(MemberCode.GUEST_ENDED, message)
        ending, panic = self._ending(), panic_text(console)
        if ending is Ending.UNKNOWN and panic is None:
            message = "the VM is gone, and it is unknown how it ended"
            return _end(MemberCode.GUEST_LOST, with_console(message, last_lines(console)))
        verdict = judge_early_end(
            panic=panic, ready=self.ready, last_lines=last_lines(console), ending=ending
        )
        code = _CODES.get(verdict.reason.code, MemberCode.GUEST_ENDED)
        return _end(code, verdict.reason.message)

    def _ending(self) -> Ending:
        try:
            return self.driver.ending(self.name) if self.driver else Ending.UNKNOWN
        except HypervisorError as error:
            log.warning("cannot determine how %s ended: %s", self.name, error)
            return Ending.UNKNOWN


#: Reason codes of jobs with equal codes of cluster VMs.
_CODES = {
    ReasonCode.KERNEL_PANIC: MemberCode.KERNEL_PANIC,
    ReasonCode.GUEST_LOST: MemberCode.GUEST_LOST,
    ReasonCode.BOOT_FAILED: MemberCode.BOOT_FAILED,
    ReasonCode.IMAGE_REJECTED: MemberCode.IMAGE_REJECTED,
    ReasonCode.IMAGE_UNAVAILABLE: MemberCode.IMAGE_UNAVAILABLE,
    ReasonCode.NODE_FAILED: MemberCode.NODE_FAILED,
}


def _append(console: Path, words: bytes) -> None:
    """Add output of the script to the file of the VM's console."""
    with console.open("ab") as file:
        file.write(words)


def _end(code: MemberCode, message: str) -> End:
    return End(code=code, message=message)


def why_not(error: Exception) -> End:
    """Return why a VM ends after an error of staging or booting."""
    if isinstance(error, Unwanted):
        return _end(MemberCode.STOPPED, error.message)
    if isinstance(error, NoHypervisor):
        return _end(MemberCode.NO_HYPERVISOR, error.message)
    if isinstance(error, HypervisorError):
        return _end(MemberCode.BOOT_FAILED, error.message)
    if not isinstance(error, VMJobsError | OSError):
        return _end(MemberCode.INTERNAL, f"the agent failed: {type(error).__name__}")
    reason = without_image(error).verdict.reason
    return _end(_CODES.get(reason.code, MemberCode.NODE_FAILED), reason.message)
