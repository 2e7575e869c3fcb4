"""Connects the service's processes to its one :class:`~api.session_hub.SessionHub`.

The first process that needs the hub runs it, and holds a lock, which the kernel releases however the
process ends. Then the next process that needs a hub starts an empty one. Each call is a connection to a
Unix socket with a request and an answer: a JSON object and bytes, each preceded by its length.
"""

from __future__ import annotations

import fcntl
import json
import logging
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from api.session_hub import SessionHub, Side
from vmjobs.cluster.ssh_session import MAX_PIECE_BYTES, PendingSession, SessionAnswer
from vmjobs.errors import Conflict, SessionEnded, Unavailable, VMJobsError
from vmjobs.hypervisor.uml.mconsole import short_path

log = logging.getLogger(__name__)

#: Seconds to find the hub, or to start it.
FIND_SECONDS: Final = 5.0
#: Seconds that the hub may take beyond the requested wait.
ANSWER_MARGIN_SECONDS: Final = 15.0
#: Seconds that a request waits for buffer space, and longest wait while too many requests wait.
BUFFER_WAIT_SECONDS: Final = 5.0
CROWDED_WAIT_SECONDS: Final = 0.1
_LENGTHS: Final = struct.Struct("!II")
_ERRORS: Final = (SessionEnded, Conflict)

_Words = dict[str, Any]


class SessionClient:
    """The service's sessions, usable in any of its processes.

    Methods raise as those of the hub, and ``Unavailable`` if they cannot reach it.

    directory: the service's own, for lock and socket. limit: requests that may wait at once, of the
    process's threads; further ones wait only a moment, and ask again.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._socket, self._lock = directory / "sessions.sock", directory / "sessions.lock"
        self._waiting = threading.BoundedSemaphore(limit)
        self._election_lock = threading.Lock()
        self._hub_lock: IO[bytes] | None = None

    def open(self, operator: str, node: str, member: str, incarnation: int, key: str) -> str:
        """See :meth:`SessionHub.open`."""
        words, _ = self._ask("open", [operator, node, member, incarnation, key])
        return str(words["id"])

    def calls(self, node: str) -> list[PendingSession]:
        """See :meth:`SessionHub.calls`. Without a hub no session waits."""
        if not self._socket.exists():
            return []
        try:
            words, _ = self._ask("calls", [node], may_start_hub=False)
        except Unavailable:
            return []
        return [PendingSession.model_validate(call) for call in words["calls"]]

    def answer(self, node: str, session: str, answer: SessionAnswer) -> None:
        """See :meth:`SessionHub.answer`."""
        self._ask("answer", [node, session, answer.model_dump(mode="json")])

    def await_answer(self, operator: str, session: str, seconds: float) -> SessionAnswer | None:
        """See :meth:`SessionHub.await_answer`."""
        words, _ = self._ask("await_answer", [operator, session, seconds], wait=seconds)
        found = words["answer"]
        return None if found is None else SessionAnswer.model_validate(found)

    def close(self, side: Side, who: str, session: str) -> None:
        """See :meth:`SessionHub.close`."""
        self._ask("close", [side, who, session])

    def send(self, side: Side, who: str, session: str, offset: int, data: bytes, end: bool) -> int:
        """See :meth:`SessionHub.send`."""
        with self._limited_wait(BUFFER_WAIT_SECONDS) as wait:
            words, _ = self._ask("send", [side, who, session, offset, end, wait], data, wait)
        return int(words["offset"])

    def receive(
        self, side: Side, who: str, session: str, offset: int, seconds: float
    ) -> tuple[bytes, bool]:
        """See :meth:`SessionHub.receive`."""
        with self._limited_wait(seconds) as wait:
            words, data = self._ask("receive", [side, who, session, offset, wait], wait=wait)
        return data, bool(words["ended"])

    @contextmanager
    def _limited_wait(self, wanted: float) -> Iterator[float]:
        """Limit the wait of a request, in seconds, if too many wait already."""
        long = wanted > CROWDED_WAIT_SECONDS and self._waiting.acquire(blocking=False)
        try:
            yield wanted if long else min(wanted, CROWDED_WAIT_SECONDS)
        finally:
            if long:
                self._waiting.release()

    # ------------------------------------------------------------------ a call

    def _ask(
        self,
        verb: str,
        words: list[Any],
        data: bytes = b"",
        wait: float = 0.0,
        may_start_hub: bool = True,
    ) -> tuple[_Words, bytes]:
        try:
            with self._connect(may_start_hub) as connection:
                connection.settimeout(wait + ANSWER_MARGIN_SECONDS)
                _write(connection, {"verb": verb, "words": words}, data)
                with connection.makefile("rb") as answers:
                    answer = _read(answers)
        except (OSError, ValueError) as error:
            raise Unavailable(
                "api", "the service process with the sessions has ended", hint="log in again"
            ) from error
        if answer is None:
            raise Unavailable("api", "the service process with the sessions has ended")
        found, body = answer
        if "error" in found:
            for kind in _ERRORS:
                if kind.code == found["error"]:
                    raise kind(found["message"], hint=found["hint"])
            raise Unavailable("api", found["message"], hint=found["hint"])
        return found, body

    def _connect(self, may_start_hub: bool) -> socket.socket:
        deadline = time.monotonic() + FIND_SECONDS
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                with short_path(self._socket) as address:
                    connection.connect(address)
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if not may_start_hub or time.monotonic() > deadline:
                    raise
            if not self._start_hub():
                time.sleep(0.02)  # the process that holds the lock is about to listen

    def _start_hub(self) -> bool:
        """Start the hub in this process, unless another one has it."""
        with self._election_lock:
            if self._hub_lock is not None:
                return True
            self._lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._lock.open("wb")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._socket.unlink(missing_ok=True)
            with short_path(self._socket) as address:
                server = _Server(address, _Handler)
            self._socket.chmod(0o600)
            threading.Thread(target=server.serve_forever, name="session-hub", daemon=True).start()
            self._hub_lock = lock
            return True


# --------------------------------------------------------------------------- the hub's process


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, handler: type[_Handler]) -> None:
        self.hub = SessionHub()
        super().__init__(address, handler)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Answer a request."""
        with suppress(OSError):
            asked = _read(self.rfile)
            if asked is None:
                return
            request, data = asked
            body = b""
            try:
                answer, body = _call(self.server.hub, request["verb"], request["words"], data)
            except VMJobsError as error:
                answer = {"error": error.code, "message": error.message, "hint": error.hint}
            _write(self.connection, answer, body)


def _call(hub: SessionHub, verb: str, words: list[Any], data: bytes) -> tuple[_Words, bytes]:
    """Call a method of the hub; return its result: an object for JSON, and bytes."""
    match verb, words:
        case "open", _:
            return {"id": hub.open(*words)}, b""
        case "calls", _:
            return {"calls": [call.model_dump(mode="json") for call in hub.calls(*words)]}, b""
        case "answer", [node, session, answer]:
            hub.answer(node, session, SessionAnswer.model_validate(answer))
        case "await_answer", _:
            found = hub.await_answer(*words)
            return {"answer": None if found is None else found.model_dump(mode="json")}, b""
        case "close", [side, who, session]:
            hub.close(Side(side), who, session)
        case "send", [side, who, session, offset, end, wait]:
            return {"offset": hub.send(Side(side), who, session, offset, data, end, wait)}, b""
        case "receive", [side, who, session, offset, wait]:
            piece, ended = hub.receive(Side(side), who, session, offset, MAX_PIECE_BYTES, wait)
            return {"ended": ended}, piece
        case _:
            raise ValueError(f"the session hub has no call {verb} with {len(words)} arguments")
    return {}, b""


def _write(connection: socket.socket, words: _Words, data: bytes) -> None:
    head = json.dumps(words).encode()
    connection.sendall(_LENGTHS.pack(len(head), len(data)) + head + data)


def _read(source: Any) -> tuple[_Words, bytes] | None:
    lengths = source.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head, body = _LENGTHS.unpack(lengths)
    words, data = source.read(head), source.read(body)
    if len(words) < head or len(data) < body:
        return None
    return json.loads(words), data
