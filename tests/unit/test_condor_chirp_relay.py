"""The relay between a job in a VM and the starter's Chirp service."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from condor.node.chirp_relay import NOT_AUTHORIZED, ChirpRelay

COOKIE = "now"


@contextmanager
def connected(
    folder: Path, *, has_full_access: bool = False, is_checkpointable: bool = True
) -> Iterator[tuple[socket.socket, list[bytes]]]:
    """The job's end of a relayed connection, and the lines that the service receives."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        (folder / "config").write_text(f"127.0.0.1 {server.getsockname()[1]} {COOKIE}\n")

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    heard.append(line)
                    connection.sendall(b"0\n")

        relay = ChirpRelay(
            folder / "config", has_full_access=has_full_access, is_checkpointable=is_checkpointable
        )
        job, inner = socket.socketpair()
        work: list[Callable[[], object]] = [serve, lambda: relay(inner)]
        threads = [threading.Thread(target=one, daemon=True) for one in work]
        for thread in threads:
            thread.start()
        with job:
            job.settimeout(10)
            yield job, heard
            job.shutdown(socket.SHUT_WR)
            threads[1].join(10)
        inner.close()


@pytest.mark.parametrize("has_full_access", [True, False])
def test_a_job_that_goes_on_elsewhere_is_known_there(tmp_path: Path, *, has_full_access: bool) -> None:
    """A restored VM sends the cookie of its previous starter; the relay replaces it."""
    with connected(tmp_path, has_full_access=has_full_access) as (job, heard):
        job.sendall(b"cookie before\nset_job_attr_delayed ChirpN 1\n")
        answers = b""
        while answers.count(b"\n") < 2:
            answers += job.recv(100)
    assert heard == [b"cookie now\n", b"set_job_attr_delayed ChirpN 1\n"]
    assert answers == b"0\n0\n"


@pytest.mark.parametrize(
    ("said", "answer", "heard"),
    [
        # the relay replaces no cookie of a VM without checkpoints: the starter checks it
        (b"cookie guessed\n", b"0\n", [b"cookie guessed\n"]),
        # a command that the job may not use does not reach the starter
        (b"set_job_attr ChirpVMOutcome x\n", NOT_AUTHORIZED, []),
    ],
)
def test_what_another_job_says(tmp_path: Path, said: bytes, answer: bytes, heard: list[bytes]) -> None:
    with connected(tmp_path, is_checkpointable=False) as (job, found):
        job.sendall(said)
        assert job.recv(100) == answer
    assert found == heard
