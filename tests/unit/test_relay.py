"""Relay between descriptors and a session: last bytes, and peers that accept no data."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vmjobs import relay as relaying
from vmjobs.errors import SessionEnded
from vmjobs.relay import relay

TAIL = b"last words"


class Far:
    """The other side of a session. gate: data sent to it arrives once the gate is set."""

    def __init__(self, says: list[tuple[bytes, bool]], gate: threading.Event | None = None) -> None:
        self.says, self.gate = says, gate
        self.asked: list[int] = []
        self.heard = b""
        self.at_close: bytes | None = None

    def send(self, offset: int, data: bytes, end: bool) -> int:
        assert self.gate is None or self.gate.wait(10)
        assert offset == len(self.heard)
        self.heard += data
        return len(self.heard)

    def receive(self, offset: int, wait: float) -> tuple[bytes, bool]:
        self.asked.append(offset)
        return self.says.pop(0) if len(self.says) > 1 else self.says[0]

    def close(self) -> None:
        if self.at_close is None:
            self.at_close = self.heard


@pytest.fixture
def ends() -> Iterator[list[int]]:
    """Two pipes: source, its writer; the reader of the sink, sink."""
    found = [*os.pipe(), *os.pipe()]
    yield found
    for end in found:
        try:
            os.close(end)
        except OSError:
            continue


def test_what_a_vm_said_last_is_heard_though_it_takes_no_more(ends: list[int]) -> None:
    source, writer, reader, sink = ends
    os.write(writer, TAIL)
    os.close(reader)
    gate = threading.Event()
    far = Far([(b"x", False)], gate)

    def hang_up() -> None:
        os.close(writer)
        gate.set()

    with pytest.raises(BrokenPipeError):
        relay(far, source, sink, hang_up)
    assert far.at_close == TAIL


def test_who_takes_nothing_does_not_keep_a_session(
    ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, writer, _, sink = ends
    monkeypatch.setattr(relaying, "POLL_SECONDS", 0.01)
    far = Far([(b"x" * 100_000, False), (b"y" * 100_000, False)])
    with pytest.raises(SessionEnded, match="accepted no data"):
        relay(far, source, sink, lambda: os.close(writer))
    assert far.asked == [0] + [0] * relaying.MAX_POLLS  # keeps the session, acknowledges nothing


def test_who_is_slow_gets_all(ends: list[int]) -> None:
    source, writer, reader, sink = ends
    said = os.urandom(300_000)
    far = Far([(said[:200_000], False), (said[200_000:], True)])

    def read() -> bytes:
        return b"".join(iter(lambda: os.read(reader, 1000), b""))

    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(read)
        relay(far, source, sink, lambda: os.close(writer))
        os.close(sink)
        assert got.result(10) == said
    assert far.asked == [0, 200_000]
