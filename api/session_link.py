"""Connects the service's processes to its one :class:`~api.session_hub.SessionHub`.

The first process that needs the hub runs it, and holds a lock, which the kernel releases however the
process ends. Then the next process that needs a hub starts an empty one. Each call is a connection to a
Unix socket, with a line of JSON each way, of the method and its arguments, and of its result or error;
bytes follow the line.
"""

from __future__ import annotations

import fcntl
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, Final

from pydantic import validate_call
from pydantic_core import to_json

from api.session_hub import SessionHub, Side
from vmjobs.cluster.ssh_session import MAX_PIECE_BYTES, PendingSession, SessionAnswer
from vmjobs.errors import Conflict, SessionEnded, Unavailable, VMJobsError
from vmjobs.hypervisor.uml.mconsole import short_path

#: Seconds to find the hub, or to start it.
FIND_SECONDS: Final = 5.0
#: Seconds that the hub may take beyond the requested wait.
ANSWER_MARGIN_SECONDS: Final = 15.0
#: Seconds that a request waits for buffer space, and longest wait while too many requests wait.
BUFFER_WAIT_SECONDS: Final = 5.0
CROWDED_WAIT_SECONDS: Final = 0.1
_METHODS: Final = ("open", "calls", "answer", "await_answer", "close", "send", "receive")
_ERRORS: Final = {error.code: error for error in (SessionEnded, Conflict)}


class SessionClient:
    """The service's sessions, usable in any of its processes.

    Methods do and raise what those of the hub do; they raise ``Unavailable`` if they cannot reach it.

    directory: the service's own, for lock and socket. limit: requests that may wait at once, of the
    process's threads; further ones wait only a moment, and ask again.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._socket, self._lock = directory / "sessions.sock", directory / "sessions.lock"
        self._waiting = threading.BoundedSemaphore(limit)
        self._election_lock = threading.Lock()
        self._hub_lock: IO[bytes] | None = None

    def open(self, operator: str, node: str, vm: str, incarnation: int, key: str) -> str:
        return str(self._ask("open", operator, node, vm, incarnation, key))

    def calls(self, node: str) -> list[PendingSession]:
        """See :meth:`SessionHub.calls`. Without a hub no session waits."""
        if not self._socket.exists():
            return []
        try:
            found = self._ask("calls", node, may_start_hub=False)
        except Unavailable:
            return []
        return [PendingSession.model_validate(call) for call in found]

    def answer(self, node: str, session: str, answer: SessionAnswer) -> None:
        self._ask("answer", node, session, answer)

    def await_answer(self, operator: str, session: str, seconds: float) -> SessionAnswer | None:
        found = self._ask("await_answer", operator, session, seconds, wait=seconds)
        return None if found is None else SessionAnswer.model_validate(found)

    def close(self, side: Side, who: str, session: str) -> None:
        self._ask("close", side, who, session)

    def send(self, side: Side, who: str, session: str, offset: int, data: bytes, end: bool) -> int:
        with self._limited_wait(BUFFER_WAIT_SECONDS) as wait:
            return int(self._ask("send", side, who, session, offset, end, wait, data=data, wait=wait))

    def receive(
        self, side: Side, who: str, session: str, offset: int, seconds: float
    ) -> tuple[bytes, bool]:
        with self._limited_wait(seconds) as wait:
            arguments = (side, who, session, offset, MAX_PIECE_BYTES, wait)
            ended, data = self._ask("receive", *arguments, wait=wait)
        return data, ended

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
        method: str,
        *arguments: Any,
        data: bytes = b"",
        wait: float = 0.0,
        may_start_hub: bool = True,
    ) -> Any:
        """Call a method of the hub; return its result, parsed from JSON, and the bytes of ``receive``.

        data: the bytes of ``send``. wait: seconds that the method may wait.
        """
        try:
            with self._connect(may_start_hub) as connection:
                connection.settimeout(wait + ANSWER_MARGIN_SECONDS)
                connection.sendall(_message(data, method, arguments))
                with connection.makefile("rb") as answers:
                    data, result, error = _read(answers)
        except (OSError, ValueError) as failure:
            raise Unavailable(
                "api", "the service process with the sessions has ended", hint="log in again"
            ) from failure
        if error is None:
            return (result, data) if method == "receive" else result
        code, message, hint = error
        if code in _ERRORS:
            raise _ERRORS[code](message, hint=hint)
        raise Unavailable("api", message, hint=hint)

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
        hub = SessionHub()
        self.methods = {name: validate_call(getattr(hub, name)) for name in _METHODS}
        super().__init__(address, handler)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        with suppress(OSError):
            try:
                data, method, arguments = _read(self.rfile)
            except ValueError:
                return  # the client has ended
            found, result, error = b"", None, None
            try:
                if method == "send":
                    arguments.append(data)
                result = self.server.methods[method](*arguments)
                if method == "receive":
                    found, result = result
            except VMJobsError as failure:
                error = (failure.code, failure.message, failure.hint)
            self.wfile.write(_message(found, result, error))


def _message(data: bytes, *values: Any) -> bytes:
    return to_json((len(data), *values)) + b"\n" + data


def _read(source: BufferedIOBase) -> tuple[Any, ...]:
    """Return the bytes and the values of a message.  Raises ValueError if the peer ended early."""
    length, *values = json.loads(source.readline())
    data = source.read(length)
    if len(data) < length:
        raise ValueError("the message is incomplete")
    return data, *values
