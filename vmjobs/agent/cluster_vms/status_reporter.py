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

from vmjobs.agent.background import RetryingLoop
from vmjobs.agent.cluster_vms.assignment_source import AssignmentSource
from vmjobs.agent.file_watch import read_piece
from vmjobs.cluster.wire import ClusterVmReport, ClusterVmReports
from vmjobs.errors import Unavailable, VMJobsError

log = logging.getLogger(__name__)

#: A cluster VM's id and incarnation.
_Incarnation = tuple[str, int]
_ChangeCallback = Callable[[ClusterVmReport | None, ClusterVmReport], object]

HEARTBEAT_SECONDS = 15.0
#: Seconds in which a report usually reaches the service; it rejects consoles of unreported VMs.
REPORT_SECONDS = 2.0


class StatusReporter(RetryingLoop):
    """Sends each changed report at once; all reports first, at every heartbeat, and after a failure.

    on_change: called with a cluster VM's previous report (None: there was none) and its new one.
    """

    purpose = "report cluster VMs"

    def __init__(self, source: AssignmentSource, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        super().__init__()
        self.on_change: _ChangeCallback | None = None
        self._source = source
        self._heartbeat = heartbeat
        self._reports: dict[str, ClusterVmReport] = {}
        self._changed_ids: set[str] = set()
        self._reported: dict[str, int] = {}
        self._complete = True

    def tell(self, report: ClusterVmReport) -> None:
        with self._changed:
            before = self._reports.get(report.id)
            self._reports[report.id] = report
            self._changed_ids.add(report.id)
            self._changed.notify_all()
        if self.on_change is not None:
            self.on_change(before, report)

    def known(self) -> tuple[ClusterVmReport, ...]:
        """Return the last report of each cluster VM."""
        with self._changed:
            return tuple(self._reports.values())

    def forget(self, vm_id: str) -> None:
        with self._changed:
            self._reports.pop(vm_id, None)
            self._reported.pop(vm_id, None)
            self._changed_ids.discard(vm_id)

    def is_reported(self, vm_id: str, incarnation: int, timeout: float = 0.0) -> bool:
        """Whether the service has a report of this incarnation; waits up to ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._reported.get(vm_id, 0) >= incarnation, timeout)

    def step(self) -> None:
        reports = self._take(complete=self._complete)
        self._complete = True
        self._source.report(reports)
        self._note_reported(reports)
        self._complete = not self._wait()

    def _take(self, *, complete: bool) -> ClusterVmReports:
        with self._changed:
            selected = [r for name, r in self._reports.items() if complete or name in self._changed_ids]
            self._changed_ids.clear()
        return ClusterVmReports(reports=tuple(selected), complete=complete)

    def _note_reported(self, reports: ClusterVmReports) -> None:
        with self._changed:
            is_known = {r.id: r.incarnation for r in reports.reports if r.id in self._reports}
            self._reported.update(is_known)
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait for changes; return false if the heartbeat of all VMs is due instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._changed_ids or self._stopped, self._heartbeat)
            return bool(self._changed_ids)


@dataclass
class ConsoleFile:
    """The console of one incarnation: a file that its hypervisor appends to.

    Beyond ``limit`` bytes the file is truncated and starts again. The service gets the first ``limit``
    bytes of a console; later bytes are on the node only.
    """

    vm_id: str
    incarnation: int
    path: Path
    limit: int
    _base: int = 0
    _sent: int = 0
    _refused: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        with suppress(OSError, ValueError):  # it was never truncated
            self._base = int(self._base_file.read_text("ascii"))

    @property
    def _base_file(self) -> Path:
        """The file with the number of bytes sent before the last truncation."""
        return self.path.with_name(f"{self.path.name}.base")

    def truncate_if_full(self) -> None:
        with suppress(FileNotFoundError), self._lock:
            if self.path.stat().st_size > self.limit:
                self._base += self._sent
                self._sent = 0
                self._base_file.write_text(str(self._base), "ascii")
                with self.path.open("r+b") as file:
                    file.truncate()

    def upload_next(self, source: AssignmentSource) -> bool:
        """Send the next piece; false if there is none.

        Raises:
            Unavailable: it could not be sent now.
        """
        with self._lock:
            offset, data = self._base + self._sent, self._next()
        if not data:
            return False
        try:
            source.append_console(self.vm_id, self.incarnation, offset, data)
        except Unavailable:
            raise
        except VMJobsError as error:
            log.warning("the service rejects the console of %s: %s", self.vm_id, error)
            self._refused = True
        with self._lock:
            if offset == self._base + self._sent:  # it was not truncated meanwhile
                self._sent += len(data)
        return True

    def _next(self) -> bytes:
        room = self.limit - self._base - self._sent
        return b"" if self._refused or room <= 0 else read_piece(self.path, self._sent, room)


class ConsoleUploader(RetryingLoop):
    """Sends consoles to the service as they grow."""

    purpose = "send a console"

    def __init__(self, source: AssignmentSource, reporter: StatusReporter) -> None:
        super().__init__()
        self._source = source
        self._reporter = reporter
        self._consoles: dict[_Incarnation, ConsoleFile] = {}
        self._grown: dict[_Incarnation, None] = {}  # in the order in which they grew

    def follow(self, console: ConsoleFile) -> Callable[[], None]:
        """Send this console from now on. Return a function to call whenever it has grown.

        The rest of the previous incarnation's console is sent, too.
        """
        key = (console.vm_id, console.incarnation)

        def grew() -> None:
            try:
                console.truncate_if_full()
            except OSError as error:  # must not end the watch of the VM
                log.warning("cannot truncate the console of %s: %s", console.vm_id, error)
            with self._changed:
                self._grown[key] = None
                self._changed.notify_all()

        with self._changed:
            for vm_id, incarnation in list(self._consoles):
                if vm_id == console.vm_id and incarnation < console.incarnation - 1:
                    del self._consoles[vm_id, incarnation]
            self._consoles[key] = console
        grew()
        return grew

    def forget(self, vm_id: str) -> None:
        with self._changed:
            for key in [key for key in self._consoles if key[0] == vm_id]:
                del self._consoles[key]

    def step(self) -> None:
        """Send the next piece of the console that is due."""
        if (key := self._next()) is None:
            return
        again = True
        try:
            again = self._upload(key)
        finally:
            if again:
                with self._changed:  # after the other consoles
                    self._grown[key] = None

    def _next(self) -> _Incarnation | None:
        with self._changed:
            self._changed.wait_for(lambda: self._grown or self._stopped)
            if self._stopped:
                return None
            key = next(iter(self._grown))
            del self._grown[key]
            return key

    def _upload(self, key: _Incarnation) -> bool:
        with self._changed:
            console = self._consoles.get(key)
        if console is None:
            return False
        if not self._reporter.is_reported(*key, timeout=REPORT_SECONDS):
            raise Unavailable("api", "the service has no report of the VM yet")
        return console.upload_next(self._source)
