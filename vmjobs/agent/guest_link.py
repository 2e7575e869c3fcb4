"""What the endpoint and a run share about one guest: its token, its orders, when it was heard of."""

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

from vmjobs.agent.inbox import Observer, Ready

#: Seconds that an answer takes to its guest. One that was turned away asks again after two.
QUIET_SECONDS = 0.5

CONTROL = "/v1/control"
RENEWAL = "/v1/renewal"
NOT_YOURS = "this endpoint belongs to another guest"


class Orders:
    """Signals that a guest is to deliver, until it says that it has: an answer may be lost.

    A guest counts what it has delivered, over agents that come and go. So a count says something only
    beside the one before it.
    """

    def __init__(self) -> None:
        #: Not delivered yet, as far as is known.
        self.left: list[int] = []
        self._given = 0
        self._done: int | None = None

    def add(self, number: int) -> None:
        """Another one; once is enough where it waits already, and has not been told of."""
        if number not in self.left[self._given :]:
            self.left.append(number)

    def acknowledge(self, done: int | None) -> None:
        """The guest has delivered so many in its life; None: it is one that does not count."""
        if done is None:
            return
        fresh = 0 if self._done is None else done - self._done
        if 0 < fresh <= self._given:
            del self.left[:fresh]
            self._given -= fresh
        self._done = done

    def give(self, *, certain: bool) -> list[int]:
        """What to tell the guest. certain: it will be heard whether that arrived."""
        told = list(self.left)
        self._given = len(told)
        if not certain:
            self.left, self._given = [], 0
        return told


@dataclass
class GuestLink:
    """What the endpoint and the run share about one guest.

    logs: files for ``out`` and ``err``; ``max_log`` bytes are kept of each.
    on_log: called after a log has grown.
    on_words: takes what the script prints, in place of logs, of a guest that goes on for months. What
        it prints while no agent runs is lost.
    pool_token: for a machine of a cluster: its token for the pool.
    former: SHA-256 of the token that the guest of a resumed machine knows. It gets the new one for it,
        until it has used that, and nothing else; ``""``: there is none.
    longest_wait: that a request for orders may last, in seconds.
    beating: the guest has begun to ask for orders, and so is heard of from now on.
    lost: why this node could not keep what came last of ``out`` or ``err``.
    """

    token: str
    inbox: Observer
    logs: dict[str, Path]
    max_log: int
    on_log: Callable[[], None] = lambda: None
    on_words: Callable[[bytes], None] | None = None
    pool_token: Callable[[], str] | None = None
    former: str = ""
    longest_wait: float = math.inf
    heard: float = field(default_factory=time.monotonic)
    orders: Orders = field(default_factory=Orders)
    beating: bool = False
    lost: dict[str, OSError] = field(default_factory=dict)
    closed: bool = False
    words_end: dict[str, int] = field(default_factory=dict)
    writing: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: No request is answered but with "try again"; one for orders has been.
    hushed: bool = False
    _turned_away: bool = False
    #: When the last request came, in monotonic seconds.
    _asked: float = 0.0
    #: Requests that are being answered.
    _answering: int = 0
    #: What wakes those who wait for orders.
    _waiting: list[Callable[[], object]] = field(default_factory=list)

    def admits(self, authorization: str) -> bool:
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
        """A request begins: the status and text to answer at once; None: go on, and :meth:`end` it."""
        former = self._is_former(authorization)
        if not former and not self._is_current(authorization):
            return 401, NOT_YOURS
        with self.changed:
            self._asked = time.monotonic()
            if self.hushed:
                self._turned_away = self._turned_away or path == CONTROL
                self.changed.notify_all()
                return 503, "this machine is about to be saved; try again"
            if former:
                renewal = f"{self.token} {int(time.time())}\n"
                return (200, renewal) if path == RENEWAL else (503, "take the new token first")
            renewed, self.former = bool(self.former), ""
            self._answering += 1
        self.heard = time.monotonic()
        if renewed:
            self.inbox.put(Ready())
        return None

    def end(self) -> None:
        """A request that had begun is answered."""
        with self.changed:
            self._answering -= 1
            self.changed.notify_all()

    def hush(self, timeout: float) -> bool:
        """Answer nothing any more, so that what the guest was told is all that there is: for a machine
        that is to be saved. False: a request is still being answered after ``timeout`` seconds.

        An answer that is on its way when the machine is saved never comes. So this waits until a
        request for orders has been turned away, and no request has come for :data:`QUIET_SECONDS`.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            self.hushed, self._turned_away = True, not self.beating
            self._wake()
            while (now := time.monotonic()) < deadline:
                if not self._turned_away or self._answering:
                    self.changed.wait(deadline - now)
                elif (quiet := now - self._asked) < QUIET_SECONDS:
                    self.changed.wait(min(QUIET_SECONDS - quiet, deadline - now))
                else:
                    break
            return not self._answering

    def speak(self) -> None:
        """Go on answering."""
        with self.changed:
            self.hushed = False

    def send_signal(self, number: int) -> None:
        """Have the guest deliver a signal to the script."""
        with self.changed:
            self.orders.add(number)
            self._wake()

    def close(self) -> None:
        """Let waiting requests go."""
        with self.changed:
            self.closed = True
            self._wake()

    def take_signals(self, done: int | None) -> list[int]:
        """Signals to deliver.

        done: how many the guest has delivered so far. What it was told without it is not told again.
        """
        with self.changed:
            self.orders.acknowledge(done)
            return self.orders.give(certain=done is not None)

    @contextmanager
    def on_orders(self, done: int | None, wake: Callable[[], object]) -> Iterator[None]:
        """While the context lasts, ``wake`` is called, by any thread, when nothing is to be waited for.

        done: see :meth:`take_signals`.
        """
        with self.changed:
            self.orders.acknowledge(done)
            self._waiting.append(wake)
            self._wake()
        try:
            yield
        finally:
            with self.changed:
                self._waiting.remove(wake)

    def _wake(self) -> None:
        self.changed.notify_all()
        if self.orders.left or self.closed or self.hushed:
            for wake in self._waiting:
                wake()
