"""What can happen to a run, as values in one queue.

The endpoint, the console, the machine, the lease and the repository each put observations in;
the run alone takes them out and decides.
"""

from __future__ import annotations

import math
import queue
import time
from dataclasses import dataclass
from typing import Protocol

from vmjobs.model import ExitStatus


@dataclass(frozen=True)
class Ready:
    """The guest is up and has its job."""


@dataclass(frozen=True)
class ScriptEnded:
    """The script has ended; outputs are still to come. ``disk_full``: its disk was full then."""

    exit: ExitStatus
    disk_full: bool = False


@dataclass(frozen=True)
class ExitReported:
    """The guest has delivered all that it could, and powers off. ``undelivered``: there was more."""

    exit: ExitStatus
    undelivered: bool = False


@dataclass(frozen=True)
class MachineGone:
    """The hypervisor says that the machine is no more."""


@dataclass(frozen=True)
class LineSeen:
    """A line of the console fits a rule of the job: ``ready`` or ``exit``."""

    rule: str
    line: str


@dataclass(frozen=True)
class RuleFailed:
    """A rule of the job cannot be evaluated; ``why`` says which and why."""

    why: str


@dataclass(frozen=True)
class Panicked:
    """The guest's kernel gave up and will never do anything again."""

    cause: str


@dataclass(frozen=True)
class GuestSilent:
    """The guest has not been heard of for ``seconds``."""

    seconds: float


@dataclass(frozen=True)
class ConsoleFlooded:
    """The console has grown beyond its limit."""


@dataclass(frozen=True)
class ImageLost:
    """What the machine has not read yet of its image is not to be had; ``error`` says why."""

    error: Exception


@dataclass(frozen=True)
class SignalSent:
    """Whoever runs the job sent it a signal."""

    number: int


@dataclass(frozen=True)
class SaveWanted:
    """The agent is about to stop: the run is to end with its machine saved, or just to end."""


@dataclass(frozen=True)
class SaveOver:
    """The machine has been saved, or could not be."""


@dataclass(frozen=True)
class LeaseLost:
    """Whoever ran the job has gone."""


@dataclass(frozen=True)
class Superseded:
    """The repository takes no more word from this attempt."""

    why: str


Observation = (
    Ready
    | ScriptEnded
    | ExitReported
    | MachineGone
    | LineSeen
    | RuleFailed
    | Panicked
    | GuestSilent
    | ConsoleFlooded
    | ImageLost
    | SignalSent
    | SaveWanted
    | SaveOver
    | LeaseLost
    | Superseded
)


class Observer(Protocol):
    """Whoever is told of observations."""

    def put(self, observation: Observation) -> None:
        """Take an observation; callable from any thread."""


class Inbox:
    """A queue of observations with deadlines (monotonic seconds)."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Observation] = queue.Queue()

    def put(self, observation: Observation) -> None:
        """Add an observation; callable from any thread."""
        self._queue.put(observation)

    def next(self, deadline: float) -> Observation | None:
        """The next observation, or None once ``deadline`` has passed; ``inf`` never does."""
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
