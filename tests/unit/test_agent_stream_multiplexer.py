"""Connections multiplexed over messages: two ends, and the wire between them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.sockets import listener
from tests.kit.waiting import wait_until
from vmjobs.agent.condor_job.stream_multiplexer import (
    MAX_CONNECTIONS,
    MAX_PENDING_BYTES,
    StreamMultiplexer,
    listening,
)
from vmjobs.agent.framing import Channel, DataMessage

PATIENCE = 10.0


def echo(connection: socket.socket) -> None:
    while data := connection.recv(4096):
        connection.sendall(data.upper())


class Wire:
    """The near side, which accepts connections, and the far side: ``answer`` serves them."""

    def __init__(self, path: Path, answer: Callable[[socket.socket], object]) -> None:
        self.path = path
        self.near = StreamMultiplexer(Channel.CHIRP, self._to_far)
        self.far = StreamMultiplexer(Channel.CHIRP, self._to_near, answer)
        self._lock = threading.Lock()

    def _to_far(self, message: DataMessage) -> None:
        with self._lock:
            self.far.take(message)

    def _to_near(self, message: DataMessage) -> None:
        self.near.take(message)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        connection.connect(str(self.path))
        return connection


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path / "s", echo)
    with listening(wire.near, listener(wire.path)):
        yield wire
    wire.far.close()


def test_each_connection_gets_its_own_answers(wire: Wire) -> None:
    """The first to connect need not be the first to send."""
    connections = [wire.connect() for _ in range(MAX_CONNECTIONS)]
    for number, connection in reversed(list(enumerate(connections))):
        connection.sendall(b"from %d" % number)
        assert connection.recv(100) == b"FROM %d" % number
    for connection in connections:
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""


def test_there_is_room_again_once_some_are_over(wire: Wire) -> None:
    connections = [wire.connect() for _ in range(MAX_CONNECTIONS)]
    for connection in connections:
        connection.sendall(b"x")
        assert connection.recv(1) == b"X"
    assert wire.connect().recv(1) == b""
    connections[0].close()

    def is_answered() -> bool:
        with suppress(ConnectionError), wire.connect() as again:
            again.sendall(b"y")
            return again.recv(1) == b"Y"
        return False

    wait_until(is_answered, PATIENCE)  # the close has to reach the far side and come back


def test_who_has_said_all_still_hears_the_answer(wire: Wire) -> None:
    connection = wire.connect()
    connection.sendall(b"question")
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(100) == b"QUESTION"
    assert connection.recv(100) == b""


def test_who_reads_nothing_keeps_nobody_waiting(path: Path) -> None:
    """The thread that takes messages has other work too, such as the end of a lease."""
    begun = threading.Event()
    streams = StreamMultiplexer(Channel.CHIRP, lambda _message: begun.set())
    with listening(streams, listener(path)), socket.socket(socket.AF_UNIX) as idle:
        idle.settimeout(PATIENCE)
        idle.connect(str(path))
        assert begun.wait(PATIENCE)
        piece = bytes(64 * 1024)
        message = DataMessage(Channel.CHIRP, piece, stream=1)
        for _ in range(2 * MAX_PENDING_BYTES // len(piece)):
            streams.take(message)
        # The connection was closed. What had been written by then is still readable.
        while idle.recv(1024 * 1024):
            pass


def test_who_answers_may_fail(tmp_path: Path) -> None:
    def fail(_connection: socket.socket) -> None:
        raise ConnectionRefusedError("nobody there")

    wire = Wire(tmp_path / "s", fail)
    with listening(wire.near, listener(wire.path)):
        for _ in range(3):
            assert wire.connect().recv(1) == b""


def test_all_are_hung_up_on_in_the_end(tmp_path: Path) -> None:
    wire = Wire(tmp_path / "s", echo)
    with listening(wire.near, listener(wire.path)):
        connection = wire.connect()
        connection.sendall(b"x")
        assert connection.recv(1) == b"X"
    assert connection.recv(1) == b""


def test_while_they_are_shut_all_are_hung_up_on(wire: Wire) -> None:
    before = wire.connect()
    before.sendall(b"one")
    assert before.recv(100) == b"ONE"
    wire.near.shut(True)
    assert before.recv(100) == b""
    assert wire.connect().recv(100) == b""
    wire.near.shut(False)
    after = wire.connect()
    after.sendall(b"two")
    assert after.recv(100) == b"TWO"
