"""The SSH relay of a VM: which connections may wait, and what a session gets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.sockets import listener
from vmjobs.agent.guest import ssh_relay
from vmjobs.agent.guest.ssh_relay import SshRelay, listening
from vmjobs.errors import LoginUnavailable

TOKEN = "t" * 43
HOST_KEY = "ssh-ed25519 " + "H" * 68
KEY = "ssh-ed25519 " + "K" * 68
GREETING = f"vmjobs-door 1 {TOKEN} {HOST_KEY}\n".encode()


@pytest.fixture
def opened(path: Path) -> Iterator[SshRelay]:
    made = SshRelay(TOKEN)
    with listening(made, listener(path)):
        yield made


def guest(path: Path, greeting: bytes = GREETING) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    connection.settimeout(10)
    connection.sendall(greeting)
    return connection


def test_a_visitor_gets_the_guests_connection(opened: SshRelay, path: Path) -> None:
    with guest(path) as waiting:
        visit = opened.open_session(KEY, 10)
        assert visit.host_key == HOST_KEY
        assert waiting.recv(100) == f"session {KEY}\n".encode()
        with visit.connection as inside:
            waiting.sendall(b"SSH-2.0")
            assert inside.recv(100) == b"SSH-2.0"
            inside.sendall(b"SSH-2.0-too")
            assert waiting.recv(100) == b"SSH-2.0-too"
        assert waiting.recv(100) == b""


def test_each_visitor_has_a_connection_of_his_own(opened: SshRelay, path: Path) -> None:
    with guest(path), opened.open_session(KEY, 10).connection:
        with pytest.raises(LoginUnavailable, match="did not connect for a login"):
            opened.open_session(KEY, 0.1)
        with guest(path), opened.open_session(KEY, 10).connection:
            pass


@pytest.mark.parametrize(
    "greeting",
    [
        GREETING.replace(b"ttt", b"ttu"),
        GREETING.replace(b"door 1", b"door 2"),
        b"vmjobs-door 1  -\n",
        b"GET / HTTP/1.0\r\n\r\n",
        GREETING[:-1] + b" more\n",
        GREETING + b"more",
        b"x" * 600,
    ],
)
def test_who_is_not_the_guest_is_not_let_wait(opened: SshRelay, path: Path, greeting: bytes) -> None:
    with guest(path, greeting) as stranger:
        assert stranger.recv(100) == b""
    with pytest.raises(LoginUnavailable):
        opened.open_session(KEY, 0.05)


def test_who_says_nothing_has_to_go(
    opened: SshRelay, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_relay, "GREETING_SECONDS", 0.2)
    with guest(path, b"vmjobs-do") as stranger:
        assert stranger.recv(100) == b""


def test_strangers_do_not_keep_the_guest_out(opened: SshRelay, path: Path) -> None:
    strangers = [guest(path, b"v") for _ in range(3 * ssh_relay.MAX_UNIDENTIFIED)]
    with guest(path):
        visit = opened.open_session(KEY, 10)
    assert visit.host_key == HOST_KEY
    assert strangers[0].recv(1) == b"", "it made room for others"
    for connection in (visit.connection, *strangers):
        connection.close()


def test_a_guest_that_went_away_is_not_taken_for_one_that_waits(opened: SshRelay, path: Path) -> None:
    guest(path).close()
    with guest(path) as second:
        visit = opened.open_session(KEY, 10)
        assert second.recv(8) == b"session "
        visit.connection.close()


def test_the_last_connections_of_a_guest_count(opened: SshRelay, path: Path) -> None:
    connections = [guest(path) for _ in range(ssh_relay.MAX_WAITING + 1)]
    assert connections[0].recv(100) == b""
    for connection in connections:
        connection.close()


def test_a_guest_without_a_server_says_so_each_time(opened: SshRelay, path: Path) -> None:
    with guest(path, f"vmjobs-door 1 {TOKEN} -\n".encode()):
        for _ in range(2):
            with pytest.raises(LoginUnavailable, match="has no SSH server"):
                opened.open_session(KEY, 10)


def test_a_guest_that_takes_orders_is_no_ssh_server(opened: SshRelay, path: Path) -> None:
    with guest(path, f"vmjobs-door 1 {TOKEN} shell\n".encode()) as waiting:
        with pytest.raises(LoginUnavailable, match="has no SSH server"):
            opened.open_session(KEY, 10)
        with opened.send_command("shell words", 10) as visitor:
            assert waiting.recv(100) == b"shell words\n"
            visitor.sendall(b"x")
            assert waiting.recv(1) == b"x"


def test_a_closed_door_lets_nobody_wait(path: Path) -> None:
    made = SshRelay(TOKEN)
    with listening(made, listener(path)):
        waiting = guest(path)
        began = time.monotonic()
    with suppress(ConnectionResetError):
        assert waiting.recv(100) == b""
    with pytest.raises(LoginUnavailable):
        made.open_session(KEY, 30)
    assert time.monotonic() - began < 10
    waiting.close()


def hung_up_on(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection."""
    try:
        return connection.recv(100) == b""
    except ConnectionError:  # it closed before it read the greeting
        return True


def test_while_it_is_shut_nobody_waits_at_it(opened: SshRelay, path: Path) -> None:
    with guest(path) as waiting:
        opened.shut(True)
        assert hung_up_on(waiting)
    with socket.socket(socket.AF_UNIX) as turned_away:
        turned_away.connect(str(path))  # and sends nothing: the relay would not read it
        turned_away.settimeout(10)
        assert hung_up_on(turned_away)
    with pytest.raises(LoginUnavailable):
        opened.open_session(KEY, 0.2)
    opened.shut(False)
    with guest(path):
        opened.open_session(KEY, 10).connection.close()
