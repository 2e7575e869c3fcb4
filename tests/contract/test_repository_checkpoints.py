"""Checkpoints of jobs' VMs in the repository."""

from __future__ import annotations

from dataclasses import replace

import pytest

from images.content import ContentLayout
from images.segment import decode_segment
from repository.images import LIBRARY, Viewer
from repository.service import Repository
from tests.kit.checkpoints import MEMORY, saved
from tests.kit.repository_images import MIB, stored, sweeper
from tests.kit.repository_jobs import bring, claim, one, push, refused, send, told
from vmjobs.errors import (
    AttemptSuperseded,
    Conflict,
    InvalidRequest,
    InvalidSpec,
    JobFinal,
    MissingChunks,
    NotFound,
)
from vmjobs.model import AttemptClaim, Checkpoint, Job, JobState, ReasonCode, SavedFile

pytestmark = pytest.mark.in_process

S = JobState
ADA = Viewer("ada")


def running(repository: Repository, **changes: object) -> tuple[Job, str]:
    job = one(repository, checkpoint=True, hypervisor="qemu", **changes)
    attempt = claim(repository, job.id)
    bring(repository, job.id, attempt, S.RUNNING)
    return job, attempt


def upload(repository: Repository, job: Job, data: bytes = MEMORY) -> tuple[str, ContentLayout]:
    """Upload data with the job's own token."""
    who = replace(ADA, job=job.id)
    opened = repository.uploads.begin(who, len(data)).id
    return opened, send(repository, who, opened, data)


def kept(repository: Repository) -> tuple[Job, str, ContentLayout]:
    """Return a job with a checkpoint of its VM."""
    job, attempt = running(repository)
    opened, layout = upload(repository, job)
    repository.attempts.keep_checkpoint(job.id, attempt, opened, saved(attempt, layout))
    return job, attempt, layout


def again(repository: Repository, job: Job) -> Checkpoint | None:
    """Claim another attempt; return the checkpoint it resumes from."""
    return repository.attempts.claim(job.id, AttemptClaim(attempt="c" * 32, node="node2")).checkpoint


@pytest.mark.both_databases
def test_the_next_attempt_goes_on_from_it(repository: Repository) -> None:
    job, attempt, layout = kept(repository)
    repository.attempts.report(job.id, attempt, told(S.PREEMPTED, ReasonCode.CHECKPOINTED))
    assert again(repository, job) == saved(attempt, layout)
    assert (
        ContentLayout.parse(repository.checkpoints.layout(job.id, layout.digest), layout.digest)
        == layout
    )
    data = b""
    for digest in layout.segments:
        with repository.checkpoints.open_segment(job.id, digest) as reader:
            data += decode_segment(reader.read(), digest)
    assert data == MEMORY


def test_a_job_that_was_not_saved_begins_anew(repository: Repository) -> None:
    job, _ = running(repository)
    assert again(repository, job) is None


def test_it_belongs_to_its_job_alone(repository: Repository) -> None:
    _, _, layout = kept(repository)
    other, _ = running(repository)
    for wrong in (other.id, "0" * 32):
        refused(
            NotFound,
            lambda wrong=wrong: repository.checkpoints.layout(wrong, layout.digest),
            lambda wrong=wrong: repository.checkpoints.open_segment(wrong, layout.segments[0]),
        )
    assert again(repository, other) is None


@pytest.mark.both_databases
def test_it_stays_through_collections_until_the_job_has_ended(repository: Repository) -> None:
    before = stored(repository)
    job, attempt, layout = kept(repository)
    sweeper(repository).garbage_collector.collect()
    assert repository.checkpoints.layout(job.id, layout.digest)
    repository.attempts.report(job.id, attempt, told(S.FAILED, ReasonCode.NODE_FAILED))
    refused(NotFound, lambda: repository.checkpoints.layout(job.id, layout.digest))
    sweeper(repository).garbage_collector.collect()
    assert stored(repository) == before


def test_the_last_one_counts(repository: Repository) -> None:
    job, attempt, first = kept(repository)
    changed = bytearray(MEMORY)
    changed[MIB] ^= 1
    opened, second = upload(repository, job, bytes(changed))
    repository.attempts.keep_checkpoint(job.id, attempt, opened, saved(attempt, second, ran=30.0))
    found = again(repository, job)
    assert found is not None
    assert found.ran == 30.0
    refused(NotFound, lambda: repository.checkpoints.layout(job.id, first.digest))


def test_what_was_not_brought_is_not_kept(repository: Repository) -> None:
    """A digest is not enough: with it, one could read another user's data."""
    job, attempt, layout = kept(repository)
    theirs, _ = upload(repository, running(repository)[0])
    own = repository.uploads.begin(ADA, 1 << 30).id
    send(repository, ADA, own, MEMORY)
    empty = repository.uploads.begin(replace(ADA, job=job.id), 1).id
    for wrong in (empty, own, theirs, "0" * 32):
        checkpoint = saved(attempt, layout, ran=30.0)
        refused(
            MissingChunks,
            lambda w=wrong, c=checkpoint: repository.attempts.keep_checkpoint(job.id, attempt, w, c),
        )


def test_what_is_refused(repository: Repository) -> None:
    job, attempt = running(repository)
    opened, layout = upload(repository, job)
    wrong = SavedFile(name="machine.memory", size=1, digest=layout.digest)
    for checkpoint, why in (
        (saved(attempt, layout, files=(wrong,)), "has 3145728 bytes"),
        (saved("d" * 32, layout), "does not belong to job"),
        (saved(running(repository)[1], layout), "does not belong to job"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            repository.attempts.keep_checkpoint(job.id, attempt, opened, checkpoint)
    again(repository, job)
    mine = saved(attempt, layout)
    refused(
        AttemptSuperseded, lambda: repository.attempts.keep_checkpoint(job.id, attempt, opened, mine)
    )


def test_a_job_that_is_not_to_be_saved_is_not(repository: Repository) -> None:
    job = one(repository)
    attempt = claim(repository, job.id)
    opened, layout = upload(repository, job)
    with pytest.raises(Conflict, match="takes no checkpoint"):
        repository.attempts.keep_checkpoint(job.id, attempt, opened, saved(attempt, layout))
    ended, last = running(repository)
    repository.attempts.report(ended.id, last, told(S.FAILED, ReasonCode.NODE_FAILED))
    refused(
        JobFinal,
        lambda: repository.attempts.keep_checkpoint(ended.id, last, opened, saved(last, layout)),
    )


def test_what_no_run_can_go_on_from_is_given_up(repository: Repository) -> None:
    """The first failure may have been the node's fault."""
    job, attempt, layout = kept(repository)
    for node in "cd":
        for _ in range(2):  # the answer was lost
            repository.attempts.report(job.id, attempt, told(S.PREEMPTED, ReasonCode.NOT_RESUMED))
        attempt = node * 32
        found = repository.attempts.claim(job.id, AttemptClaim(attempt=attempt, node=node)).checkpoint
        assert (found is None) == (node == "d")
        repository.attempts.report(job.id, attempt, told(S.STAGING))
    refused(NotFound, lambda: repository.checkpoints.layout(job.id, layout.digest))


def test_a_job_has_one_upload_at_a_time(repository: Repository) -> None:
    """An upload that a node abandoned must not count against the owner's quota for hours."""
    job, _ = running(repository)
    first, _ = upload(repository, job)
    upload(repository, job)
    refused(NotFound, lambda: repository.uploads.get(replace(ADA, job=job.id), first))


def test_uploads_of_jobs_and_of_people_do_not_mix(repository: Repository) -> None:
    job, _ = running(repository)
    other, _ = running(repository)
    opened, _ = upload(repository, job)
    for who in (ADA, replace(ADA, job=other.id)):
        refused(
            NotFound,
            lambda who=who: repository.uploads.get(who, opened),
            lambda who=who: repository.uploads.drop(who, opened),
            lambda who=who: send(repository, who, opened, MEMORY),
        )
    for _ in range(repository.config.max_open_uploads):  # the most that a user may have
        repository.uploads.begin(ADA, 1)
    refused(Conflict, lambda: repository.uploads.begin(ADA, 1))
    upload(repository, other)


def test_a_guest_that_takes_no_other_token_is_not_saved(repository: Repository) -> None:
    """A resumed VM could not get its new token, and the job would start again."""
    for guest in (None, {"contract": 2}):
        name = "old" if guest else "older"
        wish = {"namespace": LIBRARY, "name": name, "visibility": "public"}
        push(repository, Viewer("root", admin=True), b"x", b"y", {"guest": guest}, **wish)
        asked = {"image": f"library/{name}", "checkpoint": True, "hypervisor": "qemu"}
        with pytest.raises(InvalidSpec) as refused:
            one(repository, **asked)
        assert [(f.field, f.code) for f in refused.value.faults] == [("checkpoint", "cannot_save")]
        one(repository, **asked, network="none")
