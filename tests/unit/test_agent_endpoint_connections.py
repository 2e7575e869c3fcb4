"""What an agent's endpoint bears: guests without a token, large requests, many connections."""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.kit.guest_endpoint import TOKEN, Guest, connect, endpoint, guest
from tests.kit.waiting import wait_until
from vmjobs.agent.guest import endpoint as endpoints
from vmjobs.agent.guest.endpoint import MAX_CONNECTIONS, MAX_HEADER, MAX_LOG_CHUNK
from vmjobs.agent.guest.guest_loop import Connections, accepting, guest_loop

__all__ = ["guest"]

CHUNKED = "Transfer-Encoding: chunked"


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Guest]:
    """The guest of a cluster VM: it runs for months, with programs of many users."""
    with endpoint(logs={}, max_log=0, on_output=lambda _: None) as made:
        yield made


@pytest.fixture(params=["guest", "member"])
def door(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The address of the endpoint: of a job's guest, and of a cluster VM's."""
    found: Guest = request.getfixturevalue(request.param)
    return found.address


@pytest.mark.parametrize(
    "framing", ["Content-Length: 900000", CHUNKED, "Content-Length: 900000\r\nExpect: 100-continue"]
)
@pytest.mark.parametrize(
    "token", ["", "Authorization: Bearer another\r\n", f"Authorization: Bearer {TOKEN}\r\n" * 2]
)
def test_nothing_is_read_of_the_body_of_who_has_no_token(
    door: tuple[str, int], token: str, framing: str
) -> None:
    with connect(door) as peer:
        peer.settimeout(5)
        peer.sendall(
            f"POST /v1/log/out?offset=0 HTTP/1.1\r\nHost: x\r\n{token}{framing}\r\n\r\n".encode()
        )
        answer = b""
        while more := peer.recv(4096):  # until it hangs up; no byte of the body is sent
            answer += more
    assert answer.startswith(b"HTTP/1.1 401 "), answer
    assert b"Connection: close" in answer


def test_those_without_the_token_cannot_send_bodies_on_all_connections(guest: Guest) -> None:
    head = b"POST /v1/log/out?offset=0 HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n"
    for _ in range(30):  # more than ``MAX_BODIES``
        with connect(guest.address) as peer:
            peer.settimeout(5)
            with suppress(ConnectionError):
                peer.sendall(head + b"x" * 800_000)
            with suppress(ConnectionError):
                assert peer.recv(4096).startswith(b"HTTP/1.1 401 ")
    assert guest.ask("POST", "/v1/log/out?offset=0", b"hello")[0] == 204


def test_headers_without_end_are_refused(door: tuple[str, int]) -> None:
    with connect(door) as peer:
        peer.settimeout(5)
        with suppress(ConnectionError):
            peer.sendall(b"GET /v1/control HTTP/1.1\r\n" + b"X: x\r\n" * (MAX_HEADER // 4))
        with suppress(ConnectionError):
            assert peer.recv(4096).startswith(b"HTTP/1.1 431 ")


def begin(stack: ExitStack, address: tuple[str, int], url: str, framing: str) -> socket.socket:
    """Send the headers of a request; return its connection."""
    peer = stack.enter_context(connect(address))
    peer.settimeout(10)
    head = f"POST {url} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{framing}\r\n\r\n"
    peer.sendall(head.encode())
    return peer


def status_of(peer: socket.socket) -> int:
    with peer.makefile("rb") as answer:
        return int(answer.readline().split()[1])


def status_after(address: tuple[str, int], url: str, framing: str, body: bytes = b"") -> int:
    with ExitStack() as stack:
        peer = begin(stack, address, url, framing)
        with suppress(ConnectionError):  # the endpoint need not read the whole body
            peer.sendall(body)
        return status_of(peer)


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def test_nothing_may_be_large(guest: Guest) -> None:
    for url in ("/v1/log/out?offset=0", "/v1/ready", "/v1/exit", "/v1/collecting", "/v1/no-such"):
        assert status_after(guest.address, url, f"Content-Length: {MAX_LOG_CHUNK + 1}") == 413
        body = chunked(b"x" * (MAX_LOG_CHUNK + MAX_HEADER))
        assert status_after(guest.address, url, CHUNKED, body) == 413
    url, size = "/v1/log/err?offset=0", f"Content-Length: {MAX_LOG_CHUNK}"
    assert status_after(guest.address, url, size, b"x" * MAX_LOG_CHUNK) == 204
    assert status_after(guest.address, "/v1/log/out?offset=0", CHUNKED, chunked(b"hello")) == 204
    assert guest.link.logs["out"].read_bytes() == b"hello"


def unnamed(directory: Path) -> list[int]:
    """Sizes of this process's open files that have no name, on a directory's disk."""
    found = []
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            seen = handle.stat()
            if (seen.st_dev, seen.st_nlink) == (directory.stat().st_dev, 0) and seen.st_size:
                found.append(seen.st_size)
    return found


def test_what_is_printed_is_on_no_disk_but_in_its_log(guest: Guest) -> None:
    framing = f"Content-Length: {MAX_LOG_CHUNK}"
    before = set(unnamed(Path(tempfile.gettempdir())))  # some may be about to be closed
    with ExitStack() as stack:
        peer = begin(stack, guest.address, "/v1/log/out?offset=0", framing)
        peer.sendall(b"x" * (MAX_LOG_CHUNK - 1))
        wait_until(lambda: fcntl.ioctl(peer, termios.TIOCOUTQ, b"0000") == bytes(4))
        assert guest.ask("GET", "/v1/control?wait=0")[0] == 200  # answered by the same thread
        assert set(unnamed(Path(tempfile.gettempdir()))) <= before
        peer.sendall(b"x")
        assert status_of(peer) == 204


def hung_up(peer: socket.socket) -> bool:
    """Whether the other side has closed the connection."""
    ready, _, _ = select.select([peer], [], [], 0)
    return bool(ready) and peer.recv(1) == b""


def test_a_request_that_was_answered_before_its_sender_closed_its_side_is_no_error(
    guest: Guest,
) -> None:
    with connect(guest.address) as peer:
        peer.sendall(
            f"GET /v1/control?wait=1 HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        peer.shutdown(socket.SHUT_WR)
        assert status_of(peer) == 200


def test_jobs_that_hold_connections_do_not_silence_the_guest(member: Guest) -> None:
    held = [connect(member.address) for _ in range(40)]
    for _ in range(5):
        assert member.ask("GET", "/v1/control?wait=0") == (200, b"")
        for silent in held[:20]:
            silent.close()
        held = held[20:] + [connect(member.address) for _ in range(20)]
    for silent in held:
        silent.close()


def test_jobs_that_ask_slowly_on_all_connections_do_not_silence_the_guest(member: Guest) -> None:
    asking: list[tuple[int, bytes]] = []
    waiting = threading.Thread(target=lambda: asking.append(member.ask("GET", "/v1/control?wait=2")))
    waiting.start()
    slow = []
    for _ in range(MAX_CONNECTIONS + 40):
        slow.append(connect(member.address))
        slow[-1].sendall(b"GET /v1/con")
    # Answered before any of them is closed for its silence.
    assert member.ask("GET", "/v1/control?wait=0", timeout=3) == (200, b"")
    waiting.join(10)
    assert asking == [(200, b"")]  # it came before them all, and its request was in progress
    assert hung_up(slow[0])
    assert not hung_up(slow[-1])
    for connection in slow:
        connection.close()


def test_who_asks_for_nothing_is_hung_up_on_and_who_waits_for_orders_is_not(
    member: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "HEADER_SECONDS", 0.3)
    answers: list[tuple[int, bytes]] = []
    waiting = threading.Thread(
        target=lambda: answers.append(member.ask("GET", "/v1/control?wait=2", timeout=20))
    )
    waiting.start()
    silent = connect(member.address)
    wait_until(lambda: hung_up(silent), 10)
    silent.close()
    assert not answers
    waiting.join(20)
    assert answers == [(200, b"")]


def test_who_comes_while_accepting_ends_is_hung_up_on() -> None:
    """The guest program then tries again, with the next agent."""
    served, held, go_on = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(5)

    async def keep(_connection: socket.socket) -> None:
        served.set()
        await asyncio.sleep(60)

    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    with ExitStack() as closing:
        closing.enter_context(accepting(server, Connections(keep, 10)))
        closing.enter_context(socket.create_connection(address, 5))
        served.wait(5)
        guest_loop().call_soon_threadsafe(hold)
        held.wait(5)
        with socket.create_connection(address, 5) as late:
            ended = threading.Thread(target=closing.close)
            ended.start()
            time.sleep(0.1)  # for the end of accepting to wait for the loop, too
            go_on.set()
            ended.join()
            with suppress(ConnectionResetError):
                assert late.recv(1) == b""
