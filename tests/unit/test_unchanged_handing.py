"""What an unchanged job's stand-in makes of what the agent answers."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from condor.scratch import FIELDS
from vmjobs import unchanged
from vmjobs.agent import protocol
from vmjobs.agent.framing import Channel, DataMessage
from vmjobs.agent.protocol import ErrorMessage
from vmjobs.agent.server import SocketLease, listening, refuse
from vmjobs.errors import InvalidRequest, Unavailable
from vmjobs.unchanged import run_handed
from vmjobs.unchanged_job import Handing


@pytest.fixture
def handing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Handing:
    # Standard output is that of the tests.
    monkeypatch.setattr(unchanged, "_empty", lambda _stream: None)
    place = tmp_path / "job"
    place.mkdir()
    size = {"cpus": 1, "memory": 128, "disk": 64}
    named = {"directory": str(place), "job": "1.0", "image": "generic", "user": "u", "group": "g"}
    return Handing({"type": "hand", **named, **size}, b"", str(place), fields=FIELDS)


def test_what_is_streamed_to_a_job_is_there_at_each_beginning(
    tmp_path: Path, handing: Handing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged, "STDIN", _stream(b"one\ntwo\n"))
    heard: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            heard.append(until_all_is_there(connection))
            again = len(heard) == 1
            protocol.send(connection, ErrorMessage(code="NOT_FOUND", message="no", retry=again))

    with listening(tmp_path / "s", serve):
        ended = run_handed(str(tmp_path / "s"), handing, lambda _message: None, patience=30.0)
    assert ended.code == "NOT_FOUND"
    assert heard == [b"one\ntwo\n"] * 2
    assert list(Path(handing.directory).iterdir()) == []


def until_all_is_there(connection: socket.socket) -> bytes:
    """Take the files of a job; what it was given for its standard input."""
    read = b""
    for message in protocol.receive(connection):
        if isinstance(message, DataMessage) and message.channel is Channel.INPUT:
            read += message.data
        if isinstance(message, DataMessage) and message.channel is Channel.TREE and message.last:
            break
    return read


def _stream(data: bytes) -> int:
    out, into = os.pipe()
    os.write(into, data)
    os.close(into)
    return out


def test_why_the_agent_does_not_run_the_job_now_is_told(tmp_path: Path, handing: Handing) -> None:
    why = "other VMs of this node use its 4096 MiB of memory"

    def refuse(connection: socket.socket) -> None:
        with connection:
            until_all_is_there(connection)
            protocol.send(connection, ErrorMessage(code="UNAVAILABLE", message=why, retry=True))

    with (
        listening(tmp_path / "s", refuse),
        pytest.raises(Unavailable, match=f"cannot run the job now: {why}"),
    ):
        run_handed(str(tmp_path / "s"), handing, lambda _message: None, patience=0.0)


def test_an_agent_that_refuses_a_job_before_all_of_it_has_come_is_heard(
    tmp_path: Path, handing: Handing
) -> None:
    """What is wrong is told by the names that the job's user knows."""
    Path(handing.directory, "large").write_bytes(bytes(8 * 1024 * 1024))
    handing.message["boot_seconds"] = 0

    def serve(connection: socket.socket) -> None:
        lease = SocketLease(connection, "here")
        with connection:
            try:
                next(protocol.receive(connection))
            except InvalidRequest as error:
                refuse(lease, error, retry=False)

    with listening(tmp_path / "s", serve):
        ended = run_handed(str(tmp_path / "s"), handing, lambda _message: None, patience=0.0)
    assert ended.code == "INVALID_REQUEST"
    assert ended.why == "VMJobBootTimeout: must be greater than or equal to 1"
