"""Checkpoints of transparent jobs in the repository."""

from __future__ import annotations

import pytest

from images.content import ContentLayout
from repository.images import Viewer
from repository.jobs.condor_jobs import OWNER_PREFIX
from repository.service import Repository
from tests.kit.checkpoints import MEMORY, saved
from tests.kit.noise import noise
from tests.kit.repository_images import MIB, stored, sweeper
from tests.kit.repository_jobs import refused, send, with_settings
from vmjobs.errors import (
    AttemptSuperseded,
    Forbidden,
    InvalidRequest,
    MissingChunks,
    NotFound,
    QuotaExceeded,
)
from vmjobs.model import Checkpoint, NetworkMode, VmSpec
from vmjobs.wire import CondorJobClaim

pytestmark = pytest.mark.in_process

JOB, OTHER = "htc" + "a" * 29, "htc" + "b" * 29
FIRST, SECOND = "1" * 32, "2" * 32
MAKING = VmSpec(
    named="hep:1",
    image="sha256:" + "c" * 64,
    door="d" * 32,
    cpus=1,
    memory=256,
    disk=1024,
    network=NetworkMode.REPOSITORY,
)


def begin(repository: Repository, attempt: str = FIRST, job: str = JOB) -> Checkpoint | None:
    claim = CondorJobClaim(attempt=attempt, owner="ada@grid")
    return repository.condor_jobs.claim(job, claim)


def upload(repository: Repository, data: bytes = MEMORY, job: str = JOB) -> tuple[str, ContentLayout]:
    who = Viewer(f"{OWNER_PREFIX}ada@grid", job=job, image="")
    opened = repository.uploads.begin(who, len(data)).id
    return opened, send(repository, who, opened, data)


def kept(repository: Repository, data: bytes = MEMORY, making: VmSpec = MAKING) -> Checkpoint:
    """Store a checkpoint in its job's first run."""
    begin(repository)
    opened, layout = upload(repository, data)
    checkpoint = saved(FIRST, layout, making=making)
    repository.condor_jobs.keep_checkpoint(JOB, FIRST, opened, checkpoint)
    return checkpoint


@pytest.mark.both_databases
def test_the_next_run_goes_on_from_it(repository: Repository) -> None:
    assert begin(repository) is None
    checkpoint = kept(repository)
    assert begin(repository, SECOND) == checkpoint
    (digest,) = (file.digest for file in checkpoint.files if file.digest)
    assert repository.checkpoints.layout(JOB, digest)
    refused(NotFound, lambda: repository.checkpoints.layout(OTHER, digest))


def test_a_run_that_was_replaced_keeps_nothing_and_ends_nothing(repository: Repository) -> None:
    """Its node was disconnected, and does not know of the new run yet."""
    checkpoint = kept(repository)
    begin(repository, SECOND)
    opened, layout = upload(repository)
    late = saved(FIRST, layout, making=MAKING, ran=99.0)
    refused(
        AttemptSuperseded,
        lambda: repository.condor_jobs.keep_checkpoint(JOB, FIRST, opened, late),
        lambda: repository.condor_jobs.record_resume_failure(JOB, FIRST),
        lambda: repository.condor_jobs.end(JOB, FIRST),
    )
    assert begin(repository, SECOND) == checkpoint


def test_a_job_has_one_owner(repository: Repository) -> None:
    checkpoint = kept(repository)
    his = CondorJobClaim(attempt=SECOND, owner="bob@grid")
    refused(Forbidden, lambda: repository.condor_jobs.claim(JOB, his))
    repository.condor_jobs.record_resume_failure(JOB, FIRST)  # that attempt is still the current one
    assert begin(repository, SECOND) == checkpoint


def test_a_vm_keeps_its_name_and_no_other_may_have_it(repository: Repository) -> None:
    kept(repository)
    begin(repository, SECOND)
    opened, layout = upload(repository)
    with pytest.raises(InvalidRequest, match="does not belong to job"):
        repository.condor_jobs.keep_checkpoint(
            JOB, SECOND, opened, saved("9" * 32, layout, making=MAKING)
        )
    again = saved(FIRST, layout, making=MAKING, ran=99.0)
    repository.condor_jobs.keep_checkpoint(JOB, SECOND, opened, again)
    repository.condor_jobs.keep_checkpoint(JOB, SECOND, opened, again)  # the answer was lost
    assert begin(repository, "3" * 32) == again


def test_what_is_refused(repository: Repository) -> None:
    begin(repository)
    opened, layout = upload(repository)
    keep, checkpoint = repository.condor_jobs.keep_checkpoint, saved(FIRST, layout, making=MAKING)
    with pytest.raises(InvalidRequest, match="no VM specification"):
        keep(JOB, FIRST, opened, saved(FIRST, layout))
    theirs, _ = upload(repository, job=OTHER)
    refused(MissingChunks, lambda: keep(JOB, FIRST, theirs, checkpoint))
    refused(NotFound, lambda: keep(OTHER, FIRST, opened, checkpoint))


def test_the_end_leaves_nothing(repository: Repository) -> None:
    before = stored(repository)
    kept(repository)
    sweeper(repository).garbage_collector.collect()
    assert stored(repository) != before
    repository.condor_jobs.end(JOB, FIRST)
    assert not repository.condor_jobs.exists(JOB)
    sweeper(repository).garbage_collector.collect()
    assert stored(repository) == before


@pytest.mark.both_databases
def test_a_job_of_which_nobody_tells_is_forgotten_in_the_end(repository: Repository) -> None:
    """Its user has removed it from the queue: HTCondor informs no node of that."""
    kept(repository)
    with_settings(repository, checkpoint_seconds=3600).garbage_collector.collect()
    assert repository.condor_jobs.exists(JOB)
    impatient = with_settings(repository, checkpoint_seconds=-1).garbage_collector
    impatient.collect(dry_run=True)
    assert repository.condor_jobs.exists(JOB)
    impatient.collect()
    assert not repository.condor_jobs.exists(JOB)
    assert begin(repository, SECOND) is None


def test_what_no_run_can_go_on_from_is_given_up(repository: Repository) -> None:
    checkpoint = kept(repository)
    assert begin(repository, SECOND) == checkpoint
    for _ in range(2):  # the answer was lost
        repository.condor_jobs.record_resume_failure(JOB, SECOND)
    assert begin(repository, "3" * 32) == checkpoint
    repository.condor_jobs.record_resume_failure(JOB, "3" * 32)
    assert begin(repository, "4" * 32) is None


def test_it_counts_against_a_quota_of_its_owner_as_htcondor_knows_him(repository: Repository) -> None:
    kept(repository)
    repository = with_settings(repository, image_quota=4)
    begin(repository, job=OTHER)
    with pytest.raises(QuotaExceeded, match=f"{OWNER_PREFIX}ada@grid"):
        upload(repository, noise(3 * MIB, seed=8), OTHER)
    ada = Viewer("ada@grid")  # a user of the service has another quota
    send(repository, ada, repository.uploads.begin(ada, MIB).id, noise(MIB, seed=9))
