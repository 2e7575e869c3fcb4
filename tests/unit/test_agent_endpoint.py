"""The endpoint that an agent offers to one guest, over its real Unix socket."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import select
import socket
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.full_disk import nothing_fits
from tests.kit.sockets import guest_network
from tests.kit.waiting import wait_until
from vmjobs.agent.guest import endpoint as endpoints
from vmjobs.agent.guest.endpoint import MAX_CONNECTIONS, MAX_HEADER, MAX_LOG_CHUNK, serving
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.vm.events import EventQueue, ExitReported, GuestReady, RunEvent, ScriptEnded
from vmjobs.errors import Forbidden, Unavailable, VMJobsError
from vmjobs.hypervisor.base import ENDPOINT_PORT
from vmjobs.model import ExitChannel, ExitStatus

TOKEN = "secret-of-this-guest"
CHUNKED = "Transfer-Encoding: chunked"


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


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Guest]:
    """The guest of a cluster VM: it runs for months, with programs of many users."""
    with endpoint(logs={}, max_log=0, on_output=lambda _: None) as made:
        yield made


def test_only_the_guests_own_token_is_good(guest: Guest) -> None:
    assert guest.ask("GET", "/v1/renewal", token="another")[0] == 401
    assert guest.ask("GET", "/v1/renewal") == (204, b"")


def test_a_hushed_endpoint_answers_nothing_until_it_speaks_again(guest: Guest) -> None:
    assert guest.link.quiesce(1.0)
    assert guest.ask("POST", "/v1/log/out?offset=0", b"a word")[0] == 503
    assert guest.ask("GET", "/v1/control?wait=20")[0] == 503
    assert not guest.link.logs["out"].exists()
    guest.link.resume()
    assert guest.ask("POST", "/v1/log/out?offset=0", b"a word")[0] == 204


def test_an_endpoint_is_hushed_once_who_waited_for_orders_has_his_answer(guest: Guest) -> None:
    answers: list[tuple[int, bytes]] = []

    def control() -> None:
        while len(answers) < 2:
            answers.append(guest.ask("GET", "/v1/control?wait=20"))

    waiting = threading.Thread(target=control)
    waiting.start()
    wait_until(lambda: guest.link.has_heartbeat)
    assert guest.link.quiesce(5.0)
    assert [status for status, _ in answers][:1] == [200], "its answer was still on its way"
    waiting.join()
    assert [status for status, _ in answers] == [200, 503]


def test_who_never_asks_again_is_not_waited_for_longer_than_that(guest: Guest) -> None:
    assert guest.ask("GET", "/v1/control?wait=0")[0] == 200
    began = time.monotonic()
    assert guest.link.quiesce(0.2)
    assert time.monotonic() - began < 5


def test_a_resumed_guest_gets_its_new_token_for_the_old_one_and_nothing_else(guest: Guest) -> None:
    guest.link.former = hashlib.sha256(b"of the node before").hexdigest()
    old = {"token": "of the node before"}
    assert guest.ask("POST", "/v1/ready", **old)[0] == 503
    assert guest.ask("POST", "/v1/exit", b"code=0", **old)[0] == 503
    assert guest.ask("GET", "/v1/control?wait=20&done=3", **old)[0] == 503
    for _ in range(2):  # an answer may be lost
        status, renewal = guest.ask("GET", "/v1/renewal", **old)
        token, epoch = renewal.decode().split()
        assert (status, token) == (200, TOKEN)
        assert abs(int(epoch) - time.time()) < 5
    assert guest.ask("POST", "/v1/log/out?offset=0", b"a word")[0] == 204
    assert guest.seen() == GuestReady()
    assert guest.ask("GET", "/v1/renewal", **old)[0] == 401, "it is over"
    assert guest.ask("GET", "/v1/renewal") == (204, b""), "there is nothing newer"


def test_a_hushed_endpoint_gives_no_new_token_either(guest: Guest) -> None:
    """The token would be that of a VM that is being saved."""
    guest.link.former = hashlib.sha256(b"of the node before").hexdigest()
    assert guest.link.quiesce(1.0)
    assert guest.ask("GET", "/v1/renewal", token="of the node before")[0] == 503


@pytest.fixture(params=["guest", "member"])
def door(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The address of the endpoint: of a job's guest, and of a cluster VM's."""
    found: Guest = request.getfixturevalue(request.param)
    return found.address


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 900000",
        "Transfer-Encoding: chunked",
        "Content-Length: 900000\r\nExpect: 100-continue",
    ],
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


def test_a_guest_goes_from_ready_to_exit(guest: Guest) -> None:
    assert guest.ask("POST", "/v1/ready")[0] == 204
    assert guest.ask("POST", "/v1/collecting", b"code=3 disk=full")[0] == 204
    assert guest.ask("POST", "/v1/exit", b"signal=9")[0] == 204
    assert guest.ask("POST", "/v1/exit", b"code=0 undelivered=yes")[0] == 204
    via = ExitChannel.ENDPOINT
    assert guest.seen() == GuestReady()
    assert guest.seen() == ScriptEnded(ExitStatus(code=3, channel=via), disk_full=True)
    assert guest.seen() == ExitReported(ExitStatus(signal=9, channel=via))
    assert guest.seen() == ExitReported(ExitStatus(code=0, channel=via), undelivered=True)


@pytest.mark.parametrize(
    "body", [b"", b"code=", b"code=x", b"code=300", b"signal=0", b"\xff\xfe", b"x" * 9000]
)
def test_a_malformed_exit_is_refused(guest: Guest, body: bytes) -> None:
    assert guest.ask("POST", "/v1/exit", body)[0] == 400


def test_log_chunks_may_come_twice_and_never_out_of_order(guest: Guest) -> None:
    for _ in range(2):
        assert guest.ask("POST", "/v1/log/out?offset=0", b"hello ")[0] == 204
    assert guest.ask("POST", "/v1/log/out?offset=99", b"gap")[0] == 409
    assert guest.ask("POST", "/v1/log/out?offset=3", b"lo you")[0] == 204
    assert guest.link.logs["out"].read_bytes() == b"hello you"


def test_a_log_beyond_its_limit_is_cut_and_the_guest_not_stopped(guest: Guest) -> None:
    assert guest.ask("POST", "/v1/log/err?offset=0", b"x" * 30)[0] == 204
    assert guest.ask("POST", "/v1/log/err?offset=30", b"y")[0] == 204
    assert guest.link.logs["err"].read_bytes() == b"x" * 20


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


def test_what_the_node_cannot_keep_of_a_log_is_lost_until_it_can(guest: Guest) -> None:
    with nothing_fits():
        assert guest.ask("POST", "/v1/log/out?offset=0", b"some")[0] == 500
    assert guest.ask("POST", "/v1/log/err?offset=0", b"more")[0] == 204
    assert sorted(guest.link.lost) == ["out"]
    assert guest.ask("POST", "/v1/log/out?offset=4", b"what comes next")[0] == 409
    assert sorted(guest.link.lost) == ["out"], "there is a gap"
    assert guest.ask("POST", "/v1/log/out?offset=0", b"some")[0] == 204
    assert guest.link.lost == {}


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


def test_control_waits_for_signals(guest: Guest) -> None:
    assert guest.ask("GET", "/v1/control?wait=0") == (200, b"")
    threading.Timer(0.2, lambda: (guest.link.send_signal(15), guest.link.send_signal(10))).start()
    begun = time.monotonic()
    status, text = guest.ask("GET", "/v1/control?wait=5")
    assert status == 200
    assert text.startswith(b"signal 15\n")
    assert 0.1 < time.monotonic() - begun < 4


def told(guest: Guest, done: int | None) -> list[int]:
    """The signals sent to a guest that reports ``done`` deliveries; None: it does not count."""
    status, orders = guest.ask("GET", "/v1/control?wait=0" + ("" if done is None else f"&done={done}"))
    assert status == 200
    return [int(order.removeprefix(b"signal ")) for order in orders.splitlines()]


def test_an_order_is_told_again_until_the_guest_has_delivered_it(guest: Guest) -> None:
    assert told(guest, 0) == []
    guest.link.send_signal(10)
    _ask_and_hang_up(guest, "/v1/control?wait=0&done=0")
    assert told(guest, 0) == [10]  # the answer before was lost
    guest.link.send_signal(12)
    assert [told(guest, done) for done in (0, 1, 2, 2)] == [[10, 12], [12], [], []]
    guest.link.send_signal(12)
    assert [told(guest, done) for done in (2, 3)] == [[12], []]


def test_a_guest_goes_on_counting_with_the_next_agent(guest: Guest) -> None:
    guest.link.send_signal(10)
    assert [told(guest, done) for done in (7, 8)] == [[10], []]


def test_an_order_that_was_not_told_yet_is_told_once(guest: Guest) -> None:
    for _ in range(3):
        guest.link.send_signal(12)
    assert told(guest, 0) == [12]
    guest.link.send_signal(12)  # the guest may have handled the one before already
    assert told(guest, 0) == [12, 12]


def test_a_guest_that_does_not_count_is_told_once(guest: Guest) -> None:
    guest.link.send_signal(15)
    assert [told(guest, None) for _ in range(2)] == [[15], []]


def _ask_and_hang_up(guest: Guest, path: str) -> None:
    before = guest.link.heard
    with connect(guest.address) as peer:
        request = f"GET {path} HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        peer.sendall(request.encode())
        wait_until(lambda: guest.link.heard != before)


def test_a_waiting_guest_does_not_hold_up_the_end(tmp_path: Path) -> None:
    begun = time.monotonic()
    with endpoint(logs={}, max_log=1, on_log=lambda: None) as guest:
        heard = guest.link.heard
        asking = threading.Thread(target=guest.ask, args=("GET", "/v1/control?wait=20"))
        asking.start()
        wait_until(lambda: guest.link.heard != heard)
    asking.join(5)
    assert not asking.is_alive()
    assert time.monotonic() - begun < 8


def test_only_a_vm_of_a_cluster_has_a_token_for_a_pool(guest: Guest) -> None:
    assert guest.ask("GET", "/v1/token")[0] == 404
    guest.link.pool_token = lambda: "the pool's token"
    assert guest.ask("GET", "/v1/token") == (200, b"the pool's token")
    assert guest.ask("GET", "/v1/token", token="of another guest")[0] == 401


@pytest.mark.parametrize(("fault", "status"), [(Forbidden("no"), 403), (Unavailable("api", "a"), 503)])
def test_a_guest_is_told_whether_to_ask_again_for_its_token(
    guest: Guest, fault: VMJobsError, status: int
) -> None:
    def fail() -> str:
        raise fault

    guest.link.pool_token = fail
    assert guest.ask("GET", "/v1/token")[0] == status


def test_words_of_a_guest_that_goes_on_for_months_are_passed_on_once(guest: Guest) -> None:
    heard: list[bytes] = []
    guest.link.on_output = heard.append

    def post(name: str, offset: int, data: bytes) -> int:
        return guest.ask("POST", f"/v1/log/{name}?offset={offset}", data)[0]

    assert post("out", 5000, b"after an agent ") == 204  # an earlier agent received the bytes before
    assert post("out", 5000, b"after an agent ") == 204
    assert post("out", 5000, b"after an agent and more ") == 204
    assert post("err", 0, b"an error ") == 204
    assert post("out", 9000, b"after a while ") == 204
    assert post("out", 5000, b"long gone") == 204
    assert heard == [b"after an agent ", b"and more ", b"an error ", b"after a while "]
    assert not guest.link.logs["out"].exists()


def test_a_request_for_orders_lasts_no_longer_than_its_link_says(guest: Guest) -> None:
    guest.link.longest_wait = 0.1
    began = time.monotonic()
    assert guest.ask("GET", "/v1/control?wait=25") == (200, b"")
    assert time.monotonic() - began < 10


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address)


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
