"""The machine ad of ``node-ad`` for the startd, over a real process, socket and pipe."""

from __future__ import annotations

import os
import select
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.kit.cli import vmjobs
from tests.kit.waiting import wait_until
from tests.kit.wrapper import install_program
from vmjobs.agent import protocol
from vmjobs.agent.listener import listening
from vmjobs.model import HypervisorInfo, HypervisorKind, Node

SECONDS = 60.0


class Answering:
    """An agent that only reports its node's status."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections: list[socket.socket] = []

    @contextmanager
    def up(self) -> Iterator[None]:
        with listening(self.path, self._serve):
            yield
        for connection in self.connections:
            connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        self.connections.append(connection)
        works = HypervisorInfo(kind=HypervisorKind.UML, works=True, detail="", seconds=1, version="")
        node = Node(
            name="node1",
            site="here",
            version="1",
            cpus=2,
            memory=1024,
            disk=1000,
            hypervisors=(works,),
            updated=datetime.now(UTC),
        )
        for _ in protocol.receive(connection):
            protocol.send(connection, protocol.StatusMessage(node=node))


class Following:
    """The running ``node-ad`` command."""

    def __init__(self, path: Path, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**os.environ, "VMJOBS_SOCKET": str(path)},
        )
        self._seen = b""

    def next(self) -> str:
        """Return the next ad that the command prints."""
        assert self.process.stdout is not None
        while b"- update:true\n" not in self._seen:
            ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
            assert ready, "nothing more was said"
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, "the command has ended"
            self._seen += data
        ad, _, self._seen = self._seen.partition(b"- update:true\n")
        return ad.decode()


@pytest.fixture
def following(tmp_path: Path) -> Iterator[Following]:
    found = Following(tmp_path / "agent.sock", install_program(tmp_path, "node-ad"))
    with found.process:
        yield found
        found.process.kill()


def test_an_agent_that_comes_and_goes_is_told_as_it_happens(
    following: Following, tmp_path: Path
) -> None:
    agent = Answering(tmp_path / "agent.sock")
    assert "HasVMJobs = false" in following.next()
    for _ in range(2):
        with agent.up():
            assert "HasVMJobs = true" in following.next()
            assert len(agent.connections) >= 1
        # The ad is renewed every ten seconds.
        wait_until(lambda: "HasVMJobs = false" in following.next(), what="the agent to be missed")


def test_it_ends_with_whoever_reads_it(following: Following) -> None:
    following.next()
    assert following.process.stdout is not None
    following.process.stdout.close()
    assert following.process.wait(SECONDS) == 0


def test_asked_once_it_answers_once(tmp_path: Path) -> None:
    agent = Answering(tmp_path / "agent.sock")
    with agent.up():
        asked = vmjobs("node", "ad", code=0, socket=agent.path, timeout=SECONDS)
    assert asked.out.count("HasVMJobs = true") == 1
