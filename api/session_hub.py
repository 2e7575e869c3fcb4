"""Login sessions: their waiting requests, and bytes in transit. In memory, without I/O.

All of a service's sessions are in one :class:`SessionHub`, in one of its processes; the others reach it
through :mod:`api.session_link`. No part of a session is ever written to disk: when that process ends,
its sessions end and leave nothing.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from vmjobs.cluster.ssh_session import MAX_PENDING_BYTES, PendingSession, SessionAnswer
from vmjobs.errors import Conflict, SessionEnded, Unavailable

#: Sessions at a time. Each has two waiting requests, which occupy a thread each.
MAX_SESSIONS: Final = 8
#: Seconds without any request of a side, after which the side counts as gone.
SILENT_SECONDS: Final = 20.0
#: Seconds for a side, after the other one has left, to receive the rest and to leave as well.
LEAVING_SECONDS: Final = 60.0
#: Seconds for which an ended session is kept, so that both sides learn why it ended.
REMEMBERED_SECONDS: Final = 60.0
#: Seconds between checks for silent sides, while there are sessions.
SWEEP_SECONDS: Final = 1.0


class Side(StrEnum):
    """The side that makes a request. Each side receives what the other sends."""

    OPERATOR = "operator"
    NODE = "node"

    @property
    def other(self) -> Side:
        """The opposite side."""
        return Side.NODE if self is Side.OPERATOR else Side.OPERATOR


@dataclass
class _Pipe:
    """Bytes in one direction that the reader has not confirmed. start: their offset."""

    start: int = 0
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.data)


@dataclass
class _Session:
    """who: operator and node. end_reason: why it has ended; None: it has not."""

    call: PendingSession
    who: dict[Side, str]
    answer: SessionAnswer | None = None
    end_reason: str | None = None
    pipes: dict[Side, _Pipe] = field(default_factory=lambda: {side: _Pipe() for side in Side})
    last_contact: dict[Side, float] = field(default_factory=dict)
    #: Waiting requests of a side: while there are any, it is not silent.
    present: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(Side, 0))
    #: Sides that have left, with the time.
    left_at: dict[Side, float] = field(default_factory=dict)


class SessionHub:
    """All sessions of a service. Safe to use from several threads. clock: for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        self._changed = threading.Condition()
        self._is_sweeping = False

    # ------------------------------------------------------------------ beginning and end

    def open(self, operator: str, node: str, vm: str, incarnation: int, key: str) -> str:
        """Open a session, which waits for its node; return its id.

        Raises:
            Unavailable: there are too many.
        """
        with self._changed:
            if sum(session.end_reason is None for session in self._sessions.values()) >= MAX_SESSIONS:
                raise Unavailable(
                    "api",
                    f"{MAX_SESSIONS} users are logged in to VMs already",
                    hint="try again after one of them has logged out",
                )
            call = PendingSession(id=secrets.token_hex(16), member=vm, incarnation=incarnation, key=key)
            session = _Session(call, {Side.OPERATOR: operator, Side.NODE: node})
            session.last_contact = dict.fromkeys(Side, self._clock())
            self._sessions[call.id] = session
            if not self._is_sweeping:
                self._is_sweeping = True
                threading.Thread(target=self._sweep_repeatedly, name="sessions", daemon=True).start()
            return call.id

    def calls(self, node: str) -> list[PendingSession]:
        """Return the sessions that wait for a node's answer."""
        with self._changed:
            return [
                session.call
                for session in self._sessions.values()
                if session.who[Side.NODE] == node
                and session.answer is None
                and session.end_reason is None
            ]

    def answer(self, node: str, session_id: str, answer: SessionAnswer) -> None:
        """Record the node's answer. Repeating it is no error.  Raises SessionEnded."""
        with self._changed:
            session = self._get_live(session_id, Side.NODE, node)
            if session.answer not in {None, answer}:
                raise Conflict("the session has another answer already")
            session.answer = answer
            self._changed.notify_all()

    def await_answer(self, operator: str, session_id: str, seconds: float) -> SessionAnswer | None:
        """Wait for the node's answer; None: none came in time.  Raises SessionEnded."""
        with self._request(Side.OPERATOR, operator, session_id) as session:
            self._changed.wait_for(lambda: session.answer or session.end_reason is not None, seconds)
            _require_live(session)
            return session.answer

    def close(self, side: Side, who: str, session_id: str) -> None:
        """Let a side leave. The other side may still read what it has sent before."""
        with self._changed:
            session = self._sessions.get(session_id)
            if session is None or session.who[side] != who or session.end_reason is not None:
                return
            session.left_at.setdefault(side, self._clock())
            session.pipes[side].ended = True
            if len(session.left_at) == len(Side) or session.answer is None or session.answer.refused:
                self._end_session(session, f"its {side} has left")
            self._changed.notify_all()

    # ------------------------------------------------------------------ bytes

    def send(
        self, side: Side, who: str, session_id: str, offset: int, end: bool, wait: float, data: bytes
    ) -> int:
        """Accept bytes from a side, waiting for buffer space; return the next offset.

        Raises:
            SessionEnded.
            Conflict: ``offset`` is beyond what was sent before.
        """
        with self._request(side, who, session_id) as session:
            pipe = session.pipes[side]
            _require_side(session, side.other)
            if offset > pipe.end:
                raise Conflict(f"the next offset is {pipe.end}")
            if data[pipe.end - offset :]:
                self._changed.wait_for(
                    lambda: (
                        len(pipe.data) < MAX_PENDING_BYTES
                        or session.end_reason is not None
                        or bool(session.left_at)
                    ),
                    wait,
                )
                _require_side(session, side.other)
                fresh = data[pipe.end - offset :]  # a repeated call may have sent some of it
                taken = fresh[: max(0, MAX_PENDING_BYTES - len(pipe.data))]
                pipe.data += taken
                end = end and len(taken) == len(fresh)
            pipe.ended = pipe.ended or end
            self._changed.notify_all()
            return pipe.end

    def receive(
        self, side: Side, who: str, session_id: str, offset: int, most: int, wait: float
    ) -> tuple[bytes, bool]:
        """Return the other side's bytes from ``offset``, and whether they are the last.

        Waits up to ``wait`` seconds for some. Bytes before ``offset`` count as received and are
        discarded.

        Raises:
            SessionEnded.
            Conflict: bytes at ``offset`` are discarded already, or not sent yet.
        """
        with self._request(side, who, session_id) as session:
            pipe = session.pipes[side.other]
            if not pipe.start <= offset <= pipe.end:
                raise Conflict(f"available are bytes {pipe.start} to {pipe.end}")
            if offset > pipe.start:
                del pipe.data[: offset - pipe.start]
                pipe.start = offset
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: pipe.data or pipe.ended or session.end_reason is not None, wait
            )
            if not pipe.data and not pipe.ended:
                _require_live(session)
            if pipe.start > offset:  # another request received them meanwhile
                raise Conflict(f"available are bytes {pipe.start} to {pipe.end}")
            data = bytes(pipe.data[:most])
            ended = pipe.ended and len(data) == len(pipe.data)
            return data, ended

    # ------------------------------------------------------------------ inside

    @contextmanager
    def _request(self, side: Side, who: str, session_id: str) -> Iterator[_Session]:
        """Hold the lock, and mark the side as present, during one of its requests."""
        with self._changed:
            session = self._get_live(session_id, side, who)
            session.present[side] += 1
            try:
                yield session
            finally:
                session.present[side] -= 1
                session.last_contact[side] = self._clock()

    def _get_live(self, session_id: str, side: Side, who: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or session.who[side] != who:
            raise SessionEnded("no such session, or it has ended")
        _require_side(session, side)
        session.last_contact[side] = self._clock()
        return session

    def _end_session(self, session: _Session, why: str) -> None:
        session.end_reason = why
        session.last_contact = dict.fromkeys(Side, self._clock())
        for pipe in session.pipes.values():
            pipe.data.clear()
        self._changed.notify_all()

    def _sweep_repeatedly(self) -> None:
        while True:
            with self._changed:
                if not self.sweep():
                    self._is_sweeping = False
                    return
            time.sleep(SWEEP_SECONDS)

    def sweep(self) -> int:
        """End sessions with a silent side, remove ended ones; return the count left."""
        with self._changed:
            present = self._clock()
            for session_id, session in list(self._sessions.items()):
                if session.end_reason is not None:
                    if present - session.last_contact[Side.NODE] > REMEMBERED_SECONDS:
                        del self._sessions[session_id]
                    continue
                for side in set(Side) - session.left_at.keys():
                    # A node makes no requests before its answer.
                    waits = session.present[side] or (side is Side.NODE and session.answer is None)
                    if not waits and present - session.last_contact[side] > SILENT_SECONDS:
                        self._end_session(
                            session, f"its {side} made no request for {SILENT_SECONDS:.0f} s"
                        )
                        break
                    if present - session.left_at.get(side.other, present) > LEAVING_SECONDS:
                        self._end_session(session, f"its {side.other} has left")
                        break
            return len(self._sessions)


def _require_side(session: _Session, side: Side) -> None:
    _require_live(session)
    if side in session.left_at:
        raise SessionEnded(f"the session is over: its {side} has left")


def _require_live(session: _Session) -> None:
    if session.end_reason is not None:
        raise SessionEnded(f"the session is over: {session.end_reason}")
