"""Watches one VM: its end, its console, and its guest's heartbeat."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vmjobs.agent.console import PROMPT_SECONDS, ConsoleReader
from vmjobs.agent.growth import Growth
from vmjobs.agent.inbox import ConsoleFlooded, GuestSilent, MachineGone, Observer
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import Hypervisor, MachineState

log = logging.getLogger(__name__)

#: Seconds between reads of a growing console.
TICK = 0.02
#: Seconds between checks of conditions that no event signals: a full disk, a silent guest.
LOOK_SECONDS = 20.0
#: Seconds until the first measurement of the VM's resource usage; the interval doubles each time, up
#: to the maximum. So at least half of the usage of a VM that ends unobserved is known.
FIRST_LOOK = 1.0
LOOKS_APART = 60.0
#: Failed reads of the console in a row after which it is given up.
MOST_UNREAD = 100
#: Bytes: a disk with less free space counts as full.
FULL = 1 << 20


@dataclass
class Watch:
    """Observes one VM from outside and puts events into the queue.

    heard: returns the monotonic time of the guest's last request to its endpoint; ``inf`` if none are
        expected.
    listening: whether a guest without requests for ``silence`` seconds counts as lost.
    tick: seconds between reads of a growing console.
    told: bytes of the console whose events are all in the queue.
    on_time: called from time to time.
    disk: directory of the VM's disks. disk_was_full: at least once.
    """

    driver: Hypervisor
    machine: str
    inbox: Observer
    reader: ConsoleReader
    max_console: int
    silence: float
    heard: Callable[[], float]
    on_console: Callable[[], None]
    listening: bool = False
    tick: float = TICK
    on_time: Callable[[], None] = lambda: None
    told: int = 0
    disk: Path | None = None
    was_full: bool = False
    _awake: float = 0.0
    _unread: int = 0

    def run(self, stop: int) -> None:
        """Watch until the VM is gone or the handle ``stop`` is readable."""
        warned, pause = False, FIRST_LOOK
        self._awake = looked = time.monotonic()
        due, told = looked + pause, True
        with Growth(self.reader.path) as growth:
            while True:
                # After it has grown the console is not polled for a tick: it may grow all the time.
                wait = self.tick if told else min(self._longest(), max(0.0, due - looked))
                gone = self._wait(wait, (stop,) if told else (stop, growth.fileno()))
                if procs.readable([stop], 0):
                    return
                looked, before = time.monotonic(), looked
                if looked - before > wait + self.silence / 4:
                    self._awake = looked  # this process slept, and could not receive heartbeats
                told = growth.seen()
                self.was_full = self.was_full or (self.disk is not None and _is_full(self.disk))
                if not self._have_read(to_the_end=gone):
                    continue
                if gone:
                    self.inbox.put(MachineGone())
                    return
                if looked >= due:
                    self._tell_time()
                    pause = min(2 * pause, LOOKS_APART)
                    due = looked + pause
                if not warned:
                    warned = self._warn()

    def _longest(self) -> float:
        """Return seconds until the next check if no event occurs."""
        return min(LOOK_SECONDS, self.silence / 4, PROMPT_SECONDS if self.reader.prompts else math.inf)

    def _wait(self, seconds: float, handles: tuple[int, ...]) -> bool:
        try:
            return self.driver.wait(self.machine, seconds, handles) is MachineState.GONE
        except (HypervisorError, OSError) as error:
            log.warning("cannot watch %s: %s", self.machine, error)
            time.sleep(TICK)
            return False

    def _have_read(self, *, to_the_end: bool) -> bool:
        """Read the console. False: it cannot be read now, but may be readable soon."""
        try:
            self._read_console(to_the_end=to_the_end)
        except OSError as error:  # for example too many open files; no event signals the end of that
            log.warning("cannot read the console of %s: %s", self.machine, error)
            self._unread += 1
            time.sleep(TICK)
            return self._unread >= MOST_UNREAD
        self._unread = 0
        return True

    def _read_console(self, *, to_the_end: bool) -> None:
        while True:
            before = self.reader.offset
            for observation in self.reader.read():
                self.inbox.put(observation)
            self.told = self.reader.place
            if self.reader.offset == before:
                if to_the_end:
                    for observation in self.reader.finish():
                        self.inbox.put(observation)
                return
            self.on_console()
            if not to_the_end:
                return

    def _tell_time(self) -> None:
        """Call ``on_time``; its errors do not stop the watch."""
        try:
            self.on_time()
        except Exception:
            log.exception("cannot measure the resource usage of %s", self.machine)

    def _warn(self) -> bool:
        if self.reader.size() > self.max_console:
            self.inbox.put(ConsoleFlooded())
            return True
        quiet = time.monotonic() - max(self.heard(), self._awake)
        if self.listening and quiet > self.silence:
            self.inbox.put(GuestSilent(quiet))
            return True
        return False


def _is_full(directory: Path) -> bool:
    """Whether the file system of a directory is full."""
    try:
        there = os.statvfs(directory)
    except OSError:
        return False
    return there.f_bavail * there.f_frsize < FULL


@contextmanager
def watching(watch: Watch) -> Iterator[Watch]:
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
