"""The assignments of a gateway's VMs, from its operator's files and commands.

It is a :class:`vmjobs.ports.AssignmentSource`, and tracks the last status that each script printed.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from vmjobs.cluster.member import Goal, MemberCode, Phase
from vmjobs.cluster.wire import MemberReport, MemberReports, NodeShare, PoolToken
from vmjobs.errors import Forbidden
from vmjobs.gateway.place import GatewayPlace, Installed, member_of, order_of

log = logging.getLogger(__name__)

LONGEST_LINE = 1024
_LINE = re.compile(rb"vmjobs-gateway: (.*?)\r?$")
#: Phases in which a VM may exist.
ALIVE = frozenset({Phase.BOOTING, Phase.RUNNING, Phase.DRAINING, Phase.STOPPING})


class Condition(StrEnum):
    """The state of a gateway's VM. STARTING: its guest runs, its service does not answer yet."""

    STOPPED = "stopped"
    WAITING = "waiting"
    STAGING = "staging"
    BOOTING = "booting"
    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    STOPPING = "stopping"


def condition_of(phase: Phase, up: bool | None) -> Condition:
    """The state of a VM. up: the last status of its script; None: it reported none yet."""
    if phase is Phase.RUNNING:
        return {None: Condition.STARTING, True: Condition.UP, False: Condition.DOWN}[up]
    return {
        Phase.GONE: Condition.STOPPED,
        Phase.WAITING: Condition.WAITING,
        Phase.STAGING: Condition.STAGING,
        Phase.BOOTING: Condition.BOOTING,
    }.get(phase, Condition.STOPPING)


@dataclass
class Heard:
    """The status that an incarnation's script printed. frozen: None until the script answers."""

    incarnation: int = 0
    up: bool | None = None
    reason: str = ""
    frozen: bool | None = None
    rest: bytes = b""

    def take(self, words: bytes) -> bool:
        """Parse console output; returns whether it had a status line."""
        *lines, self.rest = (self.rest + words).split(b"\n")
        self.rest = self.rest[-LONGEST_LINE:]
        said = [self._line(line) for line in lines]
        return any(said)

    def _line(self, line: bytes) -> bool:
        found = _LINE.search(line[:LONGEST_LINE])
        if found is None:
            return False
        text = found[1].decode("utf-8", "replace")
        word, _, rest = text.partition(" ")
        if word in {"up", "down"}:
            self.up, self.reason = word == "up", rest
        elif word in {"frozen", "thawed"}:
            self.frozen = word == "frozen"
        elif word == "error:":
            self.frozen, self.reason = False, rest
        else:
            return False
        return True


@dataclass
class GatewayShare:
    """The VMs of one gateway. Every method may be called from any thread.

    on_restart: called with id and incarnation of a stopped VM that should run again. mint: issues a
    token for the VM with this name.
    """

    place: GatewayPlace
    installed: Installed
    again: Callable[[str, int], object] = lambda _member, _incarnation: None
    mint: Callable[[str], PoolToken] | None = None
    revision: int = 1
    _wanted: set[str] = field(default_factory=set)
    _heard: dict[str, Heard] = field(default_factory=dict)
    _reports: dict[str, MemberReport] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._wanted = self.place.wanted()
        for name, record in self.place.records().items():
            if record.admitted:  # it was up; its script will report whether it still is
                self._heard[member_of(name)] = Heard(record.incarnation, up=True)

    # ------------------------------------------------------------------ AssignmentSource

    def share(self, seen: int, wait: float) -> NodeShare:
        """See :meth:`vmjobs.ports.ShareSource.share`."""
        with self._changed:
            self._changed.wait_for(lambda: self.revision != seen or self._closed, wait)
            return self._share()

    def report(self, reports: MemberReports) -> None:
        """See :meth:`vmjobs.ports.ShareSource.report`."""
        with self._changed:
            for report in reports.reports:
                self._reports[report.id] = report
            self._touch()

    def token(self, member: str, incarnation: int) -> PoolToken:
        """See :meth:`vmjobs.ports.ShareSource.token`."""
        names = (m.name for m in self.installed.gateway.machines if member_of(m.name) == member)
        if self.mint is None or (name := next(names, None)) is None:
            raise Forbidden("there is no token for this VM")
        return self.mint(name)

    def append_console(self, member: str, incarnation: int, offset: int, data: bytes) -> None:
        """Do nothing: consoles stay on this host."""

    # ------------------------------------------------------------------ status and commands

    def words(self, member: str, incarnation: int, data: bytes) -> None:
        """Process console output of a VM's script."""
        with self._changed:
            heard = self._heard_of(member, incarnation)
            if heard.take(data):
                self._touch()

    def want(self, run: set[str], stop: set[str]) -> None:
        """Start and stop VMs, by name."""
        with self._changed:
            self._wanted = (self._wanted | run) - stop
            self.place.keep_wanted(self._wanted)
            self._touch()

    def ask_frozen(self, member: str) -> None:
        """Clear a VM's frozen status, before a request to freeze its data."""
        with self._changed:
            if (heard := self._heard.get(member)) is not None:
                heard.frozen = None

    def is_frozen(self, member: str, timeout: float) -> bool:
        """Whether the VM's script reports within ``timeout`` seconds that its data is frozen."""

        def answered() -> bool:
            heard = self._heard.get(member)
            return self._closed or (heard is not None and heard.frozen is not None)

        with self._changed:
            self._changed.wait_for(answered, timeout)
            heard = self._heard.get(member)
            return heard is not None and heard.frozen is True

    def close(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def show(self, seen: int, wait: float) -> dict[str, object]:
        """The states of the VMs; waits for another revision than ``seen``."""
        with self._changed:
            self._changed.wait_for(lambda: self.revision != seen or self._closed, wait)
            machines = {m.name: self._shown(m.name) for m in self.installed.gateway.machines}
            return {"revision": self.revision, "machines": machines}

    # ------------------------------------------------------------------ inside

    def _touch(self) -> None:
        self.revision += 1
        for order in self._share().members:
            report = self._reports.get(order.id)
            if order.goal is Goal.RUN and report is not None and report.phase is Phase.GONE:
                self.again(order.id, report.incarnation)
        self._changed.notify_all()

    def _heard_of(self, member: str, incarnation: int) -> Heard:
        heard = self._heard.get(member)
        if heard is None or heard.incarnation != incarnation:
            heard = self._heard[member] = Heard(incarnation)
        return heard

    def _share(self) -> NodeShare:
        orders = []
        for machine in self.installed.gateway.machines:
            heard = self._heard.get(member_of(machine.name))
            admitted = heard.incarnation if heard is not None and heard.up is not None else 0
            goal = Goal.RUN if machine.name in self._wanted else Goal.DRAIN
            orders.append(order_of(self.installed, machine, goal, admitted))
        return NodeShare(revision=self.revision, members=tuple(orders))

    def _shown(self, name: str) -> Mapping[str, object]:
        report = self._reports.get(member_of(name))
        heard = self._heard.get(member_of(name))
        if report is None:
            return {"state": Condition.STOPPED, "message": "", "incarnation": 0, "wanted": False}
        mine = heard is not None and heard.incarnation == report.incarnation
        up = heard.up if mine and heard is not None else None
        condition = condition_of(report.phase, up)
        message = report.message
        if condition is Condition.DOWN and heard is not None:
            message = heard.reason
        return {
            "state": condition,
            # A requested shutdown needs no message; an unexpected end does.
            "message": ""
            if condition is Condition.UP or report.code is MemberCode.DRAINED
            else message,
            "code": report.code,
            "since": report.since.isoformat(),
            "incarnation": report.incarnation,
            "failures": report.failures,
            "wanted": name in self._wanted,
        }
