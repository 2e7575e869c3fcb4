"""Watches one VM: its end, its console, and its guest's heartbeat."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from vmjobs.agent.file_watch import FileWatch
from vmjobs.agent.vm.console import PROMPT_SECONDS, ConsoleReader
from vmjobs.agent.vm.events import ConsoleFlooded, EventSink, GuestSilent, VmEnded
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import Hypervisor, VmState

log = logging.getLogger(__name__)

#: Seconds between reads of a growing console.
TICK_SECONDS = 0.02
#: Seconds between checks of conditions that no event signals: a full disk, a silent guest.
CHECK_SECONDS = 20.0
#: Seconds until the first measurement of the VM's resource usage; the interval doubles each time, up
#: to the maximum. So at least half of the usage of a VM that ends unobserved is known.
FIRST_USAGE_SECONDS = 1.0
MAX_USAGE_SECONDS = 60.0
#: Failed reads of the console in a row after which it is given up.
MAX_FAILED_READS = 100
#: Bytes: a disk with less free space counts as full.
FULL_DISK_BYTES = 1 << 20
#: Monotonic time when the watch of any VM last saw a file system full, by its device. When many VMs
#: fill a disk, some may have ended and freed space before the watch of one whose write failed looks.
_last_full: dict[int, float] = {}


@dataclass
class VmWatch:
    """Observes one VM from outside and puts events into the queue.

    heard: returns the monotonic time of the guest's last request to its endpoint; ``inf`` if none are
        expected.
    listening: whether a guest without requests for ``silence`` seconds counts as lost.
    tick: seconds between reads of a growing console.
    processed: bytes of the console whose events are all in the queue.
    on_time: called from time to time.
    disk: directory of the VM's disks.
    """

    driver: Hypervisor
    vm_name: str
    event_queue: EventSink
    reader: ConsoleReader
    max_console: int
    silence: float
    heard: Callable[[], float]
    on_console: Callable[[], None]
    listening: bool = False
    tick: float = TICK_SECONDS
    on_time: Callable[[], None] = lambda: None
    processed: int = 0
    disk: Path | None = None
    _began: float = field(default_factory=time.monotonic)
    _device: int = 0
    _awake_since: float = 0.0
    _failed_reads: int = 0

    def run(self, stop: int) -> None:
        """Watch until the VM is gone or the handle ``stop`` is readable."""
        warned, pause = False, FIRST_USAGE_SECONDS
        self._awake_since = checked_at = time.monotonic()
        due, has_grown = checked_at + pause, True
        with FileWatch(self.reader.path) as file_watch:
            while True:
                # After it has grown the console is not polled for a tick: it may grow all the time.
                wait = self.tick if has_grown else min(self._max_wait(), max(0.0, due - checked_at))
                gone = self._wait(wait, (stop,) if has_grown else (stop, file_watch.fileno()))
                if procs.readable([stop], 0):
                    return
                checked_at, before = time.monotonic(), checked_at
                if checked_at - before > wait + self.silence / 4:
                    # This process slept, and could not receive heartbeats.
                    self._awake_since = checked_at
                has_grown = file_watch.has_changed()
                self._check_disk()
                if not self._try_read_console(to_the_end=gone):
                    continue
                if gone:
                    self.event_queue.put(VmEnded())
                    return
                if checked_at >= due:
                    self._call_on_time()
                    pause = min(2 * pause, MAX_USAGE_SECONDS)
                    due = checked_at + pause
                if not warned:
                    warned = self._check_limits()

    @property
    def disk_was_full(self) -> bool:
        """Whether the disk was seen full since this watch began, by this or another one."""
        return _last_full.get(self._device, -math.inf) >= self._began

    def _check_disk(self) -> None:
        if self.disk is not None:
            with suppress(OSError):  # it is gone
                self._device = self.disk.stat().st_dev
                if _is_full(self.disk):
                    _last_full[self._device] = time.monotonic()

    def _max_wait(self) -> float:
        """Return seconds until the next check if no event occurs."""
        return min(
            CHECK_SECONDS, self.silence / 4, PROMPT_SECONDS if self.reader.may_show_prompt else math.inf
        )

    def _wait(self, seconds: float, handles: tuple[int, ...]) -> bool:
        try:
            return self.driver.wait(self.vm_name, seconds, handles) is VmState.GONE
        except (HypervisorError, OSError) as error:
            log.warning("cannot watch %s: %s", self.vm_name, error)
            time.sleep(TICK_SECONDS)
            return False

    def _try_read_console(self, *, to_the_end: bool) -> bool:
        """Read the console. False: it cannot be read now, but may be readable soon."""
        try:
            self._read_console(to_the_end=to_the_end)
        except OSError as error:  # for example too many open files; no event signals the end of that
            log.warning("cannot read the console of %s: %s", self.vm_name, error)
            self._failed_reads += 1
            time.sleep(TICK_SECONDS)
            return self._failed_reads >= MAX_FAILED_READS
        self._failed_reads = 0
        return True

    def _read_console(self, *, to_the_end: bool) -> None:
        while True:
            before = self.reader.offset
            for event in self.reader.read():
                self.event_queue.put(event)
            self.processed = self.reader.resume_offset
            if self.reader.offset == before:
                if to_the_end:
                    for event in self.reader.finish():
                        self.event_queue.put(event)
                return
            self.on_console()
            if not to_the_end:
                return

    def _call_on_time(self) -> None:
        """Call ``on_time``; its errors do not stop the watch."""
        try:
            self.on_time()
        except Exception:
            log.exception("cannot measure the resource usage of %s", self.vm_name)

    def _check_limits(self) -> bool:
        if self.reader.size() > self.max_console:
            self.event_queue.put(ConsoleFlooded())
            return True
        silent_seconds = time.monotonic() - max(self.heard(), self._awake_since)
        if self.listening and silent_seconds > self.silence:
            self.event_queue.put(GuestSilent(silent_seconds))
            return True
        return False


def _is_full(directory: Path) -> bool:
    there = os.statvfs(directory)
    return there.f_bavail * there.f_frsize < FULL_DISK_BYTES


@contextmanager
def watching(watch: VmWatch) -> Iterator[VmWatch]:
    """Watch in a separate thread while the context lasts."""
    stop = os.eventfd(0)
    thread = threading.Thread(target=watch.run, args=(stop,), name="watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        os.eventfd_write(stop, 1)
        thread.join()
        os.close(stop)
