"""nbdkit plugin for a root disk that is incomplete on this node (docs/lazy-start.md).

nbdkit runs it in the system's Python, so it needs only the standard library. It never fetches
anything: before it reads the disk's file it asks the agent, over a Unix socket::

    on connecting     size of the disk (u64, big-endian), with a descriptor of the file
    request           offset (u64), length (u32): the bytes about to be read
    answer            1 byte: 0 they are unavailable, 1 they are present, 2 the whole disk is present

Concurrent requests take several connections. The first connection carries none: when it ends, the
agent no longer fetches the disk, and this process ends at once, even during reads. nbdkit's interface
requires module state.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import threading
from contextlib import suppress

try:
    import nbdkit  # type: ignore[import-not-found]
except ImportError:  # imported outside of nbdkit
    nbdkit = None

API_VERSION = 2
HEADER = struct.Struct(">Q")
REQUEST = struct.Struct(">QI")
UNAVAILABLE, PRESENT, COMPLETE = b"\0", b"\1", b"\2"
#: Bytes per flag of the map of present chunks.
CHUNK_BYTES = 64 * 1024


class LazyDiskReader:
    """The disk: its file, and the connections to the agent that fetches it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._complete = False
        self._first, self.size, self._file = self._connect()
        self._present = bytearray(-(-self.size // CHUNK_BYTES))

    def wait_for_end(self) -> None:
        """Return when the agent no longer fetches the disk."""
        while self._first.recv(1):
            pass

    def read(self, buffer: bytearray, offset: int) -> None:
        """Fill the buffer with the disk's bytes from ``offset``. Raises OSError."""
        self._ensure_present(offset, len(buffer))
        view = memoryview(buffer)
        while view:
            count = os.preadv(self._file, [view], offset)
            if count == 0:
                raise OSError(errno.EIO, "the disk's file is too short")
            view, offset = view[count:], offset + count

    def _ensure_present(self, offset: int, length: int) -> None:
        chunks = range(offset // CHUNK_BYTES, -(-(offset + length) // CHUNK_BYTES))
        if self._complete or all(self._present[chunk] for chunk in chunks):
            return
        answer = self._ask(REQUEST.pack(offset, length))
        if answer not in {PRESENT, COMPLETE}:
            raise OSError(errno.EIO, "the image's data is unavailable")
        self._complete = answer == COMPLETE
        # Chunks arrive whole, so a requested part means that all of its chunk is present.
        for chunk in chunks:
            self._present[chunk] = 1

    def _ask(self, request: bytes) -> bytes:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection, _, spare = self._connect()
            os.close(spare)
        connection.sendall(request)
        answer = connection.recv(1)
        with self._lock:
            self._idle.append(connection)
        return answer

    def _connect(self) -> tuple[socket.socket, int, int]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self._path)
        head, descriptors, _, _ = socket.recv_fds(connection, HEADER.size, 1)
        if len(head) != HEADER.size or len(descriptors) != 1:
            raise OSError(errno.EIO, "the agent does not answer as expected")
        return connection, HEADER.unpack(head)[0], descriptors[0]


# --------------------------------------------------------------------------- what nbdkit calls

_config: dict[str, str] = {}
_disks: list[LazyDiskReader] = []


def config(key: str, value: str) -> None:
    """``ask=SOCKET``; ``ready=FD``: report readiness; ``machine=NAME``: its VM."""
    _config[key] = value


def config_complete() -> None:
    """Check the settings, once all are known."""
    if not {"ask", "ready"} <= set(_config):
        raise ValueError("ask=SOCKET or ready=FD is missing")


def thread_model() -> int:
    """Serve reads in parallel: one that waits must not delay the others."""
    model: int = nbdkit.THREAD_MODEL_PARALLEL
    return model


def after_fork() -> None:
    """Connect to the agent, then report that the server is ready."""
    _disks.append(LazyDiskReader(_config["ask"]))
    threading.Thread(target=_exit_with_agent, args=(_disks[0],), daemon=True).start()
    ready = int(_config["ready"])
    os.write(ready, b"ready\n")
    os.close(ready)


def _exit_with_agent(disk: LazyDiskReader) -> None:
    with suppress(OSError):
        disk.wait_for_end()
    # A normal exit of nbdkit would wait for its clients.
    os.kill(os.getpid(), signal.SIGKILL)


def open(readonly: bool) -> LazyDiskReader:
    """Handle a client's connection."""
    return _disks[0]


def can_multi_conn(_handle: LazyDiskReader) -> bool:
    """Allow several connections: all clients see the same data."""
    return True


def get_size(handle: LazyDiskReader) -> int:
    """Return the disk's size in bytes."""
    return handle.size


def pread(handle: LazyDiskReader, buffer: bytearray, offset: int, _flags: int) -> None:
    """Read from the disk."""
    try:
        handle.read(buffer, offset)
    except OSError:
        nbdkit.set_error(errno.EIO)
        raise
