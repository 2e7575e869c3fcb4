"""The client's side of a lease: it asks the agent until that comes to something, and passes signals on.

What runs beside each job of a node imports this: no module that takes long to import is needed.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from contextlib import contextmanager

from vmjobs.errors import Unavailable, reason_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import TypeVar

    T = TypeVar("T")

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0


class NotNow(Exception):
    """The agent will not run the job now; the text says why. It is asked again."""


def insist(
    path: str,
    converse: Callable[[socket.socket, Callable[[], None]], T | None],
    signals: Signals,
    patience: float,
    warn: Callable[[str], object] = lambda _why: None,
) -> T | None:
    """Talk with the agent at ``path`` until that comes to something; None: a signal said to stop.

    converse: takes a connection, and what to call whenever something is heard; returns None if the
        agent has to be asked again, or raises NotNow.
    patience: seconds to go on while nothing is heard. warn: takes a sentence each time that it is asked
        again.

    Raises:
        Unavailable: no agent for longer than that; the job is to be run elsewhere.
    """
    give_up = time.monotonic() + patience
    pause = FIRST_PAUSE
    why = f"no agent at {path}"

    def heard() -> None:
        nonlocal give_up, pause
        give_up, pause = time.monotonic() + patience, FIRST_PAUSE

    while not signals.stopping:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(path)
                ended = converse(connection, heard)
            if ended is not None:
                return ended
            why = f"the agent at {path} went away, or does not run the job now"
        except NotNow as refusal:
            why = f"the agent at {path} does not run the job now: {refusal}"
        except OSError as error:
            why = f"no agent at {path}: {reason_of(error)}"
        if time.monotonic() > give_up:
            raise Unavailable("agent", why)
        warn(f"{why}; asking again in {pause:.1f} s")
        signals.wait(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return None


class Signals:
    """Takes the signals that are passed on, for as long as its context lasts."""

    def __init__(self) -> None:
        self.stopping = 0
        self._came = threading.Event()
        self._send: Callable[[int], object] | None = None
        self._old: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Signals:
        self._old = {number: signal.signal(number, self._handle) for number in FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @contextmanager
    def forwarded_to(self, send: Callable[[int], object]) -> Iterator[None]:
        """Pass signals on, one that came just before too.

        send: called with a signal's number, at any point of what the main thread does.
        """
        self._send = send
        try:
            if self.stopping:
                send(self.stopping)
            yield
        finally:
            self._send = None

    def wait(self, seconds: float) -> None:
        """Wait, but not past a stopping signal."""
        self._came.wait(seconds)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            self.stopping = number
            self._came.set()
        if self._send is not None:
            try:
                self._send(number)
            except OSError:
                return  # the agent is gone: it is asked again, unless that was a signal to stop
