"""A network switch for machines of one computer: frames in, frames out, by Unix SEQPACKET socket.

Each connection is a port, each datagram an Ethernet frame. It is a process of its own, so that machines
keep their network whatever becomes of who started them::

    python -m vmjobs.hypervisor.switch --listen PATH

A port has the hardware address of its first frame, for as long as it is connected; frames with another
are dropped, so that no machine speaks for another that is up. A port that does not read loses frames,
and holds nobody up.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.mconsole import short_path
from vmjobs.subprocess import environment

#: Seconds in which a switch must be ready.
READY_SECONDS = 15.0
#: How often a switch looks whether its directory is still there, in seconds; nothing tells it.
LOOK_SECONDS = 5.0
#: Ports of one switch.
MAX_PORTS = 256
#: Bytes of a frame: header, and what an MTU of 1500 leaves, with a VLAN tag.
SHORTEST, LONGEST = 14, 1518
#: Frames taken of one port before the others have their turn.
BURST = 64
BUFFER = 1024 * 1024
READY = b"ready\n"

_GROUP = 0x01


def mac(number: int) -> str:
    """A hardware address of those that anybody may give out; number: below 2^32."""
    return "02:76:" + ":".join(f"{byte:02x}" for byte in number.to_bytes(4, "big"))


# --------------------------------------------------------------------------- forwarding


@dataclass
class Table:
    """Which port has which address. Knows nothing of sockets."""

    _ports: dict[int, bytes | None] = field(default_factory=dict)
    _owners: dict[bytes, int] = field(default_factory=dict)

    def plug(self, port: int) -> None:
        """There is a new port."""
        self._ports[port] = None

    def unplug(self, port: int) -> None:
        """A port is gone, and its address free again."""
        address = self._ports.pop(port, None)
        if address is not None:
            del self._owners[address]

    def route(self, port: int, frame: bytes) -> list[int]:
        """To which ports a frame goes that came in at ``port``."""
        if not SHORTEST <= len(frame) <= LONGEST:
            return []
        target, source = frame[:6], frame[6:12]
        if self._ports[port] is None and not source[0] & _GROUP and source not in self._owners:
            self._ports[port] = source
            self._owners[source] = port
        if self._ports[port] != source:
            return []
        owner = self._owners.get(target)
        if owner is not None:
            return [owner] if owner != port else []
        return [other for other in self._ports if other != port]


class Switch:
    """The ports of a listening socket, and what goes between them. waker: ends a step early."""

    def __init__(self, listener: socket.socket, waker: socket.socket) -> None:
        self._listener = listener
        self._table = Table()
        self._ports: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(waker, selectors.EVENT_READ)

    def step(self, timeout: float) -> None:
        """Forward what comes within ``timeout`` seconds, at least once round all ports."""
        ready = [key.fd for key, _ in self._selector.select(timeout)]
        if self._listener.fileno() in ready:
            self._plug()  # first: who connected before a frame was sent is to get it
        for number in ready:
            if number in self._ports:
                self._forward(number)

    def close(self) -> None:
        """Unplug everybody."""
        for port in list(self._ports):
            self._unplug(port)
        self._selector.close()

    def _plug(self) -> None:
        with suppress(OSError):  # there is no other
            while True:
                port, _ = self._listener.accept()
                if len(self._ports) < MAX_PORTS:
                    self._add(port)
                else:
                    port.close()

    def _add(self, port: socket.socket) -> None:
        port.setblocking(False)
        port.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._ports[port.fileno()] = port
        self._table.plug(port.fileno())
        self._selector.register(port, selectors.EVENT_READ)

    def _unplug(self, number: int) -> None:
        port = self._ports.pop(number, None)
        if port is not None:
            self._selector.unregister(port)
            self._table.unplug(number)
            port.close()

    def _forward(self, number: int) -> None:
        for _ in range(BURST):
            try:
                frame = self._ports[number].recv(LONGEST + 1)
            except BlockingIOError:
                return
            except OSError:
                frame = b""
            if not frame:
                self._unplug(number)
                return
            for other in self._table.route(number, frame):
                self._send(other, frame)

    def _send(self, number: int, frame: bytes) -> None:
        try:
            self._ports[number].send(frame)
        except BlockingIOError:
            pass  # it does not read: its loss alone
        except OSError:
            pass  # gone; that it is, its own turn shows


# --------------------------------------------------------------------------- the process


def serve(path: Path) -> None:
    """Be the switch at ``path``, until a signal ends it or the socket is not there any more.

    Raises:
        HypervisorError: there is a switch already, or it cannot listen.
    """
    stop, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with stop, wake, _listening(path) as listener:
        mine = path.stat()
        switch = Switch(listener, stop)
        os.write(sys.stdout.fileno(), READY)
        while _same(path, mine) and not procs.readable([stop.fileno()], 0):
            switch.step(LOOK_SECONDS)
        switch.close()
        if _same(path, mine):
            path.unlink(missing_ok=True)


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)  # of one that was killed: it held the lock
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            address = stack.enter_context(short_path(path))
            listener.bind(address)
            path.chmod(0o600)
            listener.listen(64)
        except BlockingIOError as error:
            raise HypervisorError(f"there is a switch at {path} already") from error
        except OSError as error:
            raise HypervisorError(f"no switch can listen at {path}: {error.strerror}") from error
        yield listener


def _same(path: Path, mine: os.stat_result) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


# --------------------------------------------------------------------------- who needs one


def process(path: Path) -> int | None:
    """The process that is the switch at ``path``; None: there is none."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer, short_path(path) as address:
            peer.settimeout(READY_SECONDS)
            peer.connect(address)
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError:
        return None
    return int.from_bytes(credentials[:4], sys.byteorder)


def ensure(path: Path) -> int:
    """Have a switch at ``path``; its process, which goes on without this one.

    Raises:
        HypervisorError: it does not come up, with its own words.
    """
    if (found := process(path)) is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = path.with_suffix(".log")
    with log.open("w") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "vmjobs.hypervisor.switch", "--listen", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment({}),
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
    if not _comes_up(child):
        child.kill()
        child.wait()
        why = log.read_text("utf-8", "replace").strip()[-500:] or "it said nothing"
        raise HypervisorError(f"the switch at {path} does not come up: {why}")
    return child.pid


def _comes_up(child: subprocess.Popen[bytes]) -> bool:
    if child.stdout is None:
        return False
    with child.stdout as words:
        return bool(procs.readable([words.fileno()], READY_SECONDS)) and words.readline() == READY


def main() -> None:
    """Be a switch."""
    parser = argparse.ArgumentParser(description="A network switch for machines of one computer.")
    parser.add_argument("--listen", type=Path, required=True, metavar="PATH")
    try:
        serve(parser.parse_args().listen.absolute())
    except HypervisorError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
