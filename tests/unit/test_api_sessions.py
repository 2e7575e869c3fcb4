"""Sessions in memory: bytes in both directions, who may take part, and how they end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from api import session_hub
from api.session_hub import (
    LEAVING_SECONDS,
    MAX_SESSIONS,
    REMEMBERED_SECONDS,
    SILENT_SECONDS,
    SessionHub,
    Side,
)
from api.session_link import SessionClient
from tests.kit.waiting import Clock
from vmjobs.cluster.ssh_session import MAX_PENDING_BYTES, SessionAnswer
from vmjobs.errors import Conflict, SessionEnded, Unavailable

KEY = "ssh-ed25519 " + "K" * 68
ANSWER = SessionAnswer(host_key="ssh-ed25519 " + "H" * 68)
OPERATOR, NODE = (Side.OPERATOR, "ada"), (Side.NODE, "n1")


@pytest.fixture
def hub(clock: Clock) -> SessionHub:
    return SessionHub(clock)


def opened(hub: SessionHub, answer: SessionAnswer | None = ANSWER) -> str:
    session = hub.open("ada", "n1", "0" * 32, 1, KEY)
    if answer is not None:
        hub.answer("n1", session, answer)
    return session


@pytest.fixture
def session(hub: SessionHub) -> str:
    """A session that its node has answered."""
    return opened(hub)


def heard(hub: SessionHub, who: tuple[Side, str], session: str, offset: int, most: int = 1000) -> bytes:
    return hub.receive(*who, session, offset, most, 0)[0]


def test_a_node_is_told_once_for_each_until_it_answers(hub: SessionHub) -> None:
    session = opened(hub, None)
    (call,) = hub.calls("n1")
    assert (call.id, call.member, call.incarnation, call.key) == (session, "0" * 32, 1, KEY)
    assert hub.calls("n2") == []
    assert hub.await_answer("ada", session, 0) is None
    hub.answer("n1", session, ANSWER)
    hub.answer("n1", session, ANSWER)
    assert hub.calls("n1") == []
    assert hub.await_answer("ada", session, 0) == ANSWER
    with pytest.raises(Conflict):
        hub.answer("n1", session, SessionAnswer(refused="no"))


def test_bytes_go_both_ways_and_calls_may_be_repeated(session: str, hub: SessionHub) -> None:
    assert hub.send(*OPERATOR, session, 0, False, 0, b"hello") == 5
    assert hub.send(*OPERATOR, session, 0, False, 0, b"hello you") == 9
    assert hub.send(*NODE, session, 0, False, 0, b"welcome") == 7
    assert heard(hub, NODE, session, 0, most=5) == b"hello"
    assert heard(hub, NODE, session, 0) == b"hello you"
    assert heard(hub, NODE, session, 5) == b" you"
    assert heard(hub, OPERATOR, session, 0) == b"welcome"
    with pytest.raises(Conflict):
        heard(hub, NODE, session, 4)  # the request from offset 5 acknowledged this byte
    with pytest.raises(Conflict):
        heard(hub, NODE, session, 10)
    with pytest.raises(Conflict):
        hub.send(*OPERATOR, session, 10, False, 0, b"x")


def test_no_more_waits_than_may(session: str, hub: SessionHub) -> None:
    assert hub.send(*NODE, session, 0, True, 0, bytes(MAX_PENDING_BYTES + 5)) == MAX_PENDING_BYTES
    assert hub.send(*NODE, session, MAX_PENDING_BYTES, True, 0, b"12345") == MAX_PENDING_BYTES
    assert hub.receive(*OPERATOR, session, 0, 10, 0) == (bytes(10), False)
    heard(hub, OPERATOR, session, 10)
    assert hub.send(*NODE, session, MAX_PENDING_BYTES, True, 0, b"12345") == MAX_PENDING_BYTES + 5
    assert hub.receive(*OPERATOR, session, MAX_PENDING_BYTES, 10, 0) == (b"12345", True)


@pytest.mark.parametrize("waits", ["answer", "bytes", "room"])
def test_who_waits_hears_at_once(waits: str) -> None:
    hub = SessionHub()
    session = opened(hub, None if waits == "answer" else ANSWER)
    if waits == "room":
        hub.send(*NODE, session, 0, False, 0, bytes(MAX_PENDING_BYTES))
    with ThreadPoolExecutor(1) as pool:
        if waits == "answer":
            found = pool.submit(hub.await_answer, "ada", session, 60.0)
            hub.answer("n1", session, ANSWER)
            assert found.result(10) == ANSWER
        elif waits == "bytes":
            got = pool.submit(hub.receive, *NODE, session, 0, 100, 60.0)
            hub.send(*OPERATOR, session, 0, False, 0, b"x")
            assert got.result(10) == (b"x", False)
        else:
            sent = pool.submit(hub.send, *NODE, session, MAX_PENDING_BYTES, False, 60.0, b"x")
            heard(hub, OPERATOR, session, 1)
            assert sent.result(10) == MAX_PENDING_BYTES + 1


def test_a_session_is_its_two_sides_alone(session: str, hub: SessionHub) -> None:
    for side, who in ((Side.OPERATOR, "bob"), (Side.NODE, "n2"), (Side.NODE, "ada")):
        with pytest.raises(SessionEnded, match="no such session"):
            hub.send(side, who, session, 0, False, 0, b"x")
        with pytest.raises(SessionEnded, match="no such session"):
            hub.receive(side, who, session, 0, 10, 0)
        hub.close(side, who, session)
    with pytest.raises(SessionEnded):
        hub.answer("n2", session, ANSWER)
    with pytest.raises(SessionEnded):
        hub.await_answer("bob", session, 0)
    assert hub.send(*OPERATOR, session, 0, False, 0, b"x") == 1


def test_what_a_side_said_before_it_left_is_heard(session: str, hub: SessionHub) -> None:
    hub.send(*NODE, session, 0, False, 0, b"last words")
    hub.close(*NODE, session)
    with pytest.raises(SessionEnded, match="node has left"):
        hub.send(*OPERATOR, session, 0, False, 0, b"x")
    assert hub.receive(*OPERATOR, session, 0, 100, 0) == (b"last words", True)


@pytest.mark.parametrize(("side", "who"), [OPERATOR, NODE])
def test_who_has_left_takes_no_more_part(session: str, hub: SessionHub, side: Side, who: str) -> None:
    hub.close(side, who, session)
    with pytest.raises(SessionEnded, match=f"its {side} has left"):
        hub.receive(side, who, session, 0, 100, 0)
    with pytest.raises(SessionEnded, match=f"its {side} has left"):
        hub.send(side, who, session, 0, False, 0, b"x")


def test_who_leaves_before_the_answer_ends_it(hub: SessionHub) -> None:
    session = opened(hub, None)
    hub.close(*OPERATOR, session)
    assert hub.calls("n1") == []
    with pytest.raises(SessionEnded):
        hub.answer("n1", session, ANSWER)


@pytest.mark.parametrize("leaves", Side)
def test_who_stays_when_the_other_has_left_does_not_keep_the_session(
    session: str, hub: SessionHub, clock: Clock, leaves: Side
) -> None:
    gone, stays = (NODE, OPERATOR) if leaves is Side.NODE else (OPERATOR, NODE)
    hub.close(*gone, session)
    for _ in range(int(LEAVING_SECONDS)):
        clock.now += 1
        hub.sweep()
        assert hub.receive(*stays, session, 0, 100, 0) == (b"", True)
    clock.now += 1
    hub.sweep()
    with pytest.raises(SessionEnded, match=f"{leaves} has left"):
        heard(hub, stays, session, 0)


def test_a_request_that_was_given_up_gets_nothing_of_what_comes_later(
    session: str, hub: SessionHub
) -> None:
    with ThreadPoolExecutor() as pool:
        late = pool.submit(hub.receive, *NODE, session, 0, 1000, 10)
        while not hub._sessions[session].present[Side.NODE]:
            threading.Event().wait(0.001)
        with hub._changed:  # the request waits, and cannot go on while this lock is held
            hub.send(*OPERATOR, session, 0, False, 0, b"one")
            assert heard(hub, NODE, session, 3) == b""
            hub.send(*OPERATOR, session, 3, False, 0, b"two")
        with pytest.raises(Conflict):
            late.result(10)
    assert heard(hub, NODE, session, 3) == b"two"


@pytest.mark.parametrize("silent", Side)
def test_a_side_that_is_silent_has_gone(
    session: str, hub: SessionHub, clock: Clock, silent: Side
) -> None:
    other = NODE if silent is Side.OPERATOR else OPERATOR
    clock.now += SILENT_SECONDS
    heard(hub, other, session, 0)
    assert hub.sweep() == 1
    assert heard(hub, other, session, 0) == b""
    clock.now += 1
    hub.sweep()
    with pytest.raises(SessionEnded, match=f"{silent} made no request"):
        heard(hub, other, session, 0)
    clock.now += REMEMBERED_SECONDS + 1
    assert hub.sweep() == 0


def test_there_is_a_limit(hub: SessionHub) -> None:
    sessions = [opened(hub) for _ in range(MAX_SESSIONS)]
    with pytest.raises(Unavailable, match="logged in"):
        opened(hub)
    hub.close(*OPERATOR, sessions[0])
    hub.close(*NODE, sessions[0])
    opened(hub)


def test_processes_share_one_hub(tmp_path: Path) -> None:
    first, second = SessionClient(tmp_path / "run", 4), SessionClient(tmp_path / "run", 4)
    assert second.calls("n1") == []
    session = first.open("ada", "n1", "0" * 32, 1, KEY)
    (call,) = second.calls("n1")
    assert call.id == session
    second.answer("n1", session, ANSWER)
    assert first.await_answer("ada", session, 5) == ANSWER
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(second.receive, *NODE, session, 0, 10.0)
        assert first.send(*OPERATOR, session, 0, b"\0\xff", True) == 2
        assert got.result(10) == (b"\0\xff", True)
    first.close(*OPERATOR, session)
    second.close(*NODE, session)
    with pytest.raises(SessionEnded, match="has left"):
        second.receive(*NODE, session, 0, 0)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"sessions.sock", "sessions.lock"}
    assert (tmp_path / "run" / "sessions.sock").stat().st_mode & 0o077 == 0


def test_where_too_many_wait_one_more_is_answered_soon(tmp_path: Path) -> None:
    sessions = SessionClient(tmp_path / "run", 1)
    session = sessions.open("ada", "n1", "0" * 32, 1, KEY)
    sessions.answer("n1", session, ANSWER)
    begun = threading.Event()

    def wait() -> tuple[bytes, bool]:
        begun.set()
        return sessions.receive(*NODE, session, 0, 30.0)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        begun.wait(10)
        while sessions._waiting.acquire(blocking=False):
            sessions._waiting.release()
        assert sessions.receive(*OPERATOR, session, 0, 30.0) == (b"", False)
        assert not waiting.done()
        sessions.send(*OPERATOR, session, 0, b"x", False)
        assert waiting.result(10) == (b"x", False)


def test_the_look_for_silent_sides_ends_with_the_last_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_hub, "SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(session_hub, "REMEMBERED_SECONDS", 0.0)
    hub = SessionHub()
    before = set(threading.enumerate())
    session = opened(hub, None)
    (look,) = set(threading.enumerate()) - before
    hub.close(*OPERATOR, session)
    look.join(10)
    assert not look.is_alive()
    opened(hub, None)
