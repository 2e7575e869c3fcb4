"""Sends reports and consoles of cluster VMs to the service, each in a separate thread.

No caller waits for either.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vmjobs.cluster.wire import MemberReport, MemberReports
from vmjobs.errors import Unavailable, VMJobsError
from vmjobs.ports import ShareSource

log = logging.getLogger(__name__)

#: A cluster VM's id and incarnation.
_Machine = tuple[str, int]
_Heard = Callable[[MemberReport | None, MemberReport], object]

HEARTBEAT_SECONDS = 15.0
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 15.0
CHUNK = 512 * 1024
#: Seconds in which a report usually reaches the service; it rejects consoles of unreported VMs.
TOLD_SECONDS = 2.0


class Reporter:
    """Sends each changed report at once, and all reports at every heartbeat.

    on_change: called with a cluster VM's previous report (None: there was none) and its new one.
    """

    def __init__(self, source: ShareSource, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        self.heard: _Heard | None = None
        self._source = source
        self._heartbeat = heartbeat
        self._known: dict[str, MemberReport] = {}
        self._news: set[str] = set()
        self._told: dict[str, int] = {}
        self._changed = threading.Condition()
        self._stopped = False

    def tell(self, report: MemberReport) -> None:
        """Accept the present report of a cluster VM."""
        with self._changed:
            before = self._known.get(report.id)
            self._known[report.id] = report
            self._news.add(report.id)
            self._changed.notify_all()
        if self.heard is not None:
            self.heard(before, report)

    def known(self) -> tuple[MemberReport, ...]:
        """Return the last report of each cluster VM."""
        with self._changed:
            return tuple(self._known.values())

    def forget(self, member: str) -> None:
        """Remove a cluster VM."""
        with self._changed:
            self._known.pop(member, None)
            self._told.pop(member, None)
            self._news.discard(member)

    def has_told(self, member: str, incarnation: int, timeout: float = 0.0) -> bool:
        """Whether the service has a report of this incarnation; waits up to ``timeout`` seconds."""

        def told() -> bool:
            return self._told.get(member, 0) >= incarnation

        with self._changed:
            return self._changed.wait_for(told, timeout)

    def stop(self) -> None:
        """Make :meth:`run` return."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def run(self) -> None:
        """Send reports until :meth:`stop` is called. The first request has those of all VMs."""
        pause, whole = 0.0, True
        while not self._stopped:
            reports = self._take(whole=whole)
            try:
                self._source.report(reports)
            except VMJobsError as error:
                pause = min(LONGEST_PAUSE, 2 * pause or FIRST_PAUSE)
                log.warning("cluster VMs not reported, next attempt in %.1f s: %s", pause, error)
                whole = True
                self._rest(pause)
            else:
                pause = 0.0
                self._note_told(reports)
                whole = not self._wait()

    def _take(self, *, whole: bool) -> MemberReports:
        with self._changed:
            wanted = [r for name, r in self._known.items() if whole or name in self._news]
            self._news.clear()
        return MemberReports(reports=tuple(wanted), complete=whole)

    def _note_told(self, reports: MemberReports) -> None:
        with self._changed:
            told = {r.id: r.incarnation for r in reports.reports if r.id in self._known}
            self._told.update(told)
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for changes; return false if the heartbeat of all VMs is due instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._news or self._stopped, self._heartbeat)
            return bool(self._news)

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)


@dataclass
class Console:
    """The console of one incarnation: a file that its hypervisor appends to.

    Beyond ``limit`` bytes the file is truncated and starts again. The service gets the first ``limit``
    bytes of a console; later bytes are on the node only.
    """

    member: str
    incarnation: int
    path: Path
    limit: int
    _base: int = 0
    _sent: int = 0
    _refused: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        with suppress(OSError, ValueError):  # it was never truncated
            self._base = int(self._note.read_text("ascii"))

    @property
    def _note(self) -> Path:
        """The file with the number of bytes sent before the last truncation."""
        return self.path.with_name(f"{self.path.name}.base")

    def trim(self) -> None:
        """Truncate the file if it has grown too large."""
        with suppress(FileNotFoundError), self._lock:
            if self.path.stat().st_size > self.limit:
                self._base += self._sent
                self._sent = 0
                self._note.write_text(str(self._base), "ascii")
                with self.path.open("r+b") as file:
                    file.truncate()

    def ship(self, source: ShareSource) -> bool:
        """Send the next piece; false if there is none.

        Raises:
            Unavailable: it could not be sent now.
        """
        with self._lock:
            offset, data = self._base + self._sent, self._next()
        if not data:
            return False
        try:
            source.append_console(self.member, self.incarnation, offset, data)
        except Unavailable:
            raise
        except VMJobsError as error:
            log.warning("the service rejects the console of %s: %s", self.member, error)
            self._refused = True
        with self._lock:
            if offset == self._base + self._sent:  # it was not truncated meanwhile
                self._sent += len(data)
        return True

    def _next(self) -> bytes:
        room = self.limit - self._base - self._sent
        if self._refused or room <= 0:
            return b""
        try:
            with self.path.open("rb") as file:
                file.seek(self._sent)
                return file.read(min(CHUNK, room))
        except FileNotFoundError:
            return b""


class Shipper:
    """Sends consoles to the service as they grow."""

    def __init__(self, source: ShareSource, reporter: Reporter) -> None:
        self._source = source
        self._reporter = reporter
        self._consoles: dict[_Machine, Console] = {}
        self._changed = threading.Condition()
        self._grown: dict[_Machine, None] = {}  # in the order in which they grew
        self._stopped = False

    def follow(self, console: Console) -> Callable[[], None]:
        """Send this console from now on. Return a function to call whenever it has grown.

        The rest of the previous incarnation's console is sent, too.
        """
        machine = (console.member, console.incarnation)

        def grew() -> None:
            try:
                console.trim()
            except OSError as error:  # must not end the watch of the VM
                log.warning("cannot truncate the console of %s: %s", console.member, error)
            with self._changed:
                self._grown[machine] = None
                self._changed.notify_all()

        with self._changed:
            for member, incarnation in list(self._consoles):
                if member == console.member and incarnation < console.incarnation - 1:
                    del self._consoles[member, incarnation]
            self._consoles[machine] = console
        grew()
        return grew

    def forget(self, member: str) -> None:
        """Remove a cluster VM."""
        with self._changed:
            for machine in [machine for machine in self._consoles if machine[0] == member]:
                del self._consoles[machine]

    def stop(self) -> None:
        """Make :meth:`run` return."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def run(self) -> None:
        """Send until :meth:`stop` is called."""
        pause = 0.0
        while (machine := self._next()) is not None:
            try:
                self._ship(machine)
                pause = 0.0
            except (VMJobsError, OSError) as error:
                pause = min(LONGEST_PAUSE, 2 * pause or FIRST_PAUSE)
                log.warning("console not sent, next attempt in %.1f s: %s", pause, error)
                with self._changed:
                    self._grown[machine] = None
                    self._changed.wait_for(lambda: self._stopped, pause)

    def _next(self) -> _Machine | None:
        with self._changed:
            self._changed.wait_for(lambda: self._grown or self._stopped)
            if self._stopped:
                return None
            machine = next(iter(self._grown))
            del self._grown[machine]
            return machine

    def _ship(self, machine: _Machine) -> None:
        with self._changed:
            console = self._consoles.get(machine)
        if console is None:
            return
        if not self._reporter.has_told(*machine, timeout=TOLD_SECONDS):
            raise Unavailable("api", "the service has no report of the VM yet")
        if console.ship(self._source):
            with self._changed:  # after the other consoles
                self._grown[machine] = None
