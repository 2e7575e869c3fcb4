"""A guest's way out, in a process of its own and without any privilege.

::

    python -m vmjobs.hypervisor.usernet --machine NAME (--fd N | --listen PATH) …

Ethernet frames come from the machine, TCP connections go to the job's endpoint (a Unix socket)
and, in mode ``outbound``, to the world. A stack that a hostile guest talks to is no part of the
agent's process; and this one ends when the machine does.

It also holds the machine to limits: ``--bits`` each way, and ``--processors`` (``regulator``), for
which it reads the number of the machine's process from ``--orders``.

Frames travel over ``--fd`` as datagrams (a SEQPACKET socket: UML), or over a stream socket made
at ``--listen``, each after its length in four bytes (QEMU's ``-netdev stream``).
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from vmjobs.hypervisor import regulator, slirp
from vmjobs.hypervisor.bucket import Bucket
from vmjobs.hypervisor.slirp import Settings, Stack

#: Frames kept for a guest that does not read; more are dropped, and TCP sends them again.
MAX_QUEUED = 2048
#: Frames taken from the guest in a row before its connections are looked after.
BATCH = 64
#: The longest Ethernet frame.
MAX_FRAME = 65536 + 18
#: Bytes of frames taken from the guest in a row, where nothing limits it.
MAX_TAKEN = MAX_FRAME * 4
#: Bytes taken in a row on a limited link at least: a frame of the usual length.
LEAST_TAKEN = 2048
#: Seconds' worth of bytes that may go at once on a limited link that was idle.
BURST_SECONDS = 0.1
#: Seconds' worth of frames kept for a guest on a limited link; more are dropped.
QUEUE_SECONDS = 1.0
#: Seconds that a hypervisor has to connect to ``--listen``.
CONNECT_SECONDS = 60.0
#: Longest name of a Unix socket, in bytes.
MAX_SOCKET_PATH = 107

_LENGTH = struct.Struct("!I")


class Link(Protocol):
    """The cable to the guest."""

    def fileno(self) -> int:
        """For poll."""

    def frames(self, most: int = MAX_TAKEN) -> list[bytes] | None:
        """Frames that have come, ``most`` bytes of them or a frame more, without waiting; ``None``
        once the machine is gone."""

    def send(self, frame: bytes) -> None:
        """Send a frame now or later, or drop it."""

    def flush(self) -> bool:
        """Send what is queued as far as possible; whether something waits for the guest to read."""

    def pause(self) -> tuple[float, float]:
        """Seconds until frames may be taken, and until more may be sent (``inf``: none waits)."""


class DatagramLink:
    """One frame, one datagram."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._queue: deque[bytes] = deque()
        self.fileno = sock.fileno

    def frames(self, most: int = MAX_TAKEN) -> list[bytes] | None:
        found: list[bytes] = []
        try:
            while len(found) < BATCH and most > 0:
                frame = self._sock.recv(MAX_FRAME)
                if not frame:
                    return None
                found.append(frame)
                most -= len(frame)
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

    def pause(self) -> tuple[float, float]:
        return 0.0, math.inf


class StreamLink:
    """Each frame after its length, as QEMU sends them."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self.fileno = sock.fileno

    def frames(self, most: int = MAX_TAKEN) -> list[bytes] | None:
        try:
            data = self._sock.recv(min(most, MAX_TAKEN))
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

    def pause(self) -> tuple[float, float]:
        return 0.0, math.inf


class LimitedLink:
    """Another link, on which no more than so many bytes a second go each way.

    From a guest that sends more nothing is read for a while, and its own queue fills. What is for
    the guest waits here.
    """

    def __init__(self, link: Link, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._taken, self._sent = Bucket(rate, BURST_SECONDS, clock), Bucket(rate, BURST_SECONDS, clock)
        self._queue: deque[bytes] = deque()
        self._queued, self._most = 0, max(MAX_FRAME, int(rate * QUEUE_SECONDS))
        self.fileno = link.fileno

    def frames(self, most: int = MAX_TAKEN) -> list[bytes] | None:
        level = int(self._taken.level)
        # Asked for while nothing may be taken: the machine is gone, and says so behind the frames.
        found = self._link.frames(most if level <= 0 else min(most, max(LEAST_TAKEN, level)))
        self._taken.take(sum(map(len, found or ())))
        return found

    def send(self, frame: bytes) -> None:
        if self._queued + len(frame) <= self._most:
            self._queue.append(frame)
            self._queued += len(frame)

    def flush(self) -> bool:
        while self._queue and self._sent.level > 0:
            frame = self._queue.popleft()
            self._queued -= len(frame)
            self._sent.take(len(frame))
            self._link.send(frame)
        return self._link.flush()

    def pause(self) -> tuple[float, float]:
        return self._taken.wait(), self._sent.wait() if self._queue else math.inf


def serve(link: Link, stack: Stack) -> None:
    """Carry frames until the machine is gone."""
    while True:
        watched, timeout = stack.prepare()
        poller = select.poll()
        for fd, events in watched:
            poller.register(fd, events)
        waiting = link.flush()
        reading, sending = link.pause()
        wanted = (0 if reading else select.POLLIN) | (select.POLLOUT if waiting else 0)
        poller.register(link.fileno(), wanted)
        happened = dict(poller.poll(_soonest(timeout, reading or math.inf, sending)))
        if happened.pop(link.fileno(), 0) & ~select.POLLOUT:
            frames = link.frames()
            if frames is None:
                return
            for frame in frames:
                stack.receive(frame)
        stack.handle(happened)


def _soonest(milliseconds: int | None, *seconds: float) -> int | None:
    """The shortest of these times in ms, none of them cut short; ``None``: there is no end to any."""
    times = [math.ceil(time * 1000) for time in seconds if time != math.inf]
    return min([*times, *([] if milliseconds is None else [milliseconds])], default=None)


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
        _say_ready(_seen(address))
        with suppress(TimeoutError):
            return StreamLink(server.accept()[0])
    return None


def _reachable(path: Path) -> str:
    """A name for the socket that is short enough, however deep its directory lies.

    Where it is too long itself, the directory stays open for the life of this process: its number is
    part of the other name.
    """
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return str(path)
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    return f"/proc/self/fd/{directory}/{path.name}"


def _seen(address: str) -> str:
    inside = address.removeprefix("/proc/self/")
    return address if inside == address else f"/proc/{os.getpid()}/{inside}"


def _regulate(processors: float, orders: int) -> None:
    """Hold the machine to its share of the processors; without that, it is to have no network."""
    try:
        # Nothing there: whoever started us is gone, and nobody knows which process to hold.
        with open(orders, encoding="ascii") as told:
            pid = int(told.readline())
        regulator.regulate(pid, processors)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


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
    parser.add_argument(
        "--door",
        type=_door,
        action="append",
        default=[],
        metavar="PORT:SOCKET",
        help="of the endpoint's address, and the Unix socket behind it",
    )
    parser.add_argument("--network", required=True)
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--nameserver", required=True)
    parser.add_argument("--guest", required=True)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--bits", type=int, help="a second, each way")
    parser.add_argument("--processors", type=float, help="that the machine may use on average")
    parser.add_argument("--orders", type=int, help="handle that says which process that is")
    return parser.parse_args(argv)


def _door(word: str) -> tuple[int, Path]:
    port, _, path = word.partition(":")
    return int(port), Path(path)


def main(argv: list[str] | None = None) -> int:
    """Serve one machine; 0 once it is gone."""
    options = _arguments(argv)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    slirp.version()  # fails early where there is no libslirp
    link = connect(options.fd, options.listen)
    if link is None:
        return 1
    if options.bits:
        link = LimitedLink(link, options.bits / 8)
    if options.processors:
        regulated = [options.processors, options.orders]
        threading.Thread(target=_regulate, args=regulated, daemon=True).start()
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
        for port, door in options.door:
            stack.forward(options.endpoint_address, port, _reachable(door))
        if options.fd is not None:
            _say_ready()
        serve(link, stack)
    finally:
        stack.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
