"""The client's side of a lease: asks an agent until it runs the job; forwards signals.

The program beside each job of a node imports this, so it imports no module that loads slowly.
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

FORWARDED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 5.0


class RetryLater(Exception):
    """The agent cannot run the job now; the text says why. The caller asks again."""


def retry_until(
    path: str,
    exchange: Callable[[socket.socket, Callable[[], None]], T | None],
    signals: SignalForwarder,
    patience: float,
    warn: Callable[[str], object] = lambda _why: None,
) -> T | None:
    """Ask the agent until ``exchange`` has a result; None: a signal stopped the job.

    path: the agent's socket.
    exchange: takes a connection, and a callback that it calls whenever the agent makes progress;
        returns None, or raises RetryLater, to ask the agent again.
    patience: seconds to go on without progress. warn: called with a sentence before each retry.

    Raises:
        Unavailable: no progress within that time; HTCondor should run the job elsewhere.
    """
    deadline = time.monotonic() + patience
    pause = FIRST_PAUSE_SECONDS
    why = f"no agent at {path}"

    def on_activity() -> None:
        nonlocal deadline, pause
        deadline, pause = time.monotonic() + patience, FIRST_PAUSE_SECONDS

    while not signals.stopping:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(path)
                ended = exchange(connection, on_activity)
            if ended is not None:
                return ended
            why = f"the agent at {path} closed the connection, or cannot run the job now"
        except RetryLater as refusal:
            why = f"the agent at {path} cannot run the job now: {refusal}"
        except OSError as error:
            why = f"no agent at {path}: {reason_of(error)}"
        if time.monotonic() > deadline:
            raise Unavailable("agent", why)
        warn(f"{why}; asking again in {pause:.1f} s")
        signals.wait(pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
    return None


class SignalForwarder:
    """Handles the signals that are forwarded to the agent, while its context lasts.

    stopping: the number of the signal that stopped the job; 0: none came.
    """

    def __init__(self) -> None:
        self.stopping = 0
        self._stop_event = threading.Event()
        self._send: Callable[[int], object] | None = None
        self._old_handlers: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> SignalForwarder:
        self._old_handlers = {
            number: signal.signal(number, self._handle) for number in FORWARDED_SIGNALS
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def forwarded_to(self, send: Callable[[int], object]) -> Iterator[None]:
        """Forward signals, also a stopping signal that came earlier.

        send: called with a signal's number, at any point of the main thread's work.
        """
        self._send = send
        try:
            if self.stopping:
                send(self.stopping)
            yield
        finally:
            self._send = None

    def wait(self, seconds: float) -> None:
        """Wait until ``seconds`` have passed or a stopping signal has come."""
        self._stop_event.wait(seconds)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            self.stopping = number
            self._stop_event.set()
        if self._send is not None:
            try:
                self._send(number)
            except OSError:
                return  # the agent is gone: the caller asks again, unless the signal stops the job
