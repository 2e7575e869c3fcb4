"""Messages to a gateway's supervisor, over a real Unix socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from vmjobs.errors import Unavailable
from vmjobs.gateway.control import Message, SupervisorClient, serve_commands


def test_who_logs_in_gets_the_connection(tmp_path: Path) -> None:
    mine, guests = socket.socketpair()

    def handle(asked: Message) -> Message:
        assert asked == {"do": "log in", "machine": "ce", "key": "mine"}
        return {"host_key": "its", "connection": guests}

    with (
        serve_commands(tmp_path / "s", handle, lambda _: None),
        SupervisorClient(tmp_path / "s") as control,
    ):
        host_key, connection = control.log_in("ce", "mine")
        with mine, connection:
            assert host_key == "its"
            mine.sendall(b"hello")
            assert connection.recv(5) == b"hello"


@pytest.mark.parametrize(
    ("answer", "why"),
    [({"error": "ce does not run"}, "ce does not run"), ({"host_key": "its"}, "closed the connection")],
)
def test_without_a_connection_nobody_is_logged_in(tmp_path: Path, answer: Message, why: str) -> None:
    with (
        serve_commands(tmp_path / "s", lambda _: dict(answer), lambda _: None),
        SupervisorClient(tmp_path / "s") as control,
        pytest.raises(Unavailable, match=why),
    ):
        control.log_in("ce", "mine")
