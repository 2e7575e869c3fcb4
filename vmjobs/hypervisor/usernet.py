"""A guest's way out, in a process of its own and without any privilege.

::

    python -m vmjobs.hypervisor.usernet --machine NAME (--fd N | --listen PATH) …

Ethernet frames come from the machine, TCP connections go to the job's endpoint (a Unix socket)
and, in mode ``outbound``, to the world. A stack that a hostile guest talks to is no part of the
agent's process; and this one ends when the machine does.

Frames travel over ``--fd`` as datagrams (a SEQPACKET socket: UML), or over a stream socket made
at ``--listen``, each after its length in four bytes (QEMU's ``-netdev stream``).
"""

from __future__ import annotations

import argparse
import os
import resource
import select
import socket
import struct
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from vmjobs.hypervisor import slirp
from vmjobs.hypervisor.slirp import Settings, Stack

#: Frames kept for a guest that does not read; more are dropped, and TCP sends them again.
MAX_QUEUED = 2048
#: Frames taken from the guest in a row before its connections are looked after.
BATCH = 64
#: The longest Ethernet frame.
MAX_FRAME = 65536 + 18
#: Seconds that a hypervisor has to connect to ``--listen``.
CONNECT_SECONDS = 60.0
#: Longest name of a Unix socket, in bytes.
MAX_SOCKET_PATH = 107

_LENGTH = struct.Struct("!I")


class Link(Protocol):
    """The cable to the guest."""

    def fileno(self) -> int:
        """For poll."""

    def frames(self) -> list[bytes] | None:
        """Frames that have come, without waiting; ``None`` once the machine is gone."""

    def send(self, frame: bytes) -> None:
        """Send a frame now or later, or drop it."""

    def flush(self) -> bool:
        """Send what is queued as far as possible; whether something is left."""


class DatagramLink:
    """One frame, one datagram."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._queue: deque[bytes] = deque()
        self.fileno = sock.fileno

    def frames(self) -> list[bytes] | None:
        found: list[bytes] = []
        try:
            while len(found) < BATCH:
                frame = self._sock.recv(MAX_FRAME)
                if not frame:
                    return None
                found.append(frame)
        except BlockingIOError:
            pass
        except OSError:
            return None
        return found

    def send(self, frame: bytes) -> None:
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(frame)
            if len(self._queue) == 1:
                self.flush()

    def flush(self) -> bool:
        with suppress(OSError):  # full, or gone: reading will tell
            while self._queue:
                self._sock.send(self._queue[0])
                self._queue.popleft()
        return bool(self._queue)


class StreamLink:
    """Each frame after its length, as QEMU sends them."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self.fileno = sock.fileno

    def frames(self) -> list[bytes] | None:
        try:
            data = self._sock.recv(MAX_FRAME * 4)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._in += data
        found = []
        at = 0
        while len(self._in) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._in, at)
            if size > MAX_FRAME:
                return None
            end = at + _LENGTH.size + size
            if end > len(self._in):
                break
            found.append(bytes(self._in[at + _LENGTH.size : end]))
            at = end
        del self._in[:at]
        return found

    def send(self, frame: bytes) -> None:
        if len(self._out) < MAX_QUEUED * 1500:
            self._out += _LENGTH.pack(len(frame)) + frame

    def flush(self) -> bool:
        with suppress(OSError):
            while self._out:
                sent = self._sock.send(self._out)
                del self._out[:sent]
        return bool(self._out)


def serve(link: Link, stack: Stack) -> None:
    """Carry frames until the machine is gone."""
    while True:
        watched, timeout = stack.prepare()
        poller = select.poll()
        for fd, events in watched:
            poller.register(fd, events)
        waiting = link.flush()
        poller.register(link.fileno(), select.POLLIN | (select.POLLOUT if waiting else 0))
        happened = dict(poller.poll(timeout))
        if happened.pop(link.fileno(), 0) & ~select.POLLOUT:
            frames = link.frames()
            if frames is None:
                return
            for frame in frames:
                stack.receive(frame)
        stack.handle(happened)


def connect(fd: int | None, listen: Path | None) -> Link | None:
    """The cable's other end; ``None`` if no hypervisor ever came."""
    if fd is not None:
        return DatagramLink(socket.socket(fileno=fd))
    if listen is None:
        raise ValueError("one of fd and listen")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        address = _reachable(listen)
        server.bind(address)
        server.listen(1)
        server.settimeout(CONNECT_SECONDS)
        # Others reach the socket through this process, where its own name is too long.
        _say_ready(str(listen) if len(os.fsencode(listen)) <= MAX_SOCKET_PATH else _seen(address))
        with suppress(TimeoutError):
            return StreamLink(server.accept()[0])
    return None


def _reachable(path: Path) -> str:
    """A name for the socket that is short enough, however deep its directory lies.

    The directory stays open for the life of this process: its number is part of the name.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    return f"/proc/self/fd/{directory}/{path.name}"


def _seen(address: str) -> str:
    return address.replace("/self/", f"/{os.getpid()}/")


def _say_ready(address: str = "") -> None:
    sys.stdout.write(f"ready {address}\n")
    sys.stdout.flush()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vmjobs.hypervisor.usernet", description=__doc__)
    parser.add_argument("--machine", required=True, help="whose network this is")
    cable = parser.add_mutually_exclusive_group(required=True)
    cable.add_argument("--fd", type=int)
    cable.add_argument("--listen", type=Path)
    parser.add_argument("--mode", choices=["repository", "outbound"], required=True)
    parser.add_argument("--endpoint", type=Path, required=True, help="Unix socket")
    parser.add_argument("--endpoint-address", required=True)
    parser.add_argument("--endpoint-port", type=int, required=True)
    parser.add_argument("--network", required=True)
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--nameserver", required=True)
    parser.add_argument("--guest", required=True)
    parser.add_argument("--mtu", type=int, default=1500)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve one machine; 0 once it is gone."""
    options = _arguments(argv)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    slirp.version()  # fails early where there is no libslirp
    link = connect(options.fd, options.listen)
    if link is None:
        return 1
    settings = Settings(
        network=options.network,
        gateway=options.gateway,
        nameserver=options.nameserver,
        guest=options.guest,
        restricted=options.mode != "outbound",
        mtu=options.mtu,
    )
    stack = Stack(settings, link.send)
    try:
        stack.forward(options.endpoint_address, options.endpoint_port, _reachable(options.endpoint))
        if options.fd is not None:
            _say_ready()
        serve(link, stack)
    finally:
        stack.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
