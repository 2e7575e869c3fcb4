"""The state that the guest endpoint and a run share: token, signals, last request."""

from __future__ import annotations

import hashlib
import hmac
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vmjobs.agent.vm.events import EventSink, GuestReady

#: Seconds for an answer to reach its guest. A guest that got a 503 asks again after two seconds.
QUIET_SECONDS = 0.5

CONTROL = "/v1/control"
RENEWAL = "/v1/renewal"
OTHER_GUEST = "this endpoint belongs to another guest"


class SignalQueue:
    """Signals for a guest, kept until it acknowledges them, as an answer may be lost.

    A guest counts the signals it has delivered in its whole life, across restarts of the agent. So only
    the difference of two counts has a meaning.
    """

    def __init__(self) -> None:
        #: Signals that are not acknowledged.
        self.pending: list[int] = []
        self._sent = 0
        self._delivered: int | None = None

    def add(self, number: int) -> None:
        """Add a signal, unless it already waits to be sent."""
        if number not in self.pending[self._sent :]:
            self.pending.append(number)

    def acknowledge(self, done: int | None) -> None:
        """Note how many signals the guest has delivered; None: it does not count."""
        if done is None:
            return
        fresh = 0 if self._delivered is None else done - self._delivered
        if 0 < fresh <= self._sent:
            del self.pending[:fresh]
            self._sent -= fresh
        self._delivered = done

    def take_pending(self, *, is_acknowledged: bool) -> list[int]:
        """Return the signals to send. is_acknowledged: the guest acknowledges signals."""
        sent = list(self.pending)
        self._sent = len(sent)
        if not is_acknowledged:
            self.pending, self._sent = [], 0
        return sent


@dataclass
class GuestSession:
    """The state that the guest endpoint and the run share about one guest.

    logs: files for ``out`` and ``err``; ``max_log`` bytes are kept of each.
    on_log: called after a log has grown.
    on_output: takes the script's output in place of logs, for a cluster VM, which runs for months. Its
        output is lost while no agent runs.
    pool_token: for a cluster VM: returns its token for the pool.
    former: SHA-256 of the token that a resumed guest still has, or ``""``. With it the guest can only
        get the new token; it becomes invalid once the guest uses the new one.
    longest_wait: the most seconds that a request for signals may wait.
    has_heartbeat: the guest has begun to ask for signals, which is its heartbeat.
    lost: why this node could not store the latest data of ``out`` or ``err``.
    """

    token: str
    event_queue: EventSink
    logs: dict[str, Path]
    max_log: int
    on_log: Callable[[], None] = lambda: None
    on_output: Callable[[bytes], None] | None = None
    pool_token: Callable[[], str] | None = None
    former: str = ""
    longest_wait: float = math.inf
    heard: float = field(default_factory=time.monotonic)
    signals: SignalQueue = field(default_factory=SignalQueue)
    has_heartbeat: bool = False
    lost: dict[str, OSError] = field(default_factory=dict)
    closed: bool = False
    output_end: dict[str, int] = field(default_factory=dict)
    writing: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: All requests get "try again"; and whether a request for signals has got it.
    is_quiesced: bool = False
    _turned_away: bool = False
    #: When the last request came, in monotonic seconds.
    _last_request: float = 0.0
    #: Number of requests in progress.
    _in_progress: int = 0
    #: Callbacks that wake the requests that wait for signals.
    _waiting: list[Callable[[], object]] = field(default_factory=list)

    def accepts(self, authorization: str) -> bool:
        """Whether a request with this header comes from the guest."""
        return self._is_current(authorization) or self._is_former(authorization)

    def _is_current(self, authorization: str) -> bool:
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode())

    def _is_former(self, authorization: str) -> bool:
        if not self.former:
            return False
        shown = authorization.removeprefix("Bearer ").encode()
        return hmac.compare_digest(hashlib.sha256(shown).hexdigest(), self.former)

    def begin(self, authorization: str, path: str) -> tuple[int, str] | None:
        """Begin a request. Return an answer, or None: handle it, then call :meth:`end`."""
        former = self._is_former(authorization)
        if not former and not self._is_current(authorization):
            return 401, OTHER_GUEST
        with self.changed:
            self._last_request = time.monotonic()
            if self.is_quiesced:
                self._turned_away = self._turned_away or path == CONTROL
                self.changed.notify_all()
                return 503, "this VM is about to be saved; try again"
            if former:
                renewal = f"{self.token} {int(time.time())}\n"
                return (200, renewal) if path == RENEWAL else (503, "take the new token first")
            renewed, self.former = bool(self.former), ""
            self._in_progress += 1
        self.heard = time.monotonic()
        if renewed:
            self.event_queue.put(GuestReady())
        return None

    def end(self) -> None:
        """End a request that :meth:`begin` let through."""
        with self.changed:
            self._in_progress -= 1
            self.changed.notify_all()

    def quiesce(self, timeout: float) -> bool:
        """Turn all requests away before the VM is saved; wait for pending answers.

        An answer that is in transit when the VM is saved is lost. So this waits until a request for
        signals has been turned away and no request has come for :data:`QUIET_SECONDS`. Returns false
        if a request is still in progress after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            self.is_quiesced, self._turned_away = True, not self.has_heartbeat
            self._wake()
            while (now := time.monotonic()) < deadline:
                if not self._turned_away or self._in_progress:
                    self.changed.wait(deadline - now)
                elif (quiet := now - self._last_request) < QUIET_SECONDS:
                    self.changed.wait(min(QUIET_SECONDS - quiet, deadline - now))
                else:
                    break
            return not self._in_progress

    def resume(self) -> None:
        """Answer requests again."""
        with self.changed:
            self.is_quiesced = False

    def send_signal(self, number: int) -> None:
        """Have the guest deliver a signal to the script."""
        with self.changed:
            self.signals.add(number)
            self._wake()

    def close(self) -> None:
        """Wake waiting requests, so that they end."""
        with self.changed:
            self.closed = True
            self._wake()

    def take_signals(self, done: int | None) -> list[int]:
        """Return the signals to deliver.

        done: how many the guest has delivered so far; None: each signal is sent once only.
        """
        with self.changed:
            self.signals.acknowledge(done)
            return self.signals.take_pending(is_acknowledged=done is not None)

    @contextmanager
    def on_signals(self, done: int | None, wake: Callable[[], object]) -> Iterator[None]:
        """Have ``wake`` called when waiting requests must end, while the context lasts.

        Any thread may call it. done: see :meth:`take_signals`.
        """
        with self.changed:
            self.signals.acknowledge(done)
            self._waiting.append(wake)
            self._wake()
        try:
            yield
        finally:
            with self.changed:
                self._waiting.remove(wake)

    def _wake(self) -> None:
        self.changed.notify_all()
        if self.signals.pending or self.closed or self.is_quiesced:
            for wake in self._waiting:
                wake()
