"""A guest is lost when it is silent, and not when nobody listened."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from vmjobs.agent.console import ConsoleReader
from vmjobs.agent.inbox import GuestSilent, Inbox
from vmjobs.agent.watch import Watch, watching
from vmjobs.hypervisor.base import Hypervisor, MachineState

SILENCE = 0.6


@dataclass
class Sleepy:
    """A driver with a machine that runs; looking at it takes ``first`` seconds, once."""

    first: float
    _pause: threading.Event = field(default_factory=threading.Event)

    def wait(self, name: str, timeout: float) -> MachineState:
        seconds, self.first = self.first or timeout, 0.0
        self._pause.wait(seconds)
        return MachineState.RUNNING


def silent_after(folder: Path, asleep: float) -> float:
    """Seconds after which a guest that was heard of just now counts as lost."""
    inbox, began = Inbox(), time.monotonic()
    watch = Watch(
        driver=cast(Hypervisor, Sleepy(asleep)),
        machine="it",
        inbox=inbox,
        reader=ConsoleReader(folder / "console", "sentinel"),
        max_console=1000,
        silence=SILENCE,
        heard=lambda: began,
        on_console=lambda: None,
        listening=True,
    )
    with watching(watch):
        assert isinstance(inbox.next(began + 10), GuestSilent)
    return time.monotonic() - began


def test_a_silent_guest_is_lost(tmp_path: Path) -> None:
    assert SILENCE <= silent_after(tmp_path, asleep=0.0) < 2 * SILENCE + 1


def test_what_was_not_heard_while_the_agent_slept_does_not_count(tmp_path: Path) -> None:
    assert silent_after(tmp_path, asleep=3 * SILENCE) >= 4 * SILENCE
