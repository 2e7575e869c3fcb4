"""Control socket of a gateway's supervisor: a Unix socket, one line of JSON each way.

Only the operator's own processes reach it, because its directory is closed to other users. When a
connection ends, the supervisor thaws the VMs that it froze.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vmjobs.closeable import Closeable
from vmjobs.errors import Unavailable, VMJobsError, reason_of
from vmjobs.hypervisor.uml.mconsole import short_path

log = logging.getLogger(__name__)

Message = dict[str, Any]
MAX_LINE_BYTES = 1024 * 1024
#: Timeout for an answer in seconds, besides the time that the supervisor is asked to wait.
ANSWER_SECONDS = 120.0


class SupervisorClient(Closeable):
    """A connection to a supervisor. Raises ``Unavailable("agent", …)`` if none runs."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(path) as address:
                self._socket.connect(address)
        except OSError as error:
            self._socket.close()
            raise Unavailable("agent", "no supervisor runs for this gateway") from error
        self._socket.settimeout(ANSWER_SECONDS)
        self._file = self._socket.makefile("rb")

    def ask(self, do: str, **fields: object) -> Message:
        return self._ask({"do": do, **fields}, lambda: self._file.readline(MAX_LINE_BYTES))

    def log_in(self, vm: str, key: str) -> tuple[str, socket.socket]:
        """Open an SSH connection to a VM that accepts ``key``; returns its host key, too."""
        handles: list[int] = []

        def read() -> bytes:
            line, some, _, _ = socket.recv_fds(self._socket, MAX_LINE_BYTES, 1)
            handles.extend(some)
            return line

        answer = self._ask({"do": "log in", "machine": vm, "key": key}, read)
        if not handles:
            raise Unavailable("agent", "the supervisor closed the connection")
        return str(answer["host_key"]), socket.socket(fileno=handles[0])

    def _ask(self, asked: Message, read: Callable[[], bytes]) -> Message:
        try:
            self._socket.sendall(json.dumps(asked).encode() + b"\n")
            line = read()
        except OSError as error:
            raise Unavailable("agent", f"the supervisor does not answer: {reason_of(error)}") from error
        if not line.endswith(b"\n"):
            raise Unavailable("agent", "the supervisor closed the connection")
        answer: Message = json.loads(line)
        if "error" in answer:
            raise Unavailable("agent", str(answer["error"]))
        return answer

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@contextmanager
def serve_commands(
    path: Path, handle: Callable[[Message], Message], thaw: Callable[[], object]
) -> Iterator[None]:
    """Serve requests while the context lasts.

    handle: takes a request, returns the answer; a ``connection`` in it is a socket to pass on.
    thaw: called when a connection ends after ``freeze`` without ``thaw``.
    """
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, short_path(path) as address:
        listener.bind(address)
        path.chmod(0o600)
        listener.listen(16)
        threading.Thread(target=_accept, args=(listener, handle, thaw), daemon=True).start()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _accept(
    listener: socket.socket, handle: Callable[[Message], Message], thaw: Callable[[], object]
) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(peer, handle, thaw), daemon=True).start()


def _serve(
    peer: socket.socket, handle: Callable[[Message], Message], thaw: Callable[[], object]
) -> None:
    is_frozen = False
    with peer, peer.makefile("rb") as file, suppress(OSError, ValueError):
        while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            asked: Message = json.loads(line)
            if asked.get("do") == "freeze":
                is_frozen = True
            answer = _answer(handle, asked)
            if asked.get("do") == "thaw":
                is_frozen = False
            connection = answer.pop("connection", None)
            said = json.dumps(answer).encode() + b"\n"
            if connection is None:
                peer.sendall(said)
                continue
            with connection:
                socket.send_fds(peer, [said], [connection.fileno()])
    if is_frozen:
        thaw()


def _answer(handle: Callable[[Message], Message], asked: Message) -> Message:
    try:
        return handle(asked)
    except (VMJobsError, OSError) as error:
        return {"error": str(error)}
    except Exception as error:  # the client must get an answer in any case
        log.exception("request %s failed", asked.get("do"))
        return {"error": f"the supervisor failed: {type(error).__name__}"}
