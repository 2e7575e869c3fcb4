"""UML's management console: one datagram out, one or more back.

The protocol is that of ``arch/um/drivers/mconsole.h``, version 2.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmjobs.errors import HypervisorError

_MAGIC = 0xCAFEBABE
_VERSION = 2
_MAX_DATA = 512
_REQUEST = struct.Struct(f"=III{_MAX_DATA}s")
_REPLY = struct.Struct("=III")


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """The path of a Unix socket in at most 107 bytes, however deep its directory lies."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def command(path: Path, words: str, timeout: float) -> str:
    """Send a command to the console at ``path``; the answer's text.

    Raises:
        HypervisorError: nobody listens there, the command was refused, or no answer came within
            ``timeout`` seconds.
    """
    data = words.encode()
    request = _REQUEST.pack(_MAGIC, _VERSION, len(data), data)
    deadline = time.monotonic() + timeout
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer, short_path(path) as address:
            peer.bind("")  # the kernel gives it an abstract name, to which the answer comes
            peer.settimeout(timeout)
            peer.sendto(request, address)
            return _answer(peer, deadline, words)
    except OSError as error:
        raise HypervisorError(f"the guest kernel does not answer to '{words}': {error}") from error


def _answer(peer: socket.socket, deadline: float, words: str) -> str:
    parts: list[bytes] = []
    while True:
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        reply = peer.recv(_REPLY.size + _MAX_DATA)
        if len(reply) < _REPLY.size:
            raise HypervisorError(f"the guest kernel's answer to '{words}' is cut short")
        failed, more, length = _REPLY.unpack_from(reply)
        parts.append(reply[_REPLY.size : _REPLY.size + length])
        if not more:
            text = b"".join(parts).rstrip(b"\0").decode("utf-8", "replace")
            if failed:
                raise HypervisorError(f"the guest kernel refused '{words}': {text}")
            return text
