"""UML's management console: one datagram out, one or more back.

The protocol is that of ``arch/um/drivers/mconsole.h``, version 2.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vmjobs.errors import HypervisorError, reason_of

_MAGIC = 0xCAFEBABE
_VERSION = 2
_CLONE_FS = 0x200
_MAX_DATA = 512
#: More than the answer to any of our commands has.
_MOST_PARTS = 256
_REQUEST = struct.Struct(f"=III{_MAX_DATA}s")
_REPLY = struct.Struct("=III")


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a path of a Unix socket of at most 107 bytes, however deep it lies."""
    with _directory(path.parent) as directory:
        yield f"/proc/self/fd/{directory}/{path.name}"


def command(pid: int, name: str, words: str, timeout: float, *, already: str = "") -> str:
    """Send a command to a VM's console; return the answer's text.

    name, pid: of the VM and of its kernel. already: the refusal if the wanted state holds already.

    Raises:
        HypervisorError: the kernel does not listen, refused the command, or did not answer within
            ``timeout`` seconds.
    """
    data = words.encode()
    request = _REQUEST.pack(_MAGIC, _VERSION, len(data), data)
    deadline = time.monotonic() + timeout
    try:
        with (
            _directory(Path(f"/proc/{pid}/cwd")) as home,
            _console(home, name) as address,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer,
            _address(peer, pid, home),
        ):
            peer.settimeout(timeout)
            peer.sendto(request, address)
            return _answer(peer, deadline, words, already)
    except OSError as error:
        raise HypervisorError(
            f"the guest kernel does not answer to '{words}': {reason_of(error)}"
        ) from error


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _console(home: int, name: str) -> Iterator[str]:
    """Yield the path of a VM's console, in its kernel's working directory.

    The guest may control that directory. No link there is followed, so that none leads to another
    VM's console, or out of a sandbox.
    """
    own = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=home)
    try:
        console = os.open("mconsole", os.O_PATH | os.O_NOFOLLOW, dir_fd=own)
    finally:
        os.close(own)
    try:
        if not stat.S_ISSOCK(os.fstat(console).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        yield f"/proc/self/fd/{console}"
    finally:
        os.close(console)


@contextmanager
def _address(peer: socket.socket, pid: int, home: int) -> Iterator[None]:
    """Bind a socket to an abstract name that the node's kernel chooses, for the answer.

    A UML kernel in another network namespace cannot reach that: it gets a file in its own directory.
    """
    if Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        peer.bind("")
        yield
        return
    name = f"answer-{secrets.token_hex(8)}"
    _bind_in(home, peer, name)
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(name, dir_fd=home)


def _bind_in(directory: int, peer: socket.socket, name: str) -> None:
    """Bind a socket to a file name alone, which the peer resolves in its own directory.

    This needs a thread whose working directory is ``directory``, separate from all other threads'.
    """
    failed: list[OSError] = []

    def bind() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_FS):
                number = ctypes.get_errno()
                raise OSError(number, f"unshare: {os.strerror(number)}")
            os.fchdir(directory)
            peer.bind(name)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=bind, name="mconsole")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _answer(peer: socket.socket, deadline: float, words: str, already: str) -> str:
    parts: list[bytes] = []
    while True:
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        reply = peer.recv(_REPLY.size + _MAX_DATA)
        if len(reply) < _REPLY.size:
            raise HypervisorError(f"the guest kernel's answer to '{words}' is cut short")
        failed, more, length = _REPLY.unpack_from(reply)
        parts.append(reply[_REPLY.size : _REPLY.size + length])
        if len(parts) > _MOST_PARTS:
            raise HypervisorError(f"the guest kernel's answer to '{words}' is too long")
        if not more:
            text = b"".join(parts).rstrip(b"\0").decode("utf-8", "replace")
            if failed and not (already and text == already):
                raise HypervisorError(f"the guest kernel refused '{words}': {text}")
            return text
