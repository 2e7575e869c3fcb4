"""The upload of a job's saved VM fails, waits or is given up: agent and repository."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from images.transfer.file_transfer import ChunkedFileTransfer
from tests.kit.saved_jobs import Place, place
from tests.kit.waiting import wait_until
from vmjobs.agent.vm.events import LeaseLost, RunEvent, SignalSent
from vmjobs.errors import QuotaExceeded, Unavailable
from vmjobs.file_transfer import ContentReceiver
from vmjobs.model import JobState, ReasonCode

__all__ = ["place"]

S, C = JobState, ReasonCode


@pytest.mark.soak
def test_a_repository_that_does_not_take_it_costs_what_was_done_and_no_more(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.submit()
    first = place.node()
    place.counts()

    def refuse(*_: object) -> None:
        raise QuotaExceeded("the quota is used up")

    with monkeypatch.context() as patch:
        patch.setattr("repository.images.segments.check_quota", refuse)
        first.signal(15)
        left = first.ended()
    assert (left.state, left.reason.code) == (S.PREEMPTED, C.EVICTED)
    assert "checkpoint was not stored" in left.reason.message
    place.completes()


class WatchedTransfer(ChunkedFileTransfer):
    """Calls ``before`` before it sends a file."""

    def __init__(self, before: Callable[[Callable[[], None]], None]) -> None:
        self._before = before

    def send(
        self, path: Path, receiver: ContentReceiver, check_cancelled: Callable[[], None]
    ) -> tuple[str, int]:
        self._before(check_cancelled)
        return super().send(path, receiver, check_cancelled)


@pytest.mark.soak
def test_a_repository_that_is_away_for_a_while_gets_it_all_the_same(place: Place) -> None:
    missed: list[int] = []

    def away(_heed: Callable[[], None]) -> None:
        missed.append(1)
        if len(missed) == 3:
            raise Unavailable("api", "it does not answer")

    place.submit()
    assert place.leaves(file_transfer=WatchedTransfer(away)).reason.code is C.CHECKPOINTED
    assert len(missed) > 3
    assert place.completes().run.choice.resumed is not None


@pytest.mark.soak_for("why1")
@pytest.mark.parametrize("why", [SignalSent(2), LeaseLost()])
def test_whoever_is_told_to_end_while_its_vm_is_sent_sends_no_more(place: Place, why: RunEvent) -> None:
    sending = threading.Event()

    def wait(check_cancelled: Callable[[], None]) -> None:
        sending.set()
        wait_until(lambda: check_cancelled() is not None, 120, "the upload to be given up")

    place.submit()
    node = place.node(file_transfer=WatchedTransfer(wait))
    place.counts()
    node.signal(15)
    assert sending.wait(120)
    node.run.request.event_queue.put(why)
    left = node.ended()
    assert (left.state, left.reason.code) == (S.PREEMPTED, C.EVICTED)
    assert place.checkpoint() is None
