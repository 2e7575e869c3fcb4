"""The agent's socket: accepts connections and serves each in a thread."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vmjobs.agent.background import start_thread
from vmjobs.errors import ConfigError

log = logging.getLogger(__name__)

BACKLOG = 128
#: Longest path that fits into ``sun_path`` (unix(7)).
MAX_SOCKET_PATH_BYTES = 107


@contextmanager
def listening(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """Accept connections at ``path``, each in a separate thread, while the context lasts.

    Raises:
        ConfigError: the path is too long for a socket, or another agent listens there.
    """
    if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"socket: {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes")
    _clear_stale(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o666)  # the peer's credentials and its token decide what a client may do
        listener.listen(BACKLOG)
        start_thread("accept", _accept, listener, serve)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if listener.fileno() == -1:
                return
            log.error("cannot accept a connection: %s", error)
            time.sleep(0.1)  # for example too many open files; no event signals the end of that
            continue
        try:
            start_thread("run", serve, connection)
        except RuntimeError as error:
            log.error("cannot serve a connection: %s", error)
            connection.close()
            time.sleep(0.1)  # too many threads: the same


def _clear_stale(path: Path) -> None:
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"socket: another agent listens at {path}")
