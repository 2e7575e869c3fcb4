"""The kvm and qemu drivers, through libvirt; the only module that imports it.

Domains are transient: libvirt forgets a VM when it ends. No privilege is needed: an ordinary
user's daemon (``qemu:///session``) starts by itself. A session daemon does not serve root, so for
root the driver runs inside this process (``qemu:///embed``).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import (
    blockserver,
    confined,
    firmware,
    guest_network,
    helpers,
    procs,
    sandbox,
)
from vmjobs.hypervisor.base import (
    NAME_PREFIX,
    Ending,
    Machine,
    MachineLimits,
    MachineState,
    Network,
    PrivateNetwork,
    ProbeResult,
    Usage,
)
from vmjobs.hypervisor.bounds import bounds_of
from vmjobs.hypervisor.detached import Launcher
from vmjobs.hypervisor.domain_xml import board, domain_xml
from vmjobs.hypervisor.embedded import EmbeddedRoot
from vmjobs.hypervisor.endings import Endings, of_cause, tail
from vmjobs.hypervisor.in_place_of_qemu import qemu
from vmjobs.hypervisor.limits import Holder
from vmjobs.hypervisor.outbound import OutboundPolicy
from vmjobs.hypervisor.overlay import check as check_overlay
from vmjobs.hypervisor.probe import boot_probe, first_kernel, node_kernels
from vmjobs.hypervisor.usage import Meter, family
from vmjobs.model import ABILITIES, Abilities, BootMethod, HypervisorKind, NetworkMode
from vmjobs.subprocess import run

# libvirt's errors are raised here; an embedded driver would also print them on the terminal, and a
# warning for every VM. The library reads this variable once, while it is loaded.
os.environ.setdefault("LIBVIRT_LOG_OUTPUTS", f"4:file:{os.devnull}")
try:
    import libvirt
    import libvirt_qemu
except ImportError:  # a node without libvirt: probes report it
    libvirt = None

log = logging.getLogger(__name__)

T = TypeVar("T")
_Names = list[str]
_Paths = list[Path]
_Argv = list[str | Path]
_Processes = list[procs.Process]

#: Lines of libvirt's log of a VM that are logged if its QEMU crashed.
LAST_LINES = 5
#: Seconds that a daemon may take to come back after it went away.
RECONNECT_SECONDS = 15.0
#: Seconds that a killed QEMU may take to end.
KILL_SECONDS = 30.0
#: Seconds that libvirt may take to report why a VM ended, once it is gone.
ENDING_SECONDS = 5.0


def default_uri() -> str:
    """libvirt's URI for this user's VMs."""
    return "qemu:///session" if os.geteuid() else "qemu:///embed"


@functools.cache
def _event_loop() -> None:
    """Run libvirt's event loop in a thread; a process can have only one."""
    libvirt.registerErrorHandler(lambda _context, _error: None, None)  # errors are raised as well
    libvirt.virEventRegisterDefaultImpl()

    def loop() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=loop, name="libvirt-events", daemon=True).start()


def node_connection() -> Connection:
    """Return the connection to this user's VMs on this node, one for the whole process.

    Each opening of an embedded driver registers it again, and libvirt has room for 21 (``MAX_DRIVERS``
    in its src/libvirt.c): a process that opened it more often could neither start nor end VMs.
    """
    return _connection_of(os.getpid())


@functools.cache
def _connection_of(_process: int) -> Connection:
    """One per process: a fork of this process cannot use its parent's connection."""
    return Connection(default_uri())


class Connection:
    """A connection that opens on first use, and again after the daemon went away.

    uri: libvirt's; ``qemu:///embed`` stands for an embedded driver below ``embedded``, of which a
        process has one (:func:`node_connection`).
    """

    def __init__(self, uri: str, embedded: Path = Path("/run/vmjobs")) -> None:
        self.uri = uri
        self._embedded = EmbeddedRoot(embedded)
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._changes = 0
        self._open: Any = None
        self._says_causes = False
        #: Why this connection's VMs ended.
        self.endings = Endings()

    def call(self, what: str, action: Callable[[Any], T]) -> T:
        """Call ``action`` with the open connection; retry once if that was broken.

        Raises:
            HypervisorError: libvirt fails, or is not installed.
        """
        if libvirt is None:
            raise HypervisorError("libvirt's Python module is not installed")
        try:
            connection = self._connect()
            try:
                return action(connection)
            except libvirt.libvirtError:
                if connection.isAlive():
                    raise
            self._drop(connection)
            return action(self._reconnect())
        except libvirt.libvirtError as error:
            raise HypervisorError(f"cannot {what}: {error}") from error

    @property
    def changes(self) -> int:
        """Grows whenever a VM changes its state, or the connection breaks."""
        return self._changes

    def wait_change(self, seen: int, timeout: float) -> None:
        """Block until :attr:`changes` is not ``seen``, or for ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != seen, timeout)

    def logs(self, name: str) -> _Paths:
        """libvirt's logs of a VM's QEMU output; libvirt never removes them."""
        if self.uri == "qemu:///embed":
            return self._embedded.logs(name)
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return list(Path(cache, "libvirt", "qemu", "log").glob(f"{name}.log*"))

    def _connect(self) -> Any:
        with self._lock:
            if self._open is None:
                _event_loop()
                uri = self._embedded.uri() if self.uri == "qemu:///embed" else self.uri
                fresh = libvirt.open(uri)
                kind = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
                fresh.domainEventRegisterAny(None, kind, self._on_lifecycle, None)
                with suppress(libvirt.libvirtError):  # libvirt itself reports a reset as a power-off
                    libvirt_qemu.qemuMonitorEventRegister(fresh, None, None, self._on_monitor, None, 0)
                    self._says_causes = True
                with suppress(libvirt.libvirtError):  # drivers without a daemon have neither
                    fresh.setKeepAlive(5, 3)
                with suppress(libvirt.libvirtError):
                    fresh.registerCloseCallback(self._on_event, None)
                self._open = fresh
            return self._open

    def _reconnect(self) -> Any:
        """Connect again after a daemon went away; its successor may take a moment."""
        deadline = time.monotonic() + RECONNECT_SECONDS
        while True:
            try:
                return self._connect()
            except libvirt.libvirtError:
                if time.monotonic() > deadline:
                    raise
            with self._changed:
                self._changed.wait(0.1)

    def _drop(self, connection: Any) -> None:
        with self._lock:
            if self._open is connection:
                self._open = None

    def _on_event(self, *_about: object) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _on_lifecycle(
        self, connection: Any, domain: Any, event: int, detail: int, _opaque: object
    ) -> None:
        if event == libvirt.VIR_DOMAIN_EVENT_STOPPED:
            # Without QEMU's causes, libvirt does not tell a power-off from a restart.
            told = self._says_causes or connection.getType().lower() == "test"
            self.endings.over(domain.name(), _stopped(detail) if told else Ending.UNKNOWN)
        self._on_event()

    def _on_monitor(
        self, _connection: Any, domain: Any, event: str, _s: int, _us: int, details: str, _o: object
    ) -> None:
        if event == "GUEST_PANICKED":
            self.endings.heard(domain.name(), Ending.PANICKED)
        elif event == "SHUTDOWN":
            self.endings.heard(domain.name(), of_cause(json.loads(details or "{}").get("reason", "")))


def _stopped(detail: int) -> Ending:
    """Return the cause that the detail of libvirt's event STOPPED means."""
    return {
        libvirt.VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN: Ending.POWEROFF,
        libvirt.VIR_DOMAIN_EVENT_STOPPED_DESTROYED: Ending.KILLED,
        libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED: Ending.PANICKED,
        libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED: Ending.CRASHED,
    }.get(detail, Ending.UNKNOWN)


class Libvirt:
    """The driver of one kind of domain.

    kernels: kernels that a probe may boot, the best first.
    domain_type: libvirt's, if it differs from the name of the kind.
    launcher: starts processes that shall last as long as a VM.
    isolated: run VMs in a sandbox (:mod:`vmjobs.hypervisor.sandboxed`), or refuse to start them.
    program: QEMU, if not libvirt's default.
    policy: destinations that guests may reach in network mode ``outbound``.
    """

    def __init__(
        self,
        kind: HypervisorKind,
        connection: Connection,
        *,
        isolated: bool = True,
        program: str = "",
        kernels: Callable[[], Iterable[Path]] = node_kernels,
        domain_type: str = "",
        launcher: Launcher | None = None,
        policy: OutboundPolicy | None = None,
    ) -> None:
        self.kind = kind
        self._launcher = launcher or Launcher()
        self._connection = connection
        self._kernels = kernels
        self._type = domain_type or kind.value
        self._isolated, self._program = isolated, program
        self._disk_servers: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._mains: dict[str, int] = {}
        self._holder = Holder(kind, throttles_disks=True)
        self._meter = Meter(self._helpers_of)
        self._helpers = helpers.Helpers(self._launcher, policy, isolated=isolated)

    # ----------------------------------------------------------------- life and death

    @property
    def platform(self) -> str:
        """See :attr:`Hypervisor.platform`: QEMU, board, and the guest's processor."""
        # Not cached: a later call may find another QEMU.
        qemu = self._connection.call("ask for QEMU's version", _qemu_version)
        processor = "tcg" if self.kind is HypervisorKind.QEMU else _processor()
        return f"qemu {qemu}, {board().machine}, {processor}"

    @property
    def abilities(self) -> Abilities:
        """See :attr:`Hypervisor.abilities`."""
        return ABILITIES[self.kind]

    def probe(self, deadline: float) -> ProbeResult:
        """See :meth:`Hypervisor.probe`."""
        began = time.monotonic()
        device = Path("/dev/kvm") if self.kind is HypervisorKind.KVM else None
        if device is not None and (fault := _fault(device)):
            return ProbeResult(self.kind, False, fault, time.monotonic() - began)
        kernel = first_kernel(self._kernels())
        # An emulated processor runs a kernel if it runs a boot sector; a virtualized one may not.
        by_bios = kernel is None and self.kind is HypervisorKind.QEMU
        if kernel is None and not by_bios:
            detail = "no kernel to boot: neither the node nor an image on it has one"
            return ProbeResult(self.kind, False, detail, time.monotonic() - began)
        return boot_probe(
            self,
            version=self._version,
            deadline=deadline,
            kernel=kernel,
            where=str(device) if device else "",
            by_bios=by_bios,
            isolation=sandbox.described(isolated=self._isolated),
        )

    def unenforced(self, limits: MachineLimits, directory: Path) -> tuple[str, ...]:
        """See :meth:`Hypervisor.unenforced`."""
        return self._holder.unenforced(limits, directory)

    def open_network(self, mode: NetworkMode, ports: Sequence[int], running: str = "") -> Network:
        """See :meth:`Hypervisor.open_network`."""
        process = self._main(running) if running else None
        return guest_network.open_network(self._launcher, mode, ports, process)

    def open_private_network(self, names: Sequence[str]) -> PrivateNetwork:
        """See :meth:`Hypervisor.open_private_network`."""
        raise self._no_private_network()

    def _no_private_network(self) -> HypervisorError:
        message = f"VMs with private networks run on uml alone, not on {self.kind}"
        return HypervisorError(message, hint="set their hypervisor to uml")

    def start(self, machine: Machine) -> None:
        """See :meth:`Hypervisor.start`."""
        on, held = board(), self._holder.plan(machine)
        if self.state(machine.name) is not MachineState.GONE:
            raise HypervisorError(f"{machine.name} runs already")
        if machine.card is not None:
            raise self._no_private_network()
        overlay = (machine.overlay or machine.workdir / "overlay.qcow2").absolute()
        with ExitStack() as undo:
            undo.callback(self.destroy, machine.name)
            boots_by_uefi = machine.image.boot is BootMethod.UEFI
            resumed = machine.saved is not None
            uefi = (
                firmware.lay_out(machine.workdir, firmware.find(), resumed=resumed)
                if boots_by_uefi
                else None
            )
            nbd = self._serve_root(machine)
            if resumed:
                check_overlay(overlay)
            else:
                _make_overlay(machine, overlay)
            self._helpers.connect(machine)
            emulator = self._emulator(machine, overlay, uefi, nbd)
            text = domain_xml(machine, self._type, overlay, on, uefi, nbd, emulator)
            self._connection.endings.expect(machine.name)
            self._begin(machine, text)
            self._holder.hold(held, machine.name, lambda: [p.pid for p in self._all_of(machine.name)])
            if held.processors is not None:
                self._helpers.regulate(machine, self._qemu(machine.name).pid, held.processors)
            undo.pop_all()

    def stop(self, name: str) -> None:
        """See :meth:`Hypervisor.stop`. Presses the guest's power button."""
        self._domain(name, "stop", lambda domain: domain.shutdown())

    def destroy(self, name: str) -> None:
        """See :meth:`Hypervisor.destroy`."""
        with procs.held(self._all_of(name)) as processes:
            try:
                self._domain(name, "destroy", lambda domain: domain.destroy())
            finally:
                # Whatever libvirt reports, the VM is gone only when its processes are.
                procs.kill_held(processes, KILL_SECONDS, name)
                procs.kill_all(lambda: self._all_of(name), KILL_SECONDS, name)
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Clean up after a VM that is gone."""
        for server in self._disk_servers.pop(name, ()):
            server.wait()
        crashed = self._connection.endings.of(name, 0.0) is Ending.CRASHED
        for path in self._connection.logs(name):
            if crashed:
                words = tail(path).decode("utf-8", "replace").splitlines()[-LAST_LINES:]
                log.warning("QEMU of %s crashed; its libvirt log ends with: %s", name, "; ".join(words))
            with suppress(OSError):
                path.unlink()
        self._holder.release(name)
        self._connection.endings.forget(name)
        self._meter.forget(name)
        self._helpers.forget(name)
        self._mains.pop(name, None)

    def pause(self, name: str) -> None:
        """See :meth:`Hypervisor.pause`."""
        self._must(name, "pause", lambda domain: domain.suspend())

    def resume(self, name: str) -> None:
        """See :meth:`Hypervisor.resume`."""
        self._must(name, "resume", _resume)

    def save(self, name: str, path: Path) -> None:
        """See :meth:`Hypervisor.save`. Also a paused VM runs once it is resumed."""
        running = libvirt.VIR_DOMAIN_SAVE_RUNNING if libvirt is not None else 0
        self._must(name, "save", lambda domain: domain.saveFlags(str(path), None, running))

    # ----------------------------------------------------------------- what there is

    def state(self, name: str) -> MachineState:
        """See :meth:`Hypervisor.state`."""
        found = self._domain(name, "look at", lambda domain: domain.state()[0])
        if found is None:
            # A VM of another process's embedded driver shows only as a process.
            return MachineState.RUNNING if self._main(name) else MachineState.GONE
        if found in {libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PMSUSPENDED}:
            return MachineState.PAUSED
        over = {libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_CRASHED}
        return MachineState.GONE if found in over else MachineState.RUNNING

    def wait(self, name: str, timeout: float, beside: Sequence[int] = ()) -> MachineState:
        """See :meth:`Hypervisor.wait`."""
        deadline = time.monotonic() + timeout
        while True:
            seen = self._connection.changes
            state, main = self.state(name), self._main(name)
            left = max(0.0, deadline - time.monotonic())
            if state is MachineState.GONE or not left:
                return state
            look = min(left, procs.LOOK_SECONDS)
            if main is None:  # QEMU ends, or was never there: libvirt tells which
                self._connection.wait_change(seen, look)
                continue
            needed = self._needed(name)
            if procs.wait_for_any([main, *(needed or ())], beside, look if needed is None else left):
                return self.state(name)

    def ending(self, name: str) -> Ending:
        """See :meth:`Hypervisor.ending`."""
        return self._connection.endings.of(name, ENDING_SECONDS)

    def usage(self, name: str) -> Usage:
        """See :meth:`Hypervisor.usage`. QEMU's final usage cannot be learned."""
        main = self._main(name)
        return self._meter.look(name, Usage() if main is None else family(main.pid))

    def list(self) -> _Names:
        """See :meth:`Hypervisor.list`."""
        known = self._connection.call("list VMs", self._known)
        return sorted({*known, *(self._name_of(process) for process in procs.scan())} - {""})

    # ----------------------------------------------------------------- inside

    def _known(self, connection: Any) -> _Names:
        names = []
        for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
            if domain.name().startswith(NAME_PREFIX):
                with suppress(libvirt.libvirtError):  # gone since
                    if ET.fromstring(domain.XMLDesc()).get("type") == self._type:  # noqa: S314
                        names.append(domain.name())
        return names

    def _domain(self, name: str, verb: str, action: Callable[[Any], T]) -> T | None:
        """Return ``action``'s result for the domain; None: there is no active one."""

        def found(connection: Any) -> T | None:
            try:
                return action(connection.lookupByName(name))
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
                    return None
                if error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID and not _active(
                    connection, name
                ):
                    return None
                raise

        return self._connection.call(f"{verb} {name}", found)

    def _must(self, name: str, verb: str, action: Callable[[Any], object]) -> None:
        if self._domain(name, verb, lambda domain: (action(domain), True)) is None:
            raise HypervisorError(f"{name} does not run")

    def _begin(self, machine: Machine, text: str) -> None:
        try:
            self._connection.call(f"start {machine.name}", partial(_begin, machine.saved, text))
        except HypervisorError as error:
            if "bwrap: " not in error.message:
                raise
            raise sandbox.refused(error.message[error.message.index("bwrap: ") :]) from error

    def _emulator(
        self,
        machine: Machine,
        overlay: Path,
        uefi: firmware.Firmware | None,
        nbd: Path | None,
    ) -> confined.Emulator | None:
        if not self._isolated:
            return confined.Emulator(Path(self._program), {}) if self._program else None
        machine.console.touch()
        files = list(confined.files(machine, overlay, uefi, nbd))
        bounds, program = bounds_of(machine, self.kind), self._program or qemu()
        kvm = self.kind is HypervisorKind.KVM
        return confined.emulator(files, bounds, program, kvm=kvm, network=machine.network)

    def _serve_root(self, machine: Machine) -> Path | None:
        if machine.image.live is None:
            return None
        process, listen = blockserver.start(machine.name, machine.image.live, machine.workdir)
        self._disk_servers.setdefault(machine.name, []).append(process)
        return listen

    def _all_of(self, name: str) -> _Processes:
        everyone = list(procs.scan())
        ours = [process for process in everyone if self._name_of(process) == name]
        beside = helpers.find(name, everyone) + blockserver.find(name, everyone)
        return ours + sandbox.within(ours) + beside

    def _helpers_of(self, name: str) -> _Processes:
        return self._helpers.of(name) + blockserver.find(name)

    def _needed(self, name: str) -> _Processes | None:
        """The processes without which a guest would hang; None: one is missing.

        A QEMU that has lost one is killed.
        """
        servers = self._disk_servers.get(name, ())
        # A server that ends by itself has reported to the process that fetches the disk.
        killed = any((server.poll() or 0) < 0 for server in servers)
        beside = self._helpers.all_of(name)
        if killed or beside is None:
            what = "the NBD server of its root disk" if killed else "a helper process"
            log.warning("%s lost %s; killing its QEMU", name, what)
            self._connection.endings.heard(name, Ending.KILLED)
            with suppress(ProcessLookupError, HypervisorError):
                os.kill(self._qemu(name).pid, signal.SIGKILL)
            return None
        return [*beside, *(one for server in servers if (one := procs.read(server.pid)))]

    def _main(self, name: str) -> procs.Process | None:
        """The VM's first process: QEMU, or its sandbox's first."""
        known = self._mains.get(name)
        if known is not None:
            process = procs.read(known)  # cheaper than a scan
            return process if process is not None and self._name_of(process) == name else None
        for process in self._processes(name):
            self._mains[name] = process.pid
            return process
        return None

    def _qemu(self, name: str) -> procs.Process:
        """The VM's QEMU itself."""
        for process in self._processes(name):
            if sandbox.leads(process):
                return next(iter(sandbox.innermost(process)), process)
            if not sandbox.outside(process):
                return process
        raise HypervisorError(f"{name} ended at once")

    def _processes(self, name: str) -> _Processes:
        return [process for process in procs.scan() if self._name_of(process) == name]

    def _name_of(self, process: procs.Process) -> str:
        """The name of our VM that a process belongs to; ``""`` if none."""
        argv = process.argv
        if "-name" not in argv[:-1] or not (sandbox.outside(process) or "qemu" in argv[0]):
            return ""
        name = argv[argv.index("-name") + 1].partition(",")[0].removeprefix("guest=")
        accelerator = {"kvm": "kvm", "qemu": "tcg"}.get(self._type, "")
        ours = name.startswith(NAME_PREFIX) and accelerator in argv
        return name if ours else ""

    def _version(self) -> str:
        def ask(connection: Any) -> str:
            kind, library = connection.getVersion(), connection.getLibVersion()
            uefi = "UEFI" if firmware.find() else "no UEFI firmware"
            return f"QEMU {_dotted(kind)}, libvirt {_dotted(library)}, {uefi}"

        return self._connection.call("ask libvirt's version", ask)


def _resume(domain: Any) -> None:
    if domain.state()[0] != libvirt.VIR_DOMAIN_RUNNING:  # else libvirt raises an error
        domain.resume()


def _begin(saved: Path | None, text: str, connection: Any) -> object:
    """Start or resume a VM. text: domain XML, with the files and sockets of now."""
    if saved is None:
        return connection.createXML(text)
    return connection.restoreFlags(str(saved), text, libvirt.VIR_DOMAIN_SAVE_RUNNING)


def _qemu_version(connection: Any) -> str:
    return _dotted(connection.getVersion())


def _processor() -> str:
    """The node's processor as guests see it: a digest of its model and features."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n\n")[0].splitlines()
    told = [line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "flags"))]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def _make_overlay(machine: Machine, overlay: Path) -> None:
    """Create the overlay atomically, unless an earlier VM has left it."""
    if machine.overlay is None or not overlay.exists():
        fresh = overlay.with_name(f"{overlay.name}.new")
        run(_overlay(machine, fresh), timeout=60, error=HypervisorError)
        fresh.rename(overlay)


def _overlay(machine: Machine, overlay: Path) -> _Argv:
    """The command that creates an overlay. The domain XML repeats its backing image."""
    make: _Argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b"]
    if machine.image.live is None:
        return [*make, machine.image.root.absolute(), overlay]
    # -u: qemu-img does not open the backing image to learn its size, which is known.
    return [*make, "nbd:", "-u", overlay, str(machine.image.live.size)]


def _active(connection: Any, name: str) -> bool:
    try:
        return bool(connection.lookupByName(name).isActive())
    except libvirt.libvirtError:
        return False


def _dotted(number: int) -> str:
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def _fault(device: Path) -> str:
    """Return why a device cannot be opened; ``""`` if it can."""
    try:
        with device.open("r+b", buffering=0):
            return ""
    except OSError as error:
        return f"{device} cannot be opened: {error.strerror}"
