"""What a guest asks and tells at the endpoint that its agent offers."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest

from tests.kit.full_disk import nothing_fits
from tests.kit.guest_endpoint import TOKEN, Guest, connect, endpoint, guest
from tests.kit.waiting import wait_until
from vmjobs.agent.vm.events import ExitReported, GuestReady, ScriptEnded
from vmjobs.errors import Forbidden, Unavailable, VMJobsError
from vmjobs.model import ExitChannel, ExitStatus

__all__ = ["guest"]


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


def test_what_the_node_cannot_keep_of_a_log_is_lost_until_it_can(guest: Guest) -> None:
    with nothing_fits():
        assert guest.ask("POST", "/v1/log/out?offset=0", b"some")[0] == 500
    assert guest.ask("POST", "/v1/log/err?offset=0", b"more")[0] == 204
    assert sorted(guest.link.lost) == ["out"]
    assert guest.ask("POST", "/v1/log/out?offset=4", b"what comes next")[0] == 409
    assert sorted(guest.link.lost) == ["out"], "there is a gap"
    assert guest.ask("POST", "/v1/log/out?offset=0", b"some")[0] == 204
    assert guest.link.lost == {}


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
