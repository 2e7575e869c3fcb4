"""The User-mode Linux driver: a guest kernel that is an ordinary process of this user.

It needs no privilege, no device and no daemon.

The kernel runs in the VM's working directory and gets relative names only: a guest can read its own
command line, which must not show the node's directories.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
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
from vmjobs.hypervisor.network import guest_network, private_network
from vmjobs.hypervisor.network.outbound import OutboundPolicy
from vmjobs.hypervisor.probe import boot_probe
from vmjobs.hypervisor.sandbox import bubblewrap, helper_processes
from vmjobs.hypervisor.sandbox.limit_enforcement import LimitEnforcer
from vmjobs.hypervisor.sandbox.process_launcher import LaunchedProcess, Launcher
from vmjobs.hypervisor.shutdown_causes import cause_from_uml_exit
from vmjobs.hypervisor.uml import kernel_boot, mconsole
from vmjobs.hypervisor.uml.cpu_placement import CpuPlacement
from vmjobs.hypervisor.usage import UsageMeter, process_tree_usage
from vmjobs.model import Capabilities, HypervisorKind, NetworkMode
from vmjobs.subprocess import run

log = logging.getLogger(__name__)

_Processes = list[procs.Process]
_Kernels = dict[str, tuple[LaunchedProcess, Path]]

_UMID = re.compile(r"umid=([\w.-]+)")
#: Seconds in which the guest's kernel must answer its console.
ANSWER_SECONDS = 5.0
#: Seconds that a kernel may take to have an exit status once it has ended.
ENDING_SECONDS = 5.0
#: Seconds that a killed process may take to end.
KILL_SECONDS = 30.0


class UserModeLinux:
    """The UML driver (:class:`vmjobs.hypervisor.base.Hypervisor`).

    program: the UML kernel; empty: vmjobs' own if installed, or else Debian's.
    isolated: run VMs in a sandbox (bubblewrap), or refuse to start them. VMs
        that were started without one are still found and ended.
    launcher: starts VMs, so that they outlive this process and its supervisor.
    system_calls: how the kernel catches its guest's, see :func:`.kernel_boot.system_call_parameters`.
    policy: destinations that guests may reach in network mode ``outbound``.
    """

    kind = HypervisorKind.UML

    def __init__(
        self,
        program: str = "",
        *,
        isolated: bool = True,
        launcher: Launcher | None = None,
        system_calls: str = kernel_boot.AUTO,
        policy: OutboundPolicy | None = None,
    ) -> None:
        self._program = program or kernel_boot.find_kernel()
        self._name = Path(self._program).name
        self._isolated = isolated
        self._launcher = launcher or Launcher()
        self._system_calls = system_calls
        self._main_pids: dict[str, int] = {}
        self._kernels: _Kernels = {}
        self._without_disk_process: set[str] = set()
        self._helpers = helper_processes.HelperProcesses(self._launcher, policy, isolated=isolated)
        self._lock = threading.Lock()
        self._limit_enforcer = LimitEnforcer(self.kind)
        self._meter = UsageMeter(self._helpers.of)
        self._placement = CpuPlacement()

    # ----------------------------------------------------------------- life and death

    @property
    def platform(self) -> str:
        """See :attr:`Hypervisor.platform`. A kernel's process cannot be saved."""
        return ""

    @property
    def abilities(self) -> Capabilities:
        return kernel_boot.abilities(self._program, self._system_calls)

    def probe(self, deadline: float) -> ProbeResult:
        # A UML kernel gets the initial file system by a parameter of its own.
        return boot_probe(
            self,
            version=self._version,
            deadline=deadline,
            cmdline=("initrd=initrd",),
            isolation=bubblewrap.describe_isolation(isolated=self._isolated),
        )

    def unenforced(self, limits: VmLimits, directory: Path) -> tuple[str, ...]:
        return self._limit_enforcer.unenforced(limits, directory)

    def open_network(self, mode: NetworkMode, ports: Sequence[int], running: str = "") -> Network:
        main = self._main_process(running) if running else None
        namespaces = None if main is None else guest_network.namespaces_of(main.pid)
        return guest_network.open_network(self._launcher, mode, ports, namespaces)

    def open_private_network(self, names: Sequence[str]) -> PrivateNetwork:
        for name in names:
            main = self._main_process(name)
            if main is not None and (found := kernel_boot.private_network_of(main.pid)) is not None:
                return found
        return private_network.create(self._launcher)

    def start(self, vm: VmConfig) -> None:
        kernel_boot.check_vm(vm, self._program, self._system_calls)
        held = self._limit_enforcer.plan_limits(vm)
        if vm.saved is not None:
            raise HypervisorError(f"cannot resume {vm.name}: UML VMs cannot be saved")
        if vm.image.live is not None:
            raise HypervisorError("a UML VM starts only from a complete image")
        if self._all_processes(vm.name):
            raise HypervisorError(f"{vm.name} runs already")
        with ExitStack() as undo:
            undo.callback(self.destroy, vm.name)
            disks = kernel_boot.prepare_disks(vm, isolated=self._isolated)
            self._helpers.connect(vm)
            argv = [*kernel_boot.command(self._program, vm, self._system_calls), *disks.devices]
            argv += kernel_boot.network_devices(vm)
            started = kernel_boot.boot(self._launcher, vm, argv, disks.binds)
            with self._lock:
                self._kernels[vm.name] = (started, vm.console)
                self._main_pids[vm.name] = started.pid
            if vm.cpus == 1:
                self._placement.place(vm.name, started.pid)
            self._limit_enforcer.enforce(
                held, vm.name, lambda: [p.pid for p in self._all_processes(vm.name)]
            )
            if held.processors is not None:
                kernel = self._kernel(vm.name)
                pid = started.pid if kernel is None else kernel.pid
                self._helpers.throttle(vm, pid, held.processors)
            undo.pop_all()

    def stop(self, name: str) -> None:
        """See :meth:`Hypervisor.stop`. The guest's init handles Ctrl-Alt-Del."""
        with contextlib.suppress(HypervisorError):  # gone, or no answer: the caller has a deadline
            if (kernel := self._kernel(name)) is not None:
                mconsole.command(kernel.pid, name, "cad", ANSWER_SECONDS)

    def destroy(self, name: str) -> None:
        # If only their leader is killed, the kernel's processes live on, and spin.
        procs.kill_all(lambda: self._all_processes(name), KILL_SECONDS, name)
        self._limit_enforcer.remove(name)
        self._meter.forget(name)
        self._placement.forget(name)
        self._helpers.forget(name)
        with self._lock:
            self._main_pids.pop(name, None)
            self._without_disk_process.discard(name)
            kernel = self._kernels.pop(name, None)
        if kernel is not None:
            kernel[0].close()

    def pause(self, name: str) -> None:
        kernel = self._kernel(name)
        if kernel is None:
            raise HypervisorError(f"{name} does not run")
        if self._paused(kernel, name):
            return
        # The throttle must not stop and continue it now.
        for process in self._helpers.throttles(name):
            _signal(process.pid, signal.SIGSTOP)
            procs.wait_stopped(process.pid, ANSWER_SECONDS)
            _signal(kernel.pid, signal.SIGCONT)
        # First the kernel halts the guest, at a point of its choice where no guest process runs;
        # then the kernel itself can be stopped, which is visible from outside. It may obey long
        # after this call stopped waiting for its answer.
        mconsole.command(kernel.pid, name, "stop", ANSWER_SECONDS, already="Already stopped")
        _signal(kernel.pid, signal.SIGSTOP)
        procs.wait_stopped(kernel.pid, ANSWER_SECONDS)

    def resume(self, name: str) -> None:
        kernel = self._kernel(name)
        if kernel is None:
            raise HypervisorError(f"{name} does not run")
        _signal(kernel.pid, signal.SIGCONT)
        mconsole.command(kernel.pid, name, "go", ANSWER_SECONDS, already="Not stopped")
        for process in self._helpers.throttles(name):
            _signal(process.pid, signal.SIGCONT)

    def save(self, name: str, path: Path) -> None:
        raise HypervisorError(f"cannot save {name} to {path}: UML VMs cannot be saved")

    # ----------------------------------------------------------------- what there is

    def state(self, name: str) -> VmState:
        main = self._main_process(name)
        if main is None:
            return VmState.GONE
        kernel = self._kernel_of(main, name)
        paused = kernel is not None and self._paused(kernel, name)
        return VmState.PAUSED if paused else VmState.RUNNING

    def wait(self, name: str, timeout: float, beside: Sequence[int] = ()) -> VmState:
        deadline = time.monotonic() + timeout
        while (main := self._main_process(name)) is not None:
            self._placement.rebalance(name, main.pid)
            needed, left = self._required_processes(main, name), deadline - time.monotonic()
            pause = min(left, procs.POLL_SECONDS) if needed is None else left
            if left <= 0 or procs.wait_for_any([main, *(needed or ())], beside, pause):
                break
        return self.state(name)

    def shutdown_cause(self, name: str) -> ShutdownCause:
        with self._lock:
            kernel = self._kernels.get(name)
        if kernel is None:
            return ShutdownCause.UNKNOWN
        process, console = kernel
        # A process that is about to end shows no command line, but has no exit status yet.
        status = process.status(ENDING_SECONDS)
        if status is not None and status > bubblewrap.SIGNAL_STATUS_BASE:
            status = bubblewrap.SIGNAL_STATUS_BASE - status
        return ShutdownCause.UNKNOWN if status is None else cause_from_uml_exit(status, console)

    def usage(self, name: str) -> VmUsage:
        """See :meth:`Hypervisor.usage`. Guest processes are the kernel's children."""
        with self._lock:
            kernel = self._kernels.get(name)
        if (main := self._main_process(name)) is not None:
            seen = process_tree_usage(kernel[0].pid if kernel else main.pid)
        else:
            seen = (kernel[0].used(ENDING_SECONDS) if kernel else None) or VmUsage()
        return self._meter.look(name, seen)

    def list(self) -> list[str]:
        """See :meth:`Hypervisor.list`; includes VMs of which only parts are left."""
        return sorted({name for process in procs.scan() if (name := self._name_of(process))})

    def _name_of(self, process: procs.Process) -> str:
        """The VM that a process belongs to, ``""`` if none."""
        if process.program != self._name and not bubblewrap.is_outer_process(process):
            return ""
        # QEMU has all kernel parameters in one word, where an image may write anything.
        names = [found[1] for word in process.argv if (found := _UMID.fullmatch(word))]
        return names[0] if names and names[0].startswith(NAME_PREFIX) else ""

    def _all_processes(self, name: str) -> _Processes:
        all_processes = list(procs.scan())
        ours = [process for process in all_processes if self._name_of(process) == name]
        # A session with another leader was not made by start(): leave the rest of it alone.
        foreign = {
            process.pid for process in all_processes if process.is_leader and process not in ours
        }
        sessions = {process.session for process in ours} - foreign
        found = {p.pid: p for p in all_processes if p in ours or p.session in sessions}
        # Only the parents of a sandbox's inner processes can be trusted.
        within = [p for p in bubblewrap.descendants(ours) if p.pid not in found]
        return [*found.values(), *within, *helper_processes.find(name, all_processes)]

    def _paused(self, kernel: procs.Process, name: str) -> bool:
        """Whether it is paused until :meth:`resume`, not merely throttled."""
        if not kernel.stopped or self._helpers.all_or_none(name) is None:
            return False  # the throttle may have died while it was stopped: not paused, but lost
        return all(process.stopped for process in self._helpers.throttles(name))

    def _main_process(self, name: str) -> procs.Process | None:
        """The VM's session leader: the kernel, or the first process of its sandbox."""
        known = self._main_pids.get(name)
        if known is not None:
            process = procs.read(known)  # cheaper than a scan
            still = process is not None and process.is_leader and self._name_of(process) == name
            return process if still else None
        for process in procs.scan():
            if process.is_leader and self._name_of(process) == name:
                self._main_pids[name] = process.pid
                return process
        return None

    def _kernel(self, name: str) -> procs.Process | None:
        main = self._main_process(name)
        return None if main is None else self._kernel_of(main, name)

    def _kernel_of(self, main: procs.Process, name: str) -> procs.Process | None:
        """The guest's kernel itself; None: it has not started, or has ended."""
        if not bubblewrap.is_leader(main):
            return main
        inner = bubblewrap.inner_processes(main)
        return next((process for process in inner if f"umid={name}" in process.argv), None)

    def _required_processes(self, main: procs.Process, name: str) -> _Processes | None:
        """The processes without which a guest would hang; None: some are unknown.

        This is so while the kernel starts or ends. A kernel that has lost one is killed.
        """
        kernel = self._kernel_of(main, name)
        if kernel is None:
            return None
        beside = self._helpers.all_or_none(name)
        if beside is None:
            log.warning("%s lost a helper process; killing its kernel", name)
            _signal(kernel.pid, signal.SIGKILL)
            return None
        disks = _disk_processes(kernel.pid)
        if disks is not None:
            self._without_disk_process.discard(name)
            return [*disks, *beside]
        if _has_guests(kernel.pid) and name in self._without_disk_process:
            log.warning("%s lost the process that reads and writes its disks; killing its kernel", name)
            _signal(kernel.pid, signal.SIGKILL)
        self._without_disk_process.add(name)  # while a kernel ends, it may be missing in one check
        return None

    def _version(self) -> str:
        printed = run([self._program, "--version"], timeout=10, error=HypervisorError)
        return f"UML {printed.text.strip()}"


def _disk_processes(kernel: int) -> _Processes | None:
    """Return the process that reads and writes a kernel's disks; None: none (yet).

    Up to Linux 6.15 it is the kernel's child, as the guest's are, but not traced
    (``arch/um/os-Linux/skas/process.c``), and it starts before any of them
    (``arch/um/drivers/ubd_kern.c``). Later kernels use threads, which end with them: empty.
    """
    if len(procs.threads(kernel)) > 1:
        return []
    found = [child for child in procs.children(kernel) if procs.is_traced(child) is False]
    return [one for pid in found if (one := procs.read(pid))] or None


def _has_guests(kernel: int) -> bool:
    """Whether a kernel traces processes of its guest."""
    return any(procs.is_traced(child) for child in procs.children(kernel))


def _signal(pid: int, which: signal.Signals) -> None:
    try:
        os.kill(pid, which)
    except OSError as error:
        message = f"cannot send {which.name} to process {pid}: {error.strerror}"
        raise HypervisorError(message) from error
