"""The xen driver: paravirtualized VMs of a Xen host, through libvirt."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import (
    Network,
    PrivateNetwork,
    ProbeResult,
    ShutdownCause,
    VmConfig,
    VmLimits,
    VmState,
    VmUsage,
)
from vmjobs.hypervisor.libvirt.connection import Connection
from vmjobs.hypervisor.libvirt.driver import (
    ENDING_SECONDS,
    KILL_SECONDS,
    make_overlay,
    private_network_error,
    processor_digest,
)
from vmjobs.hypervisor.network import guest_network
from vmjobs.hypervisor.network.outbound import OutboundPolicy
from vmjobs.hypervisor.overlay import check as check_overlay
from vmjobs.hypervisor.probe import boot_probe, first_kernel, node_kernels
from vmjobs.hypervisor.sandbox import helper_processes
from vmjobs.hypervisor.sandbox.process_launcher import Launcher
from vmjobs.hypervisor.usage import UsageMeter
from vmjobs.hypervisor.xen.domain_xml import GRUB, domain_xml
from vmjobs.hypervisor.xen.saved import replace_xml
from vmjobs.model import CAPABILITIES, BootMethod, Capabilities, HypervisorKind, NetworkMode
from vmjobs.subprocess import run

log = logging.getLogger(__name__)

_Names = list[str]
_Processes = list[procs.Process]

URI: Final = "xen:///system"
#: Says whether this system is the host of a Xen hypervisor (xenfs).
_CAPABILITIES_FILE: Final = Path("/proc/xen/capabilities")
#: Where xenconsoled writes the consoles of VMs, as guest-NAME.log (xenconsoled(8), ``--log=guest``).
CONSOLE_DIRECTORY: Final = Path("/var/log/xen/console")
_ROOT: Final = 0
#: The only scheduler whose parameters libvirt sets, and its weight of a VM without one.
_SCHEDULER: Final = "credit"
_WEIGHT_PER_CPU_WEIGHT: Final = 2.56
_MAX_WEIGHT: Final = 65535
_NO_SCHEDULER: Final = (
    "the processor share is not limited: Xen's scheduler is not credit (boot Xen with sched=credit)"
)
_NO_DISK_LIMIT: Final = "the speed of its disks is not limited: xen cannot do that"


class Xen:
    """The driver of Xen VMs (:class:`vmjobs.hypervisor.base.Hypervisor`).

    kernels: kernels that a probe may boot, the best first.
    launcher: starts processes that shall last as long as a VM.
    policy: destinations that guests may reach in network mode ``outbound``.
    """

    kind = HypervisorKind.XEN

    def __init__(
        self,
        connection: Connection | None = None,
        *,
        kernels: Callable[[], Iterable[Path]] = node_kernels,
        launcher: Launcher | None = None,
        policy: OutboundPolicy | None = None,
    ) -> None:
        self._connection = connection or Connection(URI)
        self._kernels = kernels
        self._launcher = launcher or Launcher()
        self._helpers = helper_processes.HelperProcesses(self._launcher, policy, isolated=True)
        self._meter = UsageMeter(self._helpers.of)
        self._disk_servers: dict[str, procs.Process] = {}

    # ----------------------------------------------------------------- life and death

    @property
    def platform(self) -> str:
        """See :attr:`Hypervisor.platform`: Xen, and the guest's processor."""
        version, _ = self._connection.versions()
        return f"xen {version}, pv, {processor_digest()}"

    @property
    def abilities(self) -> Capabilities:
        return CAPABILITIES[self.kind]

    def probe(self, deadline: float) -> ProbeResult:
        began = time.monotonic()
        kernel = first_kernel(self._kernels())
        detail = unavailable_reason()
        if not detail and kernel is None:
            detail = "no kernel to boot: neither the node nor an image on it has one"
        if detail:
            return ProbeResult(self.kind, False, detail, time.monotonic() - began)
        return boot_probe(
            self, version=self._version, deadline=deadline, kernel=kernel, isolation="isolated by Xen"
        )

    def unenforced(self, limits: VmLimits, directory: Path) -> tuple[str, ...]:
        shares = limits.cpu_percent is not None or limits.cpu_weight is not None
        found = [_NO_SCHEDULER] if shares and self._connection.scheduler() != _SCHEDULER else []
        return (*found, *([_NO_DISK_LIMIT] if limits.disk_bytes is not None else []))

    def open_network(self, mode: NetworkMode, ports: Sequence[int], running: str = "") -> Network:
        helpers = self._helpers.of(running) if running else []
        held = (guest_network.held_namespaces(helper) for helper in helpers)
        namespaces = next((found for found in held if found), None)
        return guest_network.open_network(self._launcher, mode, ports, namespaces, bridged=True)

    def open_private_network(self, names: Sequence[str]) -> PrivateNetwork:
        raise private_network_error(self.kind)

    def start(self, vm: VmConfig) -> None:
        if self._connection.state(vm.name) is not None:
            raise HypervisorError(f"{vm.name} runs already")
        if vm.card is not None:
            raise private_network_error(self.kind)
        if vm.image.boot is BootMethod.UEFI or vm.image.live is not None:
            raise HypervisorError("a Xen VM starts only from a complete image, and not by UEFI")
        if vm.image.boot is BootMethod.BIOS and not GRUB.exists():
            hint = "apt-get install grub-xen-host"
            raise HypervisorError(f"the image boots by GRUB, but there is no {GRUB}", hint=hint)
        overlay = (vm.overlay or vm.workdir / "overlay.qcow2").absolute()
        with ExitStack() as undo:
            undo.callback(self.destroy, vm.name)
            if vm.saved is None:
                make_overlay(vm, overlay)
            else:
                check_overlay(overlay)
                _rebase(overlay, vm.image.root)
            _record_console(vm)
            self._helpers.connect(vm)
            holder = None if vm.network is None else self._helpers.hold_network(vm, vm.network)
            text = domain_xml(vm, overlay, holder)
            if vm.saved is None:
                self._connection.start(vm.name, text, None)
            else:
                replace_xml(vm.saved, text)
                self._connection.restore(vm.name, vm.saved)
            self._limit(vm)
            undo.pop_all()

    def _limit(self, vm: VmConfig) -> None:
        limits, parameters = vm.limits, {}
        if limits is None or self._connection.scheduler() != _SCHEDULER:
            return
        if limits.cpu_percent is not None:
            parameters["cap"] = max(1, vm.cpus * limits.cpu_percent)
        if limits.cpu_weight is not None:
            parameters["weight"] = min(
                _MAX_WEIGHT, max(1, round(limits.cpu_weight * _WEIGHT_PER_CPU_WEIGHT))
            )
        if parameters:
            self._connection.schedule(vm.name, parameters)

    def stop(self, name: str) -> None:
        """See :meth:`Hypervisor.stop`. Asks the guest's kernel, through the xenstore."""
        self._connection.shutdown(name)

    def destroy(self, name: str) -> None:
        server = self._disk_server(name)
        self._connection.destroy(name)
        # It is root's, and Xen's toolstack ends it.
        with procs.open_pidfds([server] if server else []) as handles:
            if handles and not procs.readable(handles, KILL_SECONDS):
                raise HypervisorError(f"{name} is gone, but not the process that served its disks")
        _end_helpers(name)
        with suppress(FileNotFoundError):
            _console_log(name).unlink()
        self._connection.shutdown_causes.forget(name)
        self._meter.forget(name)
        self._helpers.forget(name)
        self._disk_servers.pop(name, None)

    def pause(self, name: str) -> None:
        self._connection.suspend(name)

    def resume(self, name: str) -> None:
        self._connection.resume(name)

    def save(self, name: str, path: Path) -> None:
        """See :meth:`Hypervisor.save`. Also a paused VM runs once it is resumed."""
        try:
            path.touch(0o600)  # root writes it, and this user reads it
        except OSError as error:
            raise HypervisorError(f"cannot save {name} to {path}: {error.strerror}") from error
        if self.state(name) is VmState.PAUSED:
            self._connection.resume(name)  # the guest's kernel takes part in it
        self._connection.save(name, path)

    # ----------------------------------------------------------------- what there is

    def state(self, name: str) -> VmState:
        found = self._connection.state(name)
        if found is VmState.GONE and not self._connection.shutdown_causes.has_ended(name):
            return VmState.RUNNING  # its guest has ended; Xen's toolstack removes the rest
        return found or VmState.GONE

    def wait(self, name: str, timeout: float, beside: Sequence[int] = ()) -> VmState:
        deadline = time.monotonic() + timeout
        with self._connection.watch() as changed:
            while True:
                state = self.state(name)
                left = max(0.0, deadline - time.monotonic())
                if state is VmState.GONE:
                    _end_helpers(name)
                if state is VmState.GONE or not left:
                    return state
                needed = self._required_processes(name)
                with procs.open_pidfds(needed) as handles:
                    look = left if len(handles) == len(needed) > 0 else min(left, procs.POLL_SECONDS)
                    if changed.wait(look, [*handles, *beside]) and procs.readable(list(beside), 0.0):
                        return self.state(name)

    def _required_processes(self, name: str) -> _Processes:
        """The processes without which a guest would hang; none if one is missing, or the VM is ending.

        A VM that has lost one is destroyed.
        """
        helpers, server = self._helpers.all_or_none(name), self._disk_server(name)
        if helpers is not None and server is not None:
            return [*helpers, server]
        if self._connection.state(name) in {VmState.RUNNING, VmState.PAUSED}:
            what = "the process that serves its disks" if server is None else "a helper process"
            log.warning("%s lost %s; destroying it", name, what)
            self._connection.shutdown_causes.record_cause(name, ShutdownCause.KILLED)
            with suppress(HypervisorError):
                self._connection.destroy(name)
        return []

    def _disk_server(self, name: str) -> procs.Process | None:
        """The process that serves a VM's disks: QEMU, started by Xen's toolstack; None: it ended."""
        known = self._disk_servers.get(name)
        if known is not None:
            found = procs.read(known.pid)
            return found if found is not None and _is_disk_server(found, name) else None
        for process in procs.processes_of(_ROOT):
            if _is_disk_server(process, name):
                self._disk_servers[name] = process
                return process
        return None

    def shutdown_cause(self, name: str) -> ShutdownCause:
        cause = self._connection.shutdown_causes.of(name, ENDING_SECONDS)
        is_kept = cause is ShutdownCause.POWEROFF and self._connection.state(name) is not None
        return ShutdownCause.RESET if is_kept else cause

    def usage(self, name: str) -> VmUsage:
        """See :meth:`Hypervisor.usage`. A VM's final usage cannot be learned."""
        return self._meter.look(name, self._connection.usage(name))

    def list(self) -> _Names:
        return sorted(self._connection.names("xen"))

    def _version(self) -> str:
        version, library = self._connection.versions()
        return f"Xen {version}, libvirt {library}"


def unavailable_reason() -> str:
    """Return why no Xen VM can run on this node; ``""``: no known reason."""
    try:
        is_host = "control_d" in _CAPABILITIES_FILE.read_text("ascii", "replace")
    except OSError:
        is_host = False
    return "" if is_host else "this node was not booted by Xen, or is a guest of it"


def _end_helpers(name: str) -> None:
    """End a VM's helpers, which do not notice its end."""
    procs.kill_all(lambda: helper_processes.find(name), KILL_SECONDS, name)


def _console_log(name: str) -> Path:
    return CONSOLE_DIRECTORY / f"guest-{name}.log"


def _record_console(vm: VmConfig) -> None:
    """Let xenconsoled append a VM's console to its file."""
    try:
        vm.console.touch()
        with suppress(FileNotFoundError):
            _console_log(vm.name).unlink()
        _console_log(vm.name).symlink_to(vm.console.absolute())
    except OSError as error:
        hint = f"give the agent's user {CONSOLE_DIRECTORY}, and start xenconsoled with --log=guest"
        raise HypervisorError(
            f"the console of {vm.name} cannot be recorded: {error.strerror}", hint=hint
        ) from error


def _rebase(overlay: Path, root: Path) -> None:
    """Give an overlay the backing file that it has on this node, unseen."""
    rebase: list[str | Path] = ["qemu-img", "rebase", "-q", "-u", "-f", "qcow2", "-F", "raw"]
    run([*rebase, "-b", root.absolute(), overlay], timeout=60, error=HypervisorError)


def _is_disk_server(process: procs.Process, name: str) -> bool:
    argv = process.argv
    if "-xen-domid" not in argv or "-name" not in argv[:-1]:
        return False
    return argv[argv.index("-name") + 1].partition(",")[0] == name
