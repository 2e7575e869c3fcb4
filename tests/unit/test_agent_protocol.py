"""Messages between the agent and a client that requests a VM, and bytes after them."""

from __future__ import annotations

import io
import json
import socket

import pytest

from tests.kit.reports import report
from vmjobs.agent import framing, protocol
from vmjobs.agent.framing import Channel, DataMessage
from vmjobs.errors import InvalidRequest
from vmjobs.model import JobState


def heard(words: bytes) -> list[protocol.Message]:
    """The messages that these bytes contain."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(words)
        ours.shutdown(socket.SHUT_WR)
        return list(protocol.receive(theirs))


def test_bytes_arrive_as_they_were() -> None:
    data = bytes(range(256)) * 100 + b'\n{"type": "end"}\n'
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = protocol.receive(theirs)
        got = b""
        for piece in framing.split_file(Channel.TREE, io.BytesIO(data)):
            protocol.send(ours, piece)
            arrived = next(found)
            assert isinstance(arrived, DataMessage)
            got += arrived.data
        assert arrived.last
    assert got == data


def test_bytes_that_break_off_are_none() -> None:
    assert heard(b'{"type": "data", "channel": "tree", "size": 5}\nabc') == []


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "data", "channel": "tree", "size": 0, "data": "uncounted"}',
        b'{"type": "data", "channel": "tree", "size": -1}',
        b'{"type": "data", "channel": "tree", "size": 99999999}',
        b'{"type": "data", "channel": "none", "size": 1}',
        b'{"type": "hand", "job": "1.0", "image": "x", "directory": "/a:b"}',
        b'{"type": "run", "job": "condor.1", "token": ""}',
    ],
)
def test_what_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a message"):
        heard(line + b"\n")


def test_what_says_nothing_is_not_sent() -> None:
    """A peer of another release refuses fields that it does not know."""
    here, there = socket.socketpair()
    with here, there:
        protocol.send(
            here, protocol.EndMessage(node="n1", exit_code=0, report=report(JobState.COMPLETED))
        )
        here.shutdown(socket.SHUT_WR)
        line = there.makefile("rb").read()
    assert set(json.loads(line)) == {"type", "node", "exit_code", "report", "ended"}
