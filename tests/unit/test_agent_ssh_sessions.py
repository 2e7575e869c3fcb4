"""SSH sessions that wait for a node: each is answered once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vmjobs.agent.cluster_vms import ssh_sessions as calling
from vmjobs.agent.cluster_vms.ssh_sessions import SshSessionHandler
from vmjobs.agent.guest.ssh_relay import SshSession
from vmjobs.cluster.ssh_session import PendingSession, SessionAnswer
from vmjobs.errors import LoginUnavailable
from vmjobs.relay import ByteStream


def call(number: int) -> PendingSession:
    key = "ssh-ed25519 " + "K" * 68
    return PendingSession(id=f"{number:032x}", member="0" * 32, incarnation=1, key=key)


class Service:
    def __init__(self) -> None:
        self.answered: list[str] = []

    def answer(self, session: str, answer: SessionAnswer) -> None:
        assert answer.refused == "not today"
        self.answered.append(session)

    def stream(self, session: str) -> ByteStream:
        raise AssertionError(f"{session} was refused")


def refuse(member: str, incarnation: int, key: str, seconds: float) -> SshSession:
    raise LoginUnavailable("not today")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(_name: str, work: Callable[..., None], *words: object) -> None:
        work(*words)

    monkeypatch.setattr(calling, "start_thread", begin)


def test_a_call_that_is_told_of_again_is_not_answered_again() -> None:
    service = Service()
    callers = SshSessionHandler(service, refuse)
    for told in ((call(1),), (call(1), call(2)), (), (call(1), call(2))):
        callers.accept(told)
    assert service.answered == [call(1).id, call(2).id]


def test_calls_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "MAX_REMEMBERED", 2)
    service = Service()
    callers = SshSessionHandler(service, refuse)
    for number in (1, 2, 3, 2, 3, 1):
        callers.accept((call(number),))
    assert service.answered == [call(number).id for number in (1, 2, 3, 1)]
