"""The relay between a job in a VM and the starter's Chirp service."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from condor.node.chirp_relay import NOT_AUTHORIZED, ChirpRelay
from tests.kit.chirp_service import ChirpService, chirp_service


@contextmanager
def connected(
    folder: Path, *, has_full_access: bool = False, is_checkpointable: bool = True
) -> Iterator[tuple[socket.socket, ChirpService]]:
    """The job's end of a relayed connection, and the service at the other end."""
    job, inner = socket.socketpair()
    with chirp_service(folder) as service, inner:
        (folder / "config").write_bytes(service.config)
        relay = ChirpRelay(
            folder / "config", has_full_access=has_full_access, is_checkpointable=is_checkpointable
        )
        relaying = threading.Thread(target=relay, args=[inner], daemon=True)
        relaying.start()
        with job:
            job.settimeout(10)
            yield job, service
            job.shutdown(socket.SHUT_WR)
            relaying.join(10)


@pytest.mark.parametrize("has_full_access", [True, False])
def test_a_job_that_goes_on_elsewhere_is_known_there(tmp_path: Path, *, has_full_access: bool) -> None:
    """A restored VM sends the cookie of its previous starter; the relay replaces it."""
    with connected(tmp_path, has_full_access=has_full_access) as (job, service):
        job.sendall(b"cookie before\nset_job_attr_delayed ChirpN 1\n")
        answers = b""
        while answers.count(b"\n") < 2:
            answers += job.recv(100)
    assert answers == b"0\n0\n"
    assert (service.attributes, service.events, service.served) == ({"ChirpN": "1"}, [], 2)


@pytest.mark.parametrize(
    ("said", "answer", "served"),
    [
        # the relay replaces no cookie of a VM without checkpoints: the starter checks it
        (b"cookie guessed\n", b"-1\n", 1),
        # a command that the job may not use does not reach the starter
        (b"set_job_attr ChirpVMOutcome x\n", NOT_AUTHORIZED, 0),
    ],
)
def test_what_another_job_says(tmp_path: Path, said: bytes, answer: bytes, served: int) -> None:
    with connected(tmp_path, is_checkpointable=False) as (job, service):
        job.sendall(said)
        assert job.recv(100) == answer
    assert service.served == served
