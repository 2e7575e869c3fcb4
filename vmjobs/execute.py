"""``vmjobs exec``: the executable that HTCondor's starter runs, without any rights of its own.

It asks the agent to run a job, passes signals on, tells progress, and exits with the script's
status. Its connection is the lease. If the agent dies it waits for the next one and asks again:
that one has removed what was left of the first run before it listens.
"""

from __future__ import annotations

import logging
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from vmjobs.agent import protocol
from vmjobs.errors import InvalidRequest, Unavailable, VMJobsError

log = logging.getLogger(__name__)

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


class Refused(VMJobsError):
    """The agent, or the repository behind it, will not run this job."""

    code = "REFUSED"
    exit_code = 125


def run_job(
    path: Path,
    job: str,
    token: str,
    on_progress: Callable[[protocol.ProgressMessage | protocol.EndMessage], None],
    patience: float = 120.0,
) -> int:
    """Have the agent at ``path`` run ``job``; returns the exit status to exit with.

    patience: seconds to wait for an agent that is not there (any more).

    Raises:
        Unavailable: no agent for longer than that.
        Refused: the job was not taken.
    """
    give_up = time.monotonic() + patience
    pause = FIRST_PAUSE
    with _Signals() as signals:
        while True:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.connect(str(path))
                    with signals.forwarded_to(connection):
                        ended = _converse(connection, job, token, on_progress)
                if ended is not None:
                    return ended
                log.warning("the agent went away, waiting for it")
                give_up, pause = time.monotonic() + patience, FIRST_PAUSE
            except OSError as error:
                if time.monotonic() > give_up:
                    raise Unavailable("agent", f"no agent at {path}: {error}") from error
            if signals.stopping:
                return 128 + signals.stopping
            signals.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _converse(
    connection: socket.socket,
    job: str,
    token: str,
    on_progress: Callable[[protocol.ProgressMessage | protocol.EndMessage], None],
) -> int | None:
    """The exit status, or None if the agent went away or asks to be asked again."""
    protocol.send(connection, protocol.RunMessage(job=job, token=token))
    try:
        for message in protocol.receive(connection):
            if isinstance(message, protocol.ProgressMessage):
                on_progress(message)
            elif isinstance(message, protocol.EndMessage):
                on_progress(message)
                return message.exit_code
            elif isinstance(message, protocol.ErrorMessage):
                if message.retry:
                    log.warning("%s", message.message)
                    return None
                raise Refused(message.message)
    except (ConnectionError, InvalidRequest) as error:
        log.warning("%s", error)
    return None


class _Signals:
    """Takes the signals that are passed on, for as long as its context lasts."""

    def __init__(self) -> None:
        self.stopping = 0
        self._connection: socket.socket | None = None
        self._old: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> _Signals:
        self._old = {number: signal.signal(number, self._handle) for number in FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @contextmanager
    def forwarded_to(self, connection: socket.socket) -> Iterator[None]:
        """Pass signals on to this connection."""
        self._connection = connection
        try:
            yield
        finally:
            self._connection = None

    def wait(self, seconds: float) -> None:
        """Wait, but not past a signal."""
        if not self.stopping:
            select.select([], [], [], seconds)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            self.stopping = number
        if self._connection is not None:
            try:
                protocol.send(self._connection, protocol.SignalMessage(number=number))
            except OSError:
                log.info("signal %d could not be passed on", number)
