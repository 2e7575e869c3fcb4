"""The assignments of a gateway's VMs, from its operator's files and commands.

It is a ``AssignmentSource``, and tracks the last status that each script printed.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase
from vmjobs.cluster.wire import Assignment, ClusterVmReport, ClusterVmReports, PoolToken
from vmjobs.errors import Forbidden
from vmjobs.gateway.directory import GatewayDirectory, InstalledGateway, vm_id, vm_order

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 1024
_STATUS_LINE = re.compile(rb"vmjobs-gateway: (.*?)\r?$")
#: From this percentage on a full disk is a fault.
FULL_PERCENT = 90
#: Phases in which a VM may exist.
ALIVE_PHASES = frozenset({Phase.BOOTING, Phase.RUNNING, Phase.DRAINING, Phase.STOPPING})


class GatewayVmState(StrEnum):
    """The state of a gateway's VM. STARTING: its guest runs, its service does not answer yet."""

    STOPPED = "stopped"
    WAITING = "waiting"
    STAGING = "staging"
    BOOTING = "booting"
    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    STOPPING = "stopping"


def vm_state(phase: Phase, up: bool | None) -> GatewayVmState:
    """The state of a VM. up: the last status of its script; None: it reported none yet."""
    if phase is Phase.RUNNING:
        return {None: GatewayVmState.STARTING, True: GatewayVmState.UP, False: GatewayVmState.DOWN}[up]
    return {
        Phase.GONE: GatewayVmState.STOPPED,
        Phase.WAITING: GatewayVmState.WAITING,
        Phase.STAGING: GatewayVmState.STAGING,
        Phase.BOOTING: GatewayVmState.BOOTING,
    }.get(phase, GatewayVmState.STOPPING)


@dataclass
class ScriptStatus:
    """The status that an incarnation's script printed.

    frozen: None until the script answers. full: percent of the VM's data disk.
    """

    incarnation: int = 0
    up: bool | None = None
    reason: str = ""
    frozen: bool | None = None
    full: int | None = None
    rest: bytes = b""

    def take(self, words: bytes) -> bool:
        """Parse console output; returns whether it had a status line."""
        *lines, self.rest = (self.rest + words).split(b"\n")
        self.rest = self.rest[-MAX_LINE_BYTES:]
        said = [self._line(line) for line in lines]
        return any(said)

    def _line(self, line: bytes) -> bool:
        found = _STATUS_LINE.search(line[:MAX_LINE_BYTES])
        if found is None:
            return False
        text = found[1].decode("utf-8", "replace")
        word, _, rest = text.partition(" ")
        if word in {"up", "down"}:
            self.up, self.reason = word == "up", rest
        elif word in {"frozen", "thawed"}:
            self.frozen = word == "frozen"
        elif word == "full" and rest.isdecimal():
            self.full = min(int(rest), 100)
        elif word == "error:":
            self.frozen, self.reason = False, rest
        else:
            return False
        return True


@dataclass
class GatewayAssignments:
    """The VMs of one gateway. Every method may be called from any thread.

    on_restart: called with id and incarnation of a stopped VM that should run again. mint: issues a
    token for the VM with this name.
    """

    place: GatewayDirectory
    installed: InstalledGateway
    on_restart: Callable[[str, int], object] = lambda _vm, _incarnation: None
    mint: Callable[[str], PoolToken] | None = None
    revision: int = 1
    _wanted: set[str] = field(default_factory=set)
    _restarting: set[str] = field(default_factory=set)
    _statuses: dict[str, ScriptStatus] = field(default_factory=dict)
    _reports: dict[str, ClusterVmReport] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._wanted = self.place.wanted()
        for name, record in self.place.records().items():
            if record.admitted:  # it was up; its script will report whether it still is
                self._statuses[vm_id(name)] = ScriptStatus(record.incarnation, up=True)

    # ------------------------------------------------------------------ AssignmentSource

    def assignment(self, seen: int, wait: float) -> Assignment:
        with self._changed:
            self._changed.wait_for(lambda: self.revision != seen or self._closed, wait)
            return self._assignment()

    def report(self, reports: ClusterVmReports) -> None:
        with self._changed:
            for report in reports.reports:
                self._reports[report.id] = report
                if report.phase is Phase.GONE:
                    self._restarting -= {n for n in self._restarting if vm_id(n) == report.id}
            self._notify_change()

    def token(self, vm: str, incarnation: int) -> PoolToken:
        names = (m.name for m in self.installed.gateway.machines if vm_id(m.name) == vm)
        if self.mint is None or (name := next(names, None)) is None:
            raise Forbidden("there is no token for this VM")
        return self.mint(name)

    def append_console(self, vm: str, incarnation: int, offset: int, data: bytes) -> None:
        """Do nothing: consoles stay on this host."""

    # ------------------------------------------------------------------ status and commands

    def words(self, vm: str, incarnation: int, data: bytes) -> None:
        """Process console output of a VM's script."""
        with self._changed:
            status = self._status_of(vm, incarnation)
            if status.take(data):
                self._notify_change()

    def set_wanted(self, run: set[str], stop: set[str]) -> None:
        """Start and stop VMs, by name."""
        with self._changed:
            self._wanted = (self._wanted | run) - stop
            self.place.save_wanted(self._wanted)
            self._notify_change()

    def restart(self, names: set[str]) -> None:
        """Shut VMs down and boot them again, with the images that are installed now."""
        with self._changed:
            self.installed = self.place.installed()
            for name in names:
                report = self._reports.get(vm_id(name))
                if report is not None and report.phase is not Phase.GONE:
                    self._restarting.add(name)
            self._notify_change()

    def clear_frozen(self, vm: str) -> None:
        """Clear a VM's frozen status, before a request to freeze its data."""
        with self._changed:
            if (status := self._statuses.get(vm)) is not None:
                status.frozen = None

    def is_frozen(self, vm: str, timeout: float) -> bool:
        """Whether the VM's script reports within ``timeout`` seconds that its data is frozen."""

        def answer() -> bool | None:
            status = self._statuses.get(vm)
            return None if status is None else status.frozen

        with self._changed:
            self._changed.wait_for(lambda: self._closed or answer() is not None, timeout)
            return answer() is True

    def close(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def show(self, seen: int, wait: float) -> dict[str, Any]:
        """The states of the VMs; waits for another revision than ``seen``."""
        with self._changed:
            self._changed.wait_for(lambda: self.revision != seen or self._closed, wait)
            vms = {m.name: self._shown(m.name) for m in self.installed.gateway.machines}
            return {"revision": self.revision, "machines": vms}

    def _notify_change(self) -> None:
        self.revision += 1
        for order in self._assignment().members:
            report = self._reports.get(order.id)
            if order.goal is Goal.RUN and report is not None and report.phase is Phase.GONE:
                self.on_restart(order.id, report.incarnation)
        self._changed.notify_all()

    def _status_of(self, vm: str, incarnation: int) -> ScriptStatus:
        status = self._statuses.get(vm)
        if status is None or status.incarnation != incarnation:
            status = self._statuses[vm] = ScriptStatus(incarnation)
        return status

    def _assignment(self) -> Assignment:
        orders = []
        for vm in self.installed.gateway.machines:
            status = self._statuses.get(vm_id(vm.name))
            admitted = status.incarnation if status is not None and status.up is not None else 0
            goal = Goal.RUN if vm.name in self._wanted - self._restarting else Goal.DRAIN
            orders.append(vm_order(self.installed, vm, goal, admitted))
        return Assignment(revision=self.revision, members=tuple(orders))

    def _shown(self, name: str) -> Mapping[str, object]:
        report = self._reports.get(vm_id(name))
        if report is None:
            return {"state": GatewayVmState.STOPPED, "message": "", "incarnation": 0, "wanted": False}
        status = self._statuses.get(vm_id(name))
        if status is None or status.incarnation != report.incarnation:
            status = ScriptStatus()
        condition = vm_state(report.phase, status.up)
        if name in self._restarting:
            condition = GatewayVmState.STOPPING
        full = status.full
        message = status.reason if condition is GatewayVmState.DOWN else report.message
        if not message and full is not None and full >= FULL_PERCENT:
            message = f"its data disk is {full} % full: remove data, or declare a larger disk"
        return {
            "state": condition,
            # A requested shutdown needs no message. That of a VM that is up: limits not enforced.
            "message": "" if report.code is ClusterVmCode.DRAINED else message,
            "code": report.code,
            "since": report.since.isoformat(),
            "full": full,
            "incarnation": report.incarnation,
            "failures": report.failures,
            "wanted": name in self._wanted,
        }
