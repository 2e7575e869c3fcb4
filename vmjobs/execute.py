"""``vmjobs exec``: the executable that HTCondor's starter runs, without any rights of its own.

It asks the agent to run a job, passes signals on, tells progress, and exits with the script's
status. Its connection is the lease. If the agent dies it waits for the next one and asks again:
that one has removed what was left of the first run before it listens.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

from vmjobs.agent import protocol
from vmjobs.errors import InvalidRequest, Unavailable, VMJobsError, reason_of
from vmjobs.model import GIVEN_BACK, JobState, ReasonCode

log = logging.getLogger(__name__)

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


class Refused(VMJobsError):
    """The agent, or the repository behind it, will not run this job."""

    code = "REFUSED"
    exit_code = 125


class Failed(VMJobsError):
    """This node has failed the job, and another may well not."""

    code = ReasonCode.NODE_FAILED.value


def run_job(
    path: Path,
    job: str,
    token: str,
    on_progress: Callable[[protocol.ProgressMessage | protocol.EndMessage], None],
    patience: float = 120.0,
    on_leave: Callable[[], object] = lambda: None,
) -> int:
    """Have the agent at ``path`` run ``job``; returns the exit status to exit with.

    on_leave: called before, if a signal said to stop.
    patience: seconds to wait for an agent that is not there (any more), or will not run the job now.

    Raises:
        Unavailable: no agent for longer than that; the job is to be run elsewhere.
        Failed: the node could not run the job; it is to be run elsewhere, too.
        Refused: the job was not taken, and would not be elsewhere.
    """
    with Signals() as signals:
        ended = insist(
            path,
            lambda connection, heard: _converse(connection, job, token, on_progress, heard, signals),
            signals,
            patience,
        )
        if signals.stopping:
            on_leave()
        return 128 + signals.stopping if ended is None else ended


def insist(
    path: Path,
    converse: Callable[[socket.socket, Callable[[], None]], T | None],
    signals: Signals,
    patience: float,
) -> T | None:
    """Talk with the agent at ``path`` until that comes to something; None: a signal said to stop.

    converse: takes a connection, and what to call whenever something is heard; returns None if the
        agent has to be asked again, or raises NotNow.
    patience: seconds to go on while nothing is heard.

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
                connection.connect(str(path))
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
        log.warning("%s; asking again in %.1f s", why, pause)
        signals.wait(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return None


def _converse(
    connection: socket.socket,
    job: str,
    token: str,
    on_progress: Callable[[protocol.ProgressMessage | protocol.EndMessage], None],
    heard: Callable[[], None],
    signals: Signals,
) -> int | None:
    """The exit status, or None if the job has to be asked for again."""
    protocol.send(connection, protocol.RunMessage(job=job, token=token))
    with signals.forwarded_to(partial(protocol.send, connection)):
        try:
            for message in protocol.receive(connection):
                if isinstance(message, protocol.ProgressMessage | protocol.EndMessage):
                    heard()
                if isinstance(message, protocol.ProgressMessage):
                    on_progress(message)
                elif isinstance(message, protocol.EndMessage):
                    on_progress(message)
                    given_back = message.report.state is JobState.PREEMPTED and not signals.stopping
                    if given_back and message.report.reason.code in GIVEN_BACK:
                        raise Failed(message.report.reason.message)
                    return None if given_back else message.exit_code
                elif isinstance(message, protocol.ErrorMessage):
                    if message.retry:
                        log.warning("%s", message.message)
                        return None
                    raise (Failed if message.code in GIVEN_BACK else Refused)(message.message)
        except (ConnectionError, InvalidRequest) as error:
            log.warning("%s", error)
    return None


class Signals:
    """Takes the signals that are passed on, for as long as its context lasts."""

    def __init__(self) -> None:
        self.stopping = 0
        self._came = threading.Event()
        self._send: Callable[[protocol.SignalMessage], object] | None = None
        self._old: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Signals:
        self._old = {number: signal.signal(number, self._handle) for number in FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    @contextmanager
    def forwarded_to(self, send: Callable[[protocol.SignalMessage], object]) -> Iterator[None]:
        """Pass signals on, one that came just before too.

        send: called at any point of what the main thread does.
        """
        self._send = send
        try:
            if self.stopping:
                send(protocol.SignalMessage(number=self.stopping))
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
                self._send(protocol.SignalMessage(number=number))
            except OSError:
                log.info("signal %d could not be passed on", number)
