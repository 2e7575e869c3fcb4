"""The endpoint that an agent offers to one guest, with a guest that asks it."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sockets import guest_network
from vmjobs.agent.guest.endpoint import serving
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.vm.events import EventQueue, RunEvent
from vmjobs.hypervisor.base import ENDPOINT_PORT

TOKEN = "secret-of-this-guest"


@dataclass
class Guest:
    link: GuestSession
    address: tuple[str, int]

    def ask(
        self, method: str, url: str, body: bytes = b"", token: str = TOKEN, timeout: float = 10
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=timeout)
        connection.request(method, url, body, {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    def seen(self) -> RunEvent | None:
        assert isinstance(self.link.event_queue, EventQueue)
        return self.link.event_queue.next(time.monotonic() + 5)


@contextmanager
def endpoint(**fields: Any) -> Iterator[Guest]:
    link = GuestSession(token=TOKEN, event_queue=EventQueue(), **fields)
    network = guest_network()
    address = network.listening[ENDPOINT_PORT].getsockname()
    with serving(link, network):
        yield Guest(link, address)


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    logs = {name: tmp_path / name for name in ("out", "err")}
    with endpoint(logs=logs, max_log=20, on_log=lambda: None) as made:
        yield made


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address)
