"""Watches one machine: its end, its console, and whether its guest is still heard of."""

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

#: Seconds from one look at a console that grows to the next.
TICK = 0.02
#: Seconds from one look to the next at what nothing tells of: a full disk, a guest that is silent.
LOOK_SECONDS = 20.0
#: Seconds until it is time to look at what the machine has used; each time twice as many, up to the
#: most: of a machine that ends unseen, half of what it used is known however short its life was.
FIRST_LOOK = 1.0
LOOKS_APART = 60.0
#: A console that could not be read so many times in a row is not waited for.
MOST_UNREAD = 100
#: Bytes: a disk with less room is full to whoever writes there.
FULL = 1 << 20


@dataclass
class Watch:
    """What a machine shows from outside.

    heard: gives the monotonic time at which the guest was last heard of at its endpoint; ``inf``
        for a guest from which nothing is expected.
    listening: whether a guest that is not heard of for ``silence`` seconds counts as lost.
    tick: seconds from one look at a console that grows to the next.
    told: bytes of the console of which all is in the inbox that they say.
    on_time: called from time to time.
    disk: where the machine's disks are. was_full: there was no room, at least at one look.
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
        """Look until the machine is gone or the handle ``stop`` is readable."""
        warned, pause = False, FIRST_LOOK
        self._awake = looked = time.monotonic()
        due, told = looked + pause, True
        with Growth(self.reader.path) as growth:
            while True:
                # A console that has just grown is left alone for a while: it may grow at every moment.
                wait = self.tick if told else min(self._longest(), max(0.0, due - looked))
                gone = self._wait(wait, (stop,) if told else (stop, growth.fileno()))
                if procs.readable([stop], 0):
                    return
                looked, before = time.monotonic(), looked
                if looked - before > wait + self.silence / 4:
                    self._awake = looked  # this process slept, and could not have heard anybody
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
        """Seconds until it is time to look again, though nothing has happened."""
        return min(LOOK_SECONDS, self.silence / 4, PROMPT_SECONDS if self.reader.prompts else math.inf)

    def _wait(self, seconds: float, handles: tuple[int, ...]) -> bool:
        try:
            return self.driver.wait(self.machine, seconds, handles) is MachineState.GONE
        except (HypervisorError, OSError) as error:
            log.warning("cannot watch %s: %s", self.machine, error)
            time.sleep(TICK)
            return False

    def _have_read(self, *, to_the_end: bool) -> bool:
        """Read the console. False: it could not be read, but may be soon."""
        try:
            self._read_console(to_the_end=to_the_end)
        except OSError as error:  # too many open files, for one: nothing tells when that is over
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
        """Whatever goes wrong with that, the machine is looked after."""
        try:
            self.on_time()
        except Exception:
            log.exception("what %s uses is not known", self.machine)

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
    """Whether whoever writes there finds no room."""
    try:
        there = os.statvfs(directory)
    except OSError:
        return False
    return there.f_bavail * there.f_frsize < FULL


@contextmanager
def watching(watch: Watch) -> Iterator[Watch]:
    """Watch in a thread of its own for as long as the context lasts."""
    stop = os.eventfd(0)
    thread = threading.Thread(target=watch.run, args=(stop,), name="watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        os.eventfd_write(stop, 1)
        thread.join()
        os.close(stop)
