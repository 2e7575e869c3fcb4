"""The kvm and qemu drivers, through libvirt."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import (
    NAME_PREFIX,
    Network,
    PrivateNetwork,
    ProbeResult,
    ShutdownCause,
    VmConfig,
    VmLimits,
    VmState,
    VmUsage,
)
from vmjobs.hypervisor.libvirt import firmware, kvm, nbd_server, qemu_sandbox
from vmjobs.hypervisor.libvirt.connection import Connection
from vmjobs.hypervisor.libvirt.domain_xml import board, domain_xml
from vmjobs.hypervisor.libvirt.qemu_wrapper import qemu
from vmjobs.hypervisor.network import guest_network
from vmjobs.hypervisor.network.outbound import OutboundPolicy
from vmjobs.hypervisor.overlay import check as check_overlay
from vmjobs.hypervisor.probe import boot_probe, first_kernel, node_kernels
from vmjobs.hypervisor.sandbox import bubblewrap, helper_processes
from vmjobs.hypervisor.sandbox.limit_enforcement import LimitEnforcer
from vmjobs.hypervisor.sandbox.process_launcher import Launcher
from vmjobs.hypervisor.sandbox.resource_limits import resource_limits_for
from vmjobs.hypervisor.shutdown_causes import read_tail
from vmjobs.hypervisor.usage import UsageMeter, process_tree_usage
from vmjobs.model import CAPABILITIES, BootMethod, Capabilities, HypervisorKind, NetworkMode
from vmjobs.subprocess import run

log = logging.getLogger(__name__)

_Names = list[str]
_Processes = list[procs.Process]

#: Lines of libvirt's log of a VM that are logged if its QEMU crashed.
LAST_LINES = 5
#: Seconds that a killed QEMU may take to end.
KILL_SECONDS = 30.0
#: Seconds that libvirt may take to report why a VM ended, once it is gone.
ENDING_SECONDS = 5.0


class Libvirt:
    """The driver of one kind of domain (:class:`vmjobs.hypervisor.base.Hypervisor`).

    kernels: kernels that a probe may boot, the best first.
    domain_type: libvirt's, if it differs from the name of the kind.
    launcher: starts processes that shall last as long as a VM.
    isolated: run VMs in a sandbox (:mod:`.qemu_sandbox`), or refuse to start them.
    program: QEMU, if not libvirt's default.
    policy: destinations that guests may reach in network mode ``outbound``.
    hidden_features: features of the node's processor that guests of kvm do not see.
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
        hidden_features: Sequence[str] = (),
    ) -> None:
        self.kind = kind
        self._hidden_features = hidden_features if kind is HypervisorKind.KVM else ()
        self._launcher = launcher or Launcher()
        self._connection = connection
        self._kernels = kernels
        self._type = domain_type or kind.value
        self._isolated, self._program = isolated, program
        self._disk_servers: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._main_pids: dict[str, int] = {}
        self._limit_enforcer = LimitEnforcer(kind)
        self._meter = UsageMeter(self._helpers_of)
        self._helpers = helper_processes.HelperProcesses(self._launcher, policy, isolated=isolated)

    # ----------------------------------------------------------------- life and death

    @property
    def platform(self) -> str:
        """See :attr:`Hypervisor.platform`: QEMU, board, and the guest's processor."""
        # Not cached: a later call may find another QEMU.
        qemu, _ = self._connection.versions()
        processor = "tcg" if self.abilities.emulated else processor_digest(self._hidden_features)
        return f"qemu {qemu}, {board().machine_type}, {processor}"

    @property
    def abilities(self) -> Capabilities:
        can = CAPABILITIES[self.kind]
        there = qemu_sandbox.emulated(can.architectures, isolated=self._isolated)
        return replace(can, architectures=there)

    def probe(self, deadline: float) -> ProbeResult:
        began = time.monotonic()
        is_kvm = self.kind is HypervisorKind.KVM
        if is_kvm and (fault := kvm.unavailable_reason()):
            return ProbeResult(self.kind, False, fault, time.monotonic() - began)
        kernel = first_kernel(self._kernels())
        # An emulated processor runs a kernel if it runs a boot sector; a virtualized one may not.
        by_bios = kernel is None and self.abilities.emulated
        if kernel is None and not by_bios:
            detail = "no kernel to boot: neither the node nor an image on it has one"
            return ProbeResult(self.kind, False, detail, time.monotonic() - began)
        return boot_probe(
            self,
            version=self._version,
            deadline=deadline,
            kernel=kernel,
            where=str(kvm.DEVICE) if is_kvm else "",
            by_bios=by_bios,
            isolation=bubblewrap.describe_isolation(isolated=self._isolated),
        )

    def unenforced(self, limits: VmLimits, directory: Path) -> tuple[str, ...]:
        return self._limit_enforcer.unenforced(limits, directory)

    def open_network(self, mode: NetworkMode, ports: Sequence[int], running: str = "") -> Network:
        main = self._main_process(running) if running else None
        namespaces = None if main is None else guest_network.namespaces_of(main.pid)
        return guest_network.open_network(self._launcher, mode, ports, namespaces)

    def open_private_network(self, names: Sequence[str]) -> PrivateNetwork:
        raise private_network_error(self.kind)

    def start(self, vm: VmConfig) -> None:
        board_model = board(vm.image.architecture)
        held = self._limit_enforcer.plan_limits(vm)
        if self.state(vm.name) is not VmState.GONE:
            raise HypervisorError(f"{vm.name} runs already")
        if vm.card is not None:
            raise private_network_error(self.kind)
        overlay = (vm.overlay or vm.workdir / "overlay.qcow2").absolute()
        with ExitStack() as undo:
            undo.callback(self.destroy, vm.name)
            uefi, resumed = None, vm.saved is not None
            if vm.image.boot is BootMethod.UEFI:
                uefi = firmware.prepare_firmware(vm.workdir, firmware.find(), resumed=resumed)
            nbd = self._serve_root(vm)
            if resumed:
                check_overlay(overlay)
            else:
                make_overlay(vm, overlay)
            self._helpers.connect(vm)
            emulator = self._emulator(vm, overlay, uefi, nbd)
            text = domain_xml(
                vm, self._type, overlay, board_model, uefi, nbd, emulator, self._hidden_features
            )
            self._start_domain(vm, text)
            self._limit_enforcer.enforce(
                held, vm.name, lambda: [p.pid for p in self._processes_with_helpers(vm.name)]
            )
            if held.processors is not None:
                self._helpers.throttle(vm, self._qemu_process(vm.name).pid, held.processors)
            undo.pop_all()

    def stop(self, name: str) -> None:
        """See :meth:`Hypervisor.stop`. Presses the guest's power button."""
        self._connection.shutdown(name)

    def destroy(self, name: str) -> None:
        with procs.open_pidfds(self._processes_with_helpers(name)) as processes:
            try:
                self._connection.destroy(name)
            finally:
                # Whatever libvirt reports, the VM is gone only when its processes are.
                procs.kill_pidfds(processes, KILL_SECONDS, name)
                procs.kill_all(lambda: self._processes_with_helpers(name), KILL_SECONDS, name)
                self._forget(name)

    def _forget(self, name: str) -> None:
        """Clean up after a VM that is gone."""
        for server in self._disk_servers.pop(name, ()):
            server.wait()
        crashed = self._connection.shutdown_causes.of(name, 0.0) is ShutdownCause.CRASHED
        for path in self._connection.logs(name):
            if crashed:
                words = read_tail(path).splitlines()[-LAST_LINES:]
                log.warning("QEMU of %s crashed; its libvirt log ends with: %s", name, "; ".join(words))
            with suppress(OSError):
                path.unlink()
        self._limit_enforcer.remove(name)
        self._connection.shutdown_causes.forget(name)
        self._meter.forget(name)
        self._helpers.forget(name)
        self._main_pids.pop(name, None)

    def pause(self, name: str) -> None:
        self._connection.suspend(name)

    def resume(self, name: str) -> None:
        self._connection.resume(name)

    def save(self, name: str, path: Path) -> None:
        """See :meth:`Hypervisor.save`. Also a paused VM runs once it is resumed."""
        self._connection.save(name, path)

    # ----------------------------------------------------------------- what there is

    def state(self, name: str) -> VmState:
        if (found := self._connection.state(name)) is not None:
            return found
        # A VM of another process's embedded driver shows only as a process.
        return VmState.RUNNING if self._main_process(name) else VmState.GONE

    def wait(self, name: str, timeout: float, beside: Sequence[int] = ()) -> VmState:
        deadline = time.monotonic() + timeout
        with self._connection.watch() as changed:
            while True:
                state, main = self.state(name), self._main_process(name)
                left = max(0.0, deadline - time.monotonic())
                if state is VmState.GONE or not left:
                    return state
                look = min(left, procs.POLL_SECONDS)
                if main is None:  # QEMU ends, or was never there: libvirt tells which
                    changed.wait(look)
                    continue
                needed = self._required_processes(name)
                needed_seconds = look if needed is None else left
                if procs.wait_for_any([main, *(needed or ())], beside, needed_seconds):
                    return self.state(name)

    def shutdown_cause(self, name: str) -> ShutdownCause:
        return self._connection.shutdown_causes.of(name, ENDING_SECONDS)

    def usage(self, name: str) -> VmUsage:
        """See :meth:`Hypervisor.usage`. QEMU's final usage cannot be learned."""
        main = self._main_process(name)
        return self._meter.look(name, VmUsage() if main is None else process_tree_usage(main.pid))

    def list(self) -> _Names:
        known = self._connection.names(self._type)
        return sorted({*known, *(self._name_of(process) for process in procs.scan())} - {""})

    def _start_domain(self, vm: VmConfig, text: str) -> None:
        try:
            self._connection.start(vm.name, text, vm.saved)
        except HypervisorError as error:
            if "bwrap: " not in error.message:
                raise
            raise bubblewrap.sandbox_error(error.message[error.message.index("bwrap: ") :]) from error

    def _emulator(
        self,
        vm: VmConfig,
        overlay: Path,
        uefi: firmware.Firmware | None,
        nbd: Path | None,
    ) -> qemu_sandbox.Emulator | None:
        program = self._program or qemu(vm.image.architecture)
        if not self._isolated:
            is_usual = not self._program and vm.image.architecture in {"", platform.machine()}
            return None if is_usual else qemu_sandbox.Emulator(Path(program), {})
        vm.console.touch()
        files = list(qemu_sandbox.files(vm, overlay, uefi, nbd))
        limits = resource_limits_for(vm, self.kind)
        is_kvm = self.kind is HypervisorKind.KVM
        return qemu_sandbox.build_emulator(vm, files, limits, program, kvm=is_kvm)

    def _serve_root(self, vm: VmConfig) -> Path | None:
        if vm.image.live is None:
            return None
        process, listen = nbd_server.start(vm.name, vm.image.live, vm.workdir)
        self._disk_servers.setdefault(vm.name, []).append(process)
        return listen

    def _processes_with_helpers(self, name: str) -> _Processes:
        all_processes = list(procs.scan())
        ours = [process for process in all_processes if self._name_of(process) == name]
        beside = helper_processes.find(name, all_processes) + nbd_server.find(name, all_processes)
        return ours + bubblewrap.descendants(ours) + beside

    def _helpers_of(self, name: str) -> _Processes:
        return self._helpers.of(name) + nbd_server.find(name)

    def _required_processes(self, name: str) -> _Processes | None:
        """The processes without which a guest would hang; None: one is missing.

        A QEMU that has lost one is killed.
        """
        servers = self._disk_servers.get(name, ())
        # A server that ends by itself has reported to the process that fetches the disk.
        killed = any((server.poll() or 0) < 0 for server in servers)
        beside = self._helpers.all_or_none(name)
        if killed or beside is None:
            what = "the NBD server of its root disk" if killed else "a helper process"
            log.warning("%s lost %s; killing its QEMU", name, what)
            self._connection.shutdown_causes.record_cause(name, ShutdownCause.KILLED)
            with suppress(ProcessLookupError, HypervisorError):
                os.kill(self._qemu_process(name).pid, signal.SIGKILL)
            return None
        return [*beside, *(one for server in servers if (one := procs.read(server.pid)))]

    def _main_process(self, name: str) -> procs.Process | None:
        """The VM's first process: QEMU, or its sandbox's first."""
        known = self._main_pids.get(name)
        if known is not None:
            process = procs.read(known)  # cheaper than a scan
            return process if process is not None and self._name_of(process) == name else None
        for process in self._processes(name):
            self._main_pids[name] = process.pid
            return process
        return None

    def _qemu_process(self, name: str) -> procs.Process:
        for process in self._processes(name):
            if bubblewrap.is_leader(process):
                return next(iter(bubblewrap.inner_processes(process)), process)
            if not bubblewrap.is_outer_process(process):
                return process
        raise HypervisorError(f"{name} ended at once")

    def _processes(self, name: str) -> _Processes:
        return [process for process in procs.scan() if self._name_of(process) == name]

    def _name_of(self, process: procs.Process) -> str:
        """The name of our VM that a process belongs to; ``""`` if none."""
        argv = process.argv
        if "-name" not in argv[:-1] or not (bubblewrap.is_outer_process(process) or "qemu" in argv[0]):
            return ""
        name = argv[argv.index("-name") + 1].partition(",")[0].removeprefix("guest=")
        accelerator = {"kvm": "kvm", "qemu": "tcg"}.get(self._type, "")
        ours = name.startswith(NAME_PREFIX) and accelerator in argv
        return name if ours else ""

    def _version(self) -> str:
        version, library = self._connection.versions()
        uefi = "UEFI" if firmware.find() else "no UEFI firmware"
        return f"QEMU {version}, libvirt {library}, {uefi}"


def private_network_error(kind: HypervisorKind) -> HypervisorError:
    """Return the error of a VM that needs a private network, which this kind does not have."""
    message = f"VMs with private networks run on uml alone, not on {kind}"
    return HypervisorError(message, hint="set their hypervisor to uml")


def processor_digest(hidden_features: Sequence[str] = ()) -> str:
    """Return the node's processor as guests see it: a digest of its model and features."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n\n")[0].splitlines()
    guest_visible = [
        line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "flags"))
    ]
    return hashlib.sha256("\n".join([*guest_visible, *hidden_features]).encode()).hexdigest()[:16]


def make_overlay(vm: VmConfig, overlay: Path) -> None:
    """Create the overlay atomically, unless an earlier VM has left it.

    The domain XML repeats its backing image.
    """
    if vm.overlay is not None and overlay.exists():
        return
    fresh = overlay.with_name(f"{overlay.name}.new")
    make: list[str | Path] = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b"]
    if vm.image.live is None:
        make += [vm.image.root.absolute(), fresh]
    else:  # -u: qemu-img does not open the backing image to learn its size, which is known
        make += ["nbd:", "-u", fresh, str(vm.image.live.size)]
    run(make, timeout=60, error=HypervisorError)
    fresh.rename(overlay)
