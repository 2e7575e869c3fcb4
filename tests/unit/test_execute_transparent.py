"""How a transparent job's program on the node handles the agent's answers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from condor.node.scratch import ATTRIBUTE_OF_FIELD
from vmjobs import execute_transparent
from vmjobs.agent import protocol
from vmjobs.agent.framing import Channel, DataMessage
from vmjobs.agent.lease import SocketLease
from vmjobs.agent.listener import listening
from vmjobs.agent.protocol import ErrorMessage
from vmjobs.errors import InvalidRequest, Unavailable
from vmjobs.execute_transparent import run_transparent_job
from vmjobs.transparent_job import RunResult, TransparentJob


def run(
    job: TransparentJob, serve: Callable[[socket.socket], None], patience: float = 0.0
) -> RunResult:
    """Run a job with an agent that serves its connections so."""
    agent = Path(job.directory).with_name("agent")
    with listening(agent, serve):
        return run_transparent_job(str(agent), job, lambda _message: None, patience=patience)


@pytest.fixture
def job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> TransparentJob:
    for name in ("OUT", "ERR"):  # those of this process belong to the tests
        stream = (tmp_path / name).open("w+b", buffering=0)
        request.addfinalizer(stream.close)
        monkeypatch.setattr(execute_transparent, name, stream.fileno())
    place = tmp_path / "job"
    place.mkdir()
    size = {"cpus": 1, "memory": 128, "disk": 64}
    named = {"directory": str(place), "job": "1.0", "image": "generic", "user": "u", "group": "g"}
    return TransparentJob({"type": "hand", **named, **size}, b"", str(place), fields=ATTRIBUTE_OF_FIELD)


def test_what_is_streamed_to_a_job_is_there_at_each_beginning(
    job: TransparentJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute_transparent, "STDIN", _stream(b"one\ntwo\n"))
    heard: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            heard.append(until_all_is_there(connection))
            again = len(heard) == 1
            protocol.send(connection, ErrorMessage(code="NOT_FOUND", message="no", retry=again))

    assert run(job, serve, 30.0).code == "NOT_FOUND"
    assert heard == [b"one\ntwo\n"] * 2
    assert list(Path(job.directory).iterdir()) == []


def until_all_is_there(connection: socket.socket) -> bytes:
    """Receive the files of a job; return its standard input."""
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


def test_why_the_agent_does_not_run_the_job_now_is_told(job: TransparentJob) -> None:
    why = "other VMs of this node use its 4096 MiB of memory"

    def send_error(connection: socket.socket) -> None:
        with connection:
            until_all_is_there(connection)
            protocol.send(connection, ErrorMessage(code="UNAVAILABLE", message=why, retry=True))

    with pytest.raises(Unavailable, match=f"cannot run the job now: {why}"):
        run(job, send_error)


def test_an_agent_that_refuses_a_job_before_all_of_it_has_come_is_heard(job: TransparentJob) -> None:
    """The error names the attribute that the job's user set."""
    Path(job.directory, "large").write_bytes(bytes(8 * 1024 * 1024))
    cast("dict[str, Any]", job.message)["boot_seconds"] = 0

    def serve(connection: socket.socket) -> None:
        lease = SocketLease(connection, "here")
        with connection:
            try:
                next(protocol.receive(connection))
            except InvalidRequest as error:
                lease.refuse(error, retry=False)

    ended = run(job, serve)
    assert ended.code == "INVALID_REQUEST"
    assert ended.why == "VMJobBootTimeout: must be greater than or equal to 1"
