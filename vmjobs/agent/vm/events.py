"""The events of a run, and their queue.

The endpoint, the console, the VM, the lease and the repository put events in; only the run takes them
out and decides.
"""

from __future__ import annotations

import math
import queue
import time
from dataclasses import dataclass
from typing import Protocol

from vmjobs.model import ExitChannel, ExitStatus


@dataclass(frozen=True)
class GuestReady:
    """The guest has booted and has its job."""


@dataclass(frozen=True)
class ScriptEnded:
    """The script has ended; outputs will follow. disk_full: its disk was full then."""

    exit: ExitStatus
    disk_full: bool = False


@dataclass(frozen=True)
class ExitReported:
    """The guest powers off. undelivered: it could not deliver all outputs."""

    exit: ExitStatus
    undelivered: bool = False


@dataclass(frozen=True)
class VmEnded:
    """The hypervisor reports that the VM has ended."""


@dataclass(frozen=True)
class ConsoleLineMatched:
    """A line of the console matches a rule of the job: ``ready`` or ``exit``."""

    rule: str
    line: str


@dataclass(frozen=True)
class RuleFailed:
    """A rule of the job cannot be evaluated; ``why`` names it and the reason."""

    why: str


@dataclass(frozen=True)
class KernelPanicked:
    """The guest's kernel has panicked and halted."""

    cause: str


@dataclass(frozen=True)
class GuestSilent:
    """The guest has sent nothing for ``seconds``."""

    seconds: float


@dataclass(frozen=True)
class ConsoleFlooded:
    """The console has grown beyond its limit."""


@dataclass(frozen=True)
class ImageLost:
    """The part of the image that the VM has not read yet is unavailable."""

    error: Exception


@dataclass(frozen=True)
class SignalSent:
    """The client that started the run sent a signal for the job."""

    number: int


@dataclass(frozen=True)
class SaveRequested:
    """The agent is about to stop: the run must end, with its VM saved if possible."""


@dataclass(frozen=True)
class SaveFinished:
    """Saving the VM has succeeded or failed."""


@dataclass(frozen=True)
class LeaseLost:
    """The client that started the run has closed its connection."""


@dataclass(frozen=True)
class RunSuperseded:
    """The repository accepts no more reports of this attempt."""

    why: str


RunEvent = (
    GuestReady
    | ScriptEnded
    | ExitReported
    | VmEnded
    | ConsoleLineMatched
    | RuleFailed
    | KernelPanicked
    | GuestSilent
    | ConsoleFlooded
    | ImageLost
    | SignalSent
    | SaveRequested
    | SaveFinished
    | LeaseLost
    | RunSuperseded
)


def parse_exit_report(name: str, text: str, channel: ExitChannel) -> ScriptEnded | ExitReported | None:
    """Return the event of a guest's report ``collecting`` or ``exit``; None: it is not one.

    text: ``code=N`` or ``signal=N``, and perhaps ``disk=full`` or ``undelivered=yes``.
    """
    words = dict(word.split("=", 1) for word in text.split() if "=" in word)
    try:
        if "signal" in words:
            exit = ExitStatus(signal=int(words["signal"]), channel=channel)
        else:
            exit = ExitStatus(code=int(words["code"]), channel=channel)
    except (KeyError, ValueError):
        return None
    if name == "collecting":
        return ScriptEnded(exit, disk_full=words.get("disk") == "full")
    if name == "exit":
        return ExitReported(exit, undelivered=words.get("undelivered") == "yes")
    return None


class EventSink(Protocol):
    """Receives events."""

    def put(self, event: RunEvent) -> None:
        """Take an event; callable from any thread."""


class EventQueue:
    """A queue of events with deadlines (monotonic seconds)."""

    def __init__(self) -> None:
        self._queue: queue.Queue[RunEvent] = queue.Queue()

    def put(self, event: RunEvent) -> None:
        """Add an event; callable from any thread."""
        self._queue.put(event)

    def next(self, deadline: float) -> RunEvent | None:
        """Wait for the next event; return None after ``deadline`` (``inf``: never)."""
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
