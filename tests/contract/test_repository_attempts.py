"""What agents may report, in which order."""

from __future__ import annotations

import io
import secrets

import pytest

from repository.service import Repository
from tests.kit.repository_jobs import bring, claim, one, refused, states, told
from vmjobs.errors import (
    AttemptSuperseded,
    Conflict,
    InvalidRequest,
    JobFinal,
    NotFound,
    PayloadTooLarge,
)
from vmjobs.model import (
    MIB,
    AttemptClaim,
    HypervisorKind,
    JobState,
    Output,
    ReasonCode,
    RejectedEntry,
    StreamName,
)

pytestmark = pytest.mark.in_process

S = JobState
OUT = StreamName.OUT


@pytest.mark.both_databases
def test_a_job_from_claim_to_completion(repository: Repository) -> None:
    job = one(repository)
    attempt = claim(repository, job.id)
    bring(repository, job.id, attempt, S.BOOTING)
    running = {
        "hypervisor": HypervisorKind.UML,
        "seconds": {"staging": 0.5, "booting": 1.5},
        "bytes": {"image": 5, "memory": 100},
        "cpu_seconds": 1.25,
    }
    repository.attempts.report(job.id, attempt, told(S.RUNNING).model_copy(update=running))
    repository.attempts.report(job.id, attempt, told(S.COLLECTING))
    ended = {
        "seconds": {"running": 2.0},
        "bytes": {"memory": 2**40, "output": 0},
        "cpu_seconds": 2.5,
        "rejected": (RejectedEntry(path="x", why="y"),),
    }
    success = told(S.COMPLETED, ReasonCode.SUCCEEDED, 0)
    repository.attempts.report(job.id, attempt, success.model_copy(update=ended))
    done = repository.jobs.get(job.id)
    assert done.state is S.COMPLETED
    assert done.exit is not None
    assert done.exit.ok
    assert (done.node, done.hypervisor, done.attempts) == ("node1", HypervisorKind.UML, 1)
    assert done.seconds.pop("queued") >= 0
    assert done.seconds == {"staging": 0.5, "booting": 1.5, "running": 2.0}
    assert done.bytes == {"image": 5, "memory": 2**40, "output": 0}
    assert done.cpu_seconds == 2.5
    assert done.rejected == (RejectedEntry(path="x", why="y"),)
    assert states(repository, job.id) == [
        "QUEUED", "QUEUED", "STAGING", "BOOTING", "RUNNING", "COLLECTING", "COMPLETED",
    ]  # fmt: skip
    events = repository.jobs.events(job.id)
    assert [e.seq for e in events] == list(range(1, 8))
    assert [e.time for e in events] == sorted(e.time for e in events)
    assert {e.attempt for e in events[1:]} == {attempt}
    assert repository.jobs.events(job.id, after=5) == events[5:]


def test_reports_follow_the_table(repository: Repository) -> None:
    job = one(repository)
    attempt = claim(repository, job.id)

    def say(state: S) -> None:
        repository.attempts.report(job.id, attempt, told(state))

    for early in (S.BOOTING, S.RUNNING, S.COMPLETED):
        refused(Conflict, lambda state=early: say(state))
    bring(repository, job.id, attempt, S.RUNNING)
    refused(Conflict, lambda: say(S.COMPLETED), lambda: say(S.BOOTING))
    refused(InvalidRequest, lambda: say(S.QUEUED), lambda: say(S.HELD))
    say(S.SUSPENDED)
    say(S.RUNNING)
    assert repository.jobs.get(job.id).state is S.RUNNING


def test_a_repeated_report_is_no_error(repository: Repository) -> None:
    job = one(repository)
    attempt = claim(repository, job.id)
    for state in (S.STAGING, S.BOOTING, S.FAILED):
        for _ in range(2):
            repository.attempts.report(job.id, attempt, told(state, ReasonCode.BOOT_FAILED))
    assert states(repository, job.id)[2:] == ["STAGING", "BOOTING", "FAILED"]


def test_a_final_job_takes_nothing_more(repository: Repository) -> None:
    job = one(repository)
    attempt = claim(repository, job.id)
    repository.attempts.report(job.id, attempt, told(S.FAILED, ReasonCode.IMAGE_REJECTED))
    refused(
        JobFinal,
        lambda: repository.attempts.report(job.id, attempt, told(S.COMPLETED)),
        lambda: repository.attempts.append_stream(job.id, attempt, OUT, 0, b"x"),
        lambda: repository.attempts.put_output(job.id, attempt, "f", io.BytesIO(b"x"), 1),
        lambda: repository.attempts.claim(job.id, AttemptClaim(attempt=attempt, node="node1")),
        lambda: claim(repository, job.id),
    )
    assert repository.jobs.get(job.id).reason.code is ReasonCode.IMAGE_REJECTED


@pytest.mark.both_databases
def test_a_newer_claim_fences_off_the_older(repository: Repository) -> None:
    job = one(repository)
    old = claim(repository, job.id)
    bring(repository, job.id, old, S.RUNNING)
    repository.attempts.append_stream(job.id, old, OUT, 0, b"old")
    repository.attempts.put_output(job.id, old, "f", io.BytesIO(b"old"), 3)
    new = claim(repository, job.id, "node2")
    refused(
        AttemptSuperseded,
        lambda: repository.attempts.report(job.id, old, told(S.COLLECTING)),
        lambda: repository.attempts.append_stream(job.id, old, OUT, 3, b"x"),
        lambda: repository.attempts.put_output(job.id, old, "f", io.BytesIO(b"x"), 1),
        lambda: repository.attempts.claim(job.id, AttemptClaim(attempt=old, node="node1")),
    )
    assert states(repository, job.id)[-3:] == ["PREEMPTED", "QUEUED", "QUEUED"]
    assert repository.jobs.events(job.id)[-2].reason.code is ReasonCode.EVICTED
    bring(repository, job.id, new, S.STAGING)
    seen = repository.jobs.get(job.id)
    assert (seen.state, seen.attempts, seen.node, seen.outputs) == (S.STAGING, 2, "node2", ())
    assert repository.jobs.open_stream(job.id, OUT).size == 0


def test_a_restarted_agent_takes_its_job_anew(repository: Repository) -> None:
    job = one(repository)
    bring(repository, job.id, claim(repository, job.id), S.BOOTING)
    claim(repository, job.id)
    assert repository.jobs.events(job.id)[-2].reason.code is ReasonCode.AGENT_RESTARTED


def test_a_repeated_claim_is_the_same_claim(repository: Repository) -> None:
    job = one(repository)
    wish = AttemptClaim(attempt=secrets.token_hex(16), node="node1")
    first = repository.attempts.claim(job.id, wish)
    bring(repository, job.id, wish.attempt, S.STAGING)
    assert repository.attempts.claim(job.id, wish) == first
    assert repository.jobs.get(job.id).state is S.STAGING
    another = one(repository).id
    refused(Conflict, lambda: repository.attempts.claim(another, wish))
    refused(NotFound, lambda: repository.attempts.report(another, wish.attempt, told(S.STAGING)))


def test_a_job_that_is_being_canceled_cannot_be_claimed(repository: Repository) -> None:
    job = one(repository)
    repository.condor_sync.begin_dispatch(1)
    assert repository.job_actions.cancel(job.id).state is S.CANCELING
    refused(Conflict, lambda: claim(repository, job.id))


def test_streams_grow_up_to_the_limit_of_the_settings(repository: Repository) -> None:
    job = one(repository)
    attempt = claim(repository, job.id)
    for offset, data in ((0, b"hello "), (3, b"XXXworld"), (11, b"y" * 2000), (2011, b"z")):
        repository.attempts.append_stream(job.id, attempt, OUT, offset, data)
    stream = repository.jobs.open_stream(job.id, OUT)
    assert (stream.size, b"".join(stream.chunks(0, 12))) == (1000, b"hello worldy")
    assert repository.jobs.open_stream(job.id, StreamName.CONSOLE).size == 0


@pytest.mark.both_databases
def test_outputs(repository: Repository) -> None:
    job = one(repository, disk=1)
    attempt = claim(repository, job.id)

    def put(path: str, data: bytes, size: int) -> Output:
        return repository.attempts.put_output(job.id, attempt, path, io.BytesIO(data), size)

    first, second = put("d/f", b"one", 3), put("d/f", b"two2", 4)
    assert first.digest != second.digest
    assert repository.jobs.get(job.id).outputs == (second,)
    assert repository.jobs.outputs(job.id).outputs == (second,)
    with repository.jobs.open_output(job.id, "d/f") as reader:
        assert b"".join(reader) == b"two2"
    for path in ("../f", "/f", "a//b", "", "a\0", "\ud800", "x" * 256):
        refused(InvalidRequest, lambda path=path: put(path, b"x", 1))
    refused(InvalidRequest, lambda: put("g", b"abc", 2), lambda: put("g", b"abc", 4))
    refused(PayloadTooLarge, lambda: put("g", bytes(MIB), MIB))
    assert put("empty", b"", 0).size == 0
    refused(NotFound, lambda: repository.jobs.open_output(job.id, "g"))
    put("d/f", bytes(MIB), MIB)


def test_preempted_by_the_agent_then_claimed_elsewhere(repository: Repository) -> None:
    job = one(repository)
    attempt = claim(repository, job.id)
    bring(repository, job.id, attempt, S.RUNNING)
    repository.attempts.report(job.id, attempt, told(S.PREEMPTED, ReasonCode.EVICTED))
    claim(repository, job.id, "node2")
    assert states(repository, job.id)[-3:] == ["PREEMPTED", "QUEUED", "QUEUED"]


def test_a_job_that_its_nodes_fail_is_tried_five_times(repository: Repository) -> None:
    """An eviction does not count as a try."""
    job = one(repository)
    ends = [(S.PREEMPTED, ReasonCode.EVICTED), *4 * [(S.PREEMPTED, ReasonCode.NODE_FAILED)]]
    left = []
    for number, (state, code) in enumerate(ends):
        wish = AttemptClaim(attempt=secrets.token_hex(16), node="n")
        claimed = repository.attempts.claim(job.id, wish)
        assert claimed == repository.attempts.claim(job.id, wish), "the answer to the first was lost"
        left.append(claimed.tries_left)
        bring(repository, job.id, claimed.attempt, S.STAGING)
        for _ in range(2):
            repository.attempts.report(job.id, claimed.attempt, told(state, code))
        assert states(repository, job.id)[-1] == "PREEMPTED", number
    last = repository.attempts.claim(job.id, AttemptClaim(attempt=secrets.token_hex(16), node="n"))
    assert [*left, last.tries_left] == [4, 4, 3, 2, 1, 0]
