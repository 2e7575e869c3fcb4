"""Login sessions: their waiting requests, and bytes in transit. In memory, without I/O.

All of a service's sessions are in one :class:`SessionHub`, in one of its processes; the others reach it
through :mod:`api.session_link`. No part of a session is ever written to disk: when that process ends,
its sessions end and leave nothing.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from vmjobs.cluster.session import MAX_WAITING, SessionAnswer, SessionCall
from vmjobs.errors import Conflict, SessionOver, Unavailable

#: Sessions at a time. Each has two waiting requests, which occupy a thread each.
MAX_SESSIONS: Final = 8
#: Seconds without any request of a side, after which the side counts as gone.
SILENT_SECONDS: Final = 20.0
#: Seconds for a side, after the other one has left, to receive the rest and to leave as well.
LEAVING_SECONDS: Final = 60.0
#: Seconds for which an ended session is kept, so that both sides learn why it ended.
REMEMBERED_SECONDS: Final = 60.0
#: Seconds between checks for silent sides, while there are sessions.
LOOK_EVERY: Final = 1.0


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

    call: SessionCall
    who: dict[Side, str]
    answer: SessionAnswer | None = None
    over: str | None = None
    pipes: dict[Side, _Pipe] = field(default_factory=lambda: {side: _Pipe() for side in Side})
    heard: dict[Side, float] = field(default_factory=dict)
    #: Waiting requests of a side: while there are any, it is not silent.
    present: dict[Side, int] = field(default_factory=lambda: dict.fromkeys(Side, 0))
    #: Sides that have left, with the time.
    left: dict[Side, float] = field(default_factory=dict)


class Hub:
    """All sessions of a service. Safe to use from several threads. clock: for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, _Session] = {}
        self._changed = threading.Condition()
        self._looking = False

    # ------------------------------------------------------------------ beginning and end

    def open(self, operator: str, node: str, member: str, incarnation: int, key: str) -> str:
        """Open a session, which waits for its node; return its id.

        Raises:
            Unavailable: there are too many.
        """
        with self._changed:
            if sum(session.over is None for session in self._sessions.values()) >= MAX_SESSIONS:
                raise Unavailable(
                    "api",
                    f"{MAX_SESSIONS} users are logged in to VMs already",
                    hint="try again after one of them has logged out",
                )
            call = SessionCall(
                id=secrets.token_hex(16), member=member, incarnation=incarnation, key=key
            )
            session = _Session(call, {Side.OPERATOR: operator, Side.NODE: node})
            session.heard = dict.fromkeys(Side, self._clock())
            self._sessions[call.id] = session
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="sessions", daemon=True).start()
            return call.id

    def calls(self, node: str) -> list[SessionCall]:
        """Return the sessions that wait for a node's answer."""
        with self._changed:
            return [
                session.call
                for session in self._sessions.values()
                if session.who[Side.NODE] == node and session.answer is None and session.over is None
            ]

    def answer(self, node: str, session_id: str, answer: SessionAnswer) -> None:
        """Record the node's answer. Repeating it is no error.  Raises SessionOver."""
        with self._changed:
            session = self._live(session_id, Side.NODE, node)
            if session.answer not in {None, answer}:
                raise Conflict("the session has another answer already")
            session.answer = answer
            self._changed.notify_all()

    def await_answer(self, operator: str, session_id: str, seconds: float) -> SessionAnswer | None:
        """Wait for the node's answer; None: none came in time.  Raises SessionOver."""
        with self._changed, _Presence(self, self._live(session_id, Side.OPERATOR, operator)) as session:
            self._changed.wait_for(lambda: session.answer or session.over is not None, seconds)
            _require_live(session)
            return session.answer

    def close(self, side: Side, who: str, session_id: str) -> None:
        """Let a side leave. The other side may still read what it has sent before."""
        with self._changed:
            session = self._sessions.get(session_id)
            if session is None or session.who[side] != who or session.over is not None:
                return
            session.left.setdefault(side, self._clock())
            session.pipes[side].ended = True
            if len(session.left) == len(Side) or session.answer is None or session.answer.refused:
                self._end(session, f"its {side} has left")
            self._changed.notify_all()

    # ------------------------------------------------------------------ bytes

    def send(
        self, side: Side, who: str, session_id: str, offset: int, data: bytes, end: bool, wait: float
    ) -> int:
        """Accept bytes from a side, waiting for buffer space; return the next offset.

        Raises:
            SessionOver.
            Conflict: ``offset`` is beyond what was sent before.
        """
        with self._changed, _Presence(self, self._live(session_id, side, who), side) as session:
            pipe = session.pipes[side]
            _require_reader(session, side.other)
            if offset > pipe.end:
                raise Conflict(f"the next offset is {pipe.end}")
            if data[pipe.end - offset :]:
                self._changed.wait_for(
                    lambda: (
                        len(pipe.data) < MAX_WAITING or session.over is not None or bool(session.left)
                    ),
                    wait,
                )
                _require_reader(session, side.other)
                fresh = data[pipe.end - offset :]  # a repeated call may have sent some of it
                taken = fresh[: max(0, MAX_WAITING - len(pipe.data))]
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
            SessionOver.
            Conflict: bytes at ``offset`` are discarded already, or not sent yet.
        """
        with self._changed, _Presence(self, self._live(session_id, side, who), side) as session:
            pipe = session.pipes[side.other]
            if not pipe.start <= offset <= pipe.end:
                raise Conflict(f"available are bytes {pipe.start} to {pipe.end}")
            if offset > pipe.start:
                del pipe.data[: offset - pipe.start]
                pipe.start = offset
                self._changed.notify_all()
            self._changed.wait_for(lambda: pipe.data or pipe.ended or session.over is not None, wait)
            if not pipe.data and not pipe.ended:
                _require_live(session)
            if pipe.start > offset:  # another request received them meanwhile
                raise Conflict(f"available are bytes {pipe.start} to {pipe.end}")
            data = bytes(pipe.data[:most])
            ended = pipe.ended and len(data) == len(pipe.data)
            return data, ended

    # ------------------------------------------------------------------ inside

    def note(self, session: _Session, side: Side) -> None:
        """Record a side's contact."""
        session.heard[side] = self._clock()

    def _live(self, session_id: str, side: Side, who: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None or session.who[side] != who:
            raise SessionOver("no such session, or it has ended")
        _require_live(session)
        if side in session.left:
            raise SessionOver(f"the session is over: its {side} has left")
        self.note(session, side)
        return session

    def _end(self, session: _Session, why: str) -> None:
        session.over = why
        session.heard = dict.fromkeys(Side, self._clock())
        for pipe in session.pipes.values():
            pipe.data.clear()
        self._changed.notify_all()

    def _look(self) -> None:
        while True:
            with self._changed:
                if not self.sweep():
                    self._looking = False
                    return
            time.sleep(LOOK_EVERY)

    def sweep(self) -> int:
        """End sessions with a silent side, remove ended ones; return the count left."""
        with self._changed:
            present = self._clock()
            for session_id, session in list(self._sessions.items()):
                if session.over is not None:
                    if present - session.heard[Side.NODE] > REMEMBERED_SECONDS:
                        del self._sessions[session_id]
                    continue
                for side in set(Side) - session.left.keys():
                    # A node makes no requests before its answer.
                    waits = session.present[side] or (side is Side.NODE and session.answer is None)
                    if not waits and present - session.heard[side] > SILENT_SECONDS:
                        self._end(session, f"its {side} made no request for {SILENT_SECONDS:.0f} s")
                        break
                    if present - session.left.get(side.other, present) > LEAVING_SECONDS:
                        self._end(session, f"its {side.other} has left")
                        break
            return len(self._sessions)


class _Presence:
    """Marks a side as present during one of its requests. Used under the hub's lock."""

    def __init__(self, hub: Hub, session: _Session, side: Side = Side.OPERATOR) -> None:
        self._hub, self._session, self._side = hub, session, side

    def __enter__(self) -> _Session:
        self._session.present[self._side] += 1
        return self._session

    def __exit__(self, *_: object) -> None:
        self._session.present[self._side] -= 1
        self._hub.note(self._session, self._side)


def _require_reader(session: _Session, reader: Side) -> None:
    _require_live(session)
    if reader in session.left:
        raise SessionOver(f"the session is over: its {reader} has left")


def _require_live(session: _Session) -> None:
    if session.over is not None:
        raise SessionOver(f"the session is over: {session.over}")
