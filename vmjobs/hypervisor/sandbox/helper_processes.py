"""Helper processes that a VM must not run without: slirp4netns, CPU throttle, holder of its network."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import Network, VmConfig
from vmjobs.hypervisor.network import guest_network
from vmjobs.hypervisor.network.outbound import OutboundPolicy
from vmjobs.hypervisor.sandbox import bubblewrap
from vmjobs.hypervisor.sandbox.process_launcher import Launcher, module_command

THROTTLE_MODULE: Final = "vmjobs.hypervisor.sandbox.cpu_throttle"
_Processes = list[procs.Process]


def vm_of(process: procs.Process) -> str:
    """Return the VM that a process helps; ``""``: none."""
    return guest_network.vm_of(process) or throttled_vm(process)


def throttled_vm(process: procs.Process) -> str:
    """Return the VM whose CPU use a process throttles; ``""``: none."""
    argv = process.argv
    if THROTTLE_MODULE not in argv or "--machine" not in argv[:-1]:
        return ""
    return argv[argv.index("--machine") + 1]


def find(name: str, among: Iterable[procs.Process] | None = None) -> _Processes:
    """Find a VM's helpers and their children. among: all processes; None: scan now."""
    found = _first(name, among)
    return [*found, *bubblewrap.descendants(found)]


def _first(name: str, among: Iterable[procs.Process] | None = None) -> _Processes:
    return [one for one in (procs.scan() if among is None else among) if vm_of(one) == name]


class HelperProcesses:
    """The helpers of a driver's VMs.

    policy: for network mode ``outbound``. isolated: whether the VMs run in a sandbox.
    """

    def __init__(self, launcher: Launcher, policy: OutboundPolicy | None, *, isolated: bool) -> None:
        self._launcher, self._isolated = launcher, isolated
        self._policy = policy or OutboundPolicy()
        self._pids: dict[str, list[int]] = {}

    def connect(self, vm: VmConfig) -> None:
        """Set up the limits and the outbound connection that a new VM's network has.

        Raises:
            HypervisorError: a step failed, and why.
        """
        if vm.network is not None and not self._isolated:
            message = f"{vm.name} has a network, and VMs with a network run only in a sandbox"
            raise HypervisorError(message, hint=bubblewrap.HINT)
        slirp_pid = guest_network.set_up_network(self._launcher, vm, self._policy)
        self._pids[vm.name] = [] if slirp_pid is None else [slirp_pid]

    def hold_network(self, vm: VmConfig, network: Network) -> int:
        """Start a process that keeps a VM's network; return its number.

        Raises:
            HypervisorError: it cannot be started.
        """
        pid = guest_network.hold_network(self._launcher, vm.name, network)
        self._pids.setdefault(vm.name, []).append(pid)
        return pid

    def throttle(self, vm: VmConfig, pid: int, share: float) -> None:
        """Start a process that throttles ``pid`` of a VM to ``share`` processors.

        Raises:
            HypervisorError: it cannot be started.
        """
        argv, env = module_command(THROTTLE_MODULE)
        argv += ["--machine", vm.name, "--pid", str(pid), "--processors", f"{share:g}"]
        log = vm.workdir / "regulator.log"
        with open(os.devnull, "r+b") as nothing, log.open("ab") as errors:  # noqa: PTH123
            handles = [nothing.fileno(), nothing.fileno(), errors.fileno()]
            process = self._launcher.start(argv, handles, env, Path("/"))
        process.close()
        self._pids.setdefault(vm.name, []).append(process.pid)

    def of(self, name: str) -> _Processes:
        """Return a VM's living helpers; scan once if an earlier agent started it."""
        if name not in self._pids:
            found = _first(name)
            self._pids[name] = [process.pid for process in found]
            return found
        living = (procs.read(pid) for pid in self._pids[name])
        return [one for one in living if one is not None and vm_of(one) == name]

    def all_or_none(self, name: str) -> _Processes | None:
        """The helpers of a VM; None: one of them has ended."""
        living = self.of(name)
        return living if len(living) == len(self._pids[name]) else None

    def throttles(self, name: str) -> _Processes:
        """The CPU throttle of a VM, if it has one."""
        return [one for one in self.of(name) if throttled_vm(one)]

    def forget(self, name: str) -> None:
        self._pids.pop(name, None)
