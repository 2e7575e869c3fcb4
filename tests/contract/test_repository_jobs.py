"""Submitting, reading and changing jobs."""

from __future__ import annotations

import io
from datetime import UTC

import pytest

from repository.broker import TaskPublisher
from repository.service import Repository, open_repository
from tests.kit.cluster_nodes import node_of
from tests.kit.repository_jobs import (
    ADMIN,
    bring,
    claim,
    digest_of,
    one,
    refused,
    states,
    submission,
    told,
)
from vmjobs.config import Config
from vmjobs.errors import (
    DigestMismatch,
    IdempotencyConflict,
    InvalidRequest,
    InvalidSpec,
    NotFound,
    PayloadTooLarge,
    Unavailable,
)
from vmjobs.job_sets import JobSelection
from vmjobs.model import (
    HypervisorInfo,
    HypervisorKind,
    JobAction,
    JobState,
    Node,
    ReasonCode,
    StreamName,
)

pytestmark = pytest.mark.in_process


def node(name: str = "node1", **changes: object) -> Node:
    broken = HypervisorInfo(kind=HypervisorKind.KVM, works=False)
    works = HypervisorInfo(kind=HypervisorKind.UML, works=True)
    values = {"cpus": 2, "memory": 2048, "disk": 1500, "hypervisors": [works, broken], **changes}
    return node_of(name, **values)


@pytest.mark.both_databases
def test_an_array_is_stored_and_published(repository: Repository) -> None:
    published: list[str] = []
    done = repository.submissions.submit("ada", submission(3), publish=published.append)
    assert done.created
    assert published == [done.array]
    found = [(j.index, j.count, j.state) for j in done.jobs]
    assert found == [(n, 3, JobState.QUEUED) for n in range(3)]
    job = repository.jobs.get(done.jobs[1].id, "ada")
    assert job == done.jobs[1]
    assert job.image_digest == repository.catalog.resolve(ADMIN, "hep:latest")
    assert job.created.tzinfo == UTC
    (event,) = repository.jobs.events(job.id)
    assert (event.seq, event.state, event.reason.code) == (1, JobState.QUEUED, ReasonCode.SUBMITTED)


def test_nothing_is_stored_when_the_broker_is_down(repository: Repository) -> None:
    def publish(array: str) -> None:
        raise Unavailable("broker", "down")

    with pytest.raises(Unavailable) as caught:
        repository.submissions.submit("ada", submission(), "key", publish)
    assert caught.value.service == "broker"
    assert repository.jobs.page("ada").jobs == ()
    assert repository.submissions.submit("ada", submission(), "key").created


@pytest.mark.both_databases
def test_a_key_submits_once(repository: Repository) -> None:
    published: list[str] = []
    first = repository.submissions.submit("ada", submission(2), "k", published.append)
    again = repository.submissions.submit("ada", submission(2), "k", published.append)
    assert (again.array, again.jobs, again.created) == (first.array, first.jobs, False)
    assert published == [first.array]
    refused(IdempotencyConflict, lambda: repository.submissions.submit("ada", submission(3), "k"))
    assert repository.submissions.submit("eve", submission(3), "k").created
    assert repository.submissions.submit("ada", submission(2)).created
    refused(InvalidRequest, lambda: repository.submissions.submit("ada", submission(), "k" * 256))


def test_every_fault_is_told_at_once(repository: Repository) -> None:
    wrong = {"name": "data", "digest": digest_of(b"never uploaded"), "size": 3}
    limits = {"cpus": 9, "memory": 4097, "disk": 2049, "run_seconds": 86401}
    with pytest.raises(InvalidSpec) as caught:
        one(repository, image="nope", **limits, route="mars", inputs=[wrong])
    assert [f.field for f in caught.value.faults] == [
        "image", "cpus", "memory", "disk", "run_seconds", "route", "inputs.0",
    ]  # fmt: skip
    assert "hep:latest" in caught.value.faults[0].message
    assert repository.jobs.page("ada").jobs == ()


def test_a_digest_names_an_image_too(repository: Repository) -> None:
    digest = repository.catalog.resolve(ADMIN, "hep")
    assert one(repository, image=digest).image_digest == digest
    refused(InvalidSpec, lambda: one(repository, image="sha256:" + "0" * 64))


def test_what_no_live_node_offers_is_refused(repository: Repository) -> None:
    one(repository, cpus=8)  # accepted: no node is known yet
    repository.nodes.put(node())
    with pytest.raises(InvalidSpec) as caught:
        one(repository, cpus=3, memory=3000, disk=1501, hypervisor="kvm")
    assert [f.field for f in caught.value.faults] == ["cpus", "memory", "disk", "hypervisor"]
    one(repository, cpus=1, memory=2048, disk=1500, hypervisor="uml")
    repository.nodes.put(node("node2", cpus=8, memory=512))
    with pytest.raises(InvalidSpec) as caught:
        one(repository, cpus=8, memory=2048)
    assert [(f.field, f.code) for f in caught.value.faults] == [("", "no_node")]


def test_inputs_are_checked_and_read_back(repository: Repository) -> None:
    data = b"x" * 1_000_000
    digest = digest_of(data)
    assert not repository.blob_owners.has("ada", digest)
    assert repository.blob_owners.put("ada", digest, io.BytesIO(data))
    assert not repository.blob_owners.put("ada", digest, io.BytesIO(data))
    assert repository.blob_owners.has("ada", digest)
    with pytest.raises(InvalidSpec) as caught:
        one(repository, inputs=[{"name": "a", "digest": digest, "size": 5}])
    assert caught.value.faults[0].code == "wrong_size"
    for names in (("a", "a/b"), ("x/y/z", "ab", "x/y")):
        with pytest.raises(InvalidSpec) as caught:
            inputs = [{"name": name, "digest": digest, "size": len(data)} for name in names]
            one(repository, inputs=inputs, disk=1024)
        assert [fault.code for fault in caught.value.faults] == ["in_the_way"]
    job = one(repository, inputs=[{"name": "d/a", "digest": digest, "size": len(data)}])
    with repository.jobs.open_input(job.id, "d/a") as reader:
        assert b"".join(reader) == data
    refused(NotFound, lambda: repository.jobs.open_input(job.id, "d/b"))
    wrong = digest_of(b"other")
    refused(DigestMismatch, lambda: repository.blob_owners.put("ada", wrong, io.BytesIO(data)))
    assert not repository.blob_owners.has("ada", wrong)
    refused(InvalidRequest, lambda: repository.blob_owners.has("ada", "sha256:../../etc/passwd"))


@pytest.mark.settings(max_input_size=1)
def test_blobs_have_a_limit(repository: Repository) -> None:
    data = bytes(1024 * 1024 + 1)
    refused(
        PayloadTooLarge, lambda: repository.blob_owners.put("ada", digest_of(data), io.BytesIO(data))
    )


def test_another_owners_job_does_not_exist(repository: Repository) -> None:
    job = one(repository, "ada")
    refused(
        NotFound,
        lambda: repository.jobs.get(job.id, "eve"),
        lambda: repository.jobs.version(job.id, "eve"),
        lambda: repository.jobs.events(job.id, owner="eve"),
        lambda: repository.jobs.outputs(job.id, "eve"),
        lambda: repository.jobs.open_stream(job.id, StreamName.OUT, "eve"),
        lambda: repository.jobs.open_output(job.id, "f", "eve"),
        lambda: repository.job_actions.cancel(job.id, "eve"),
        lambda: repository.jobs.get("0" * 32),
        lambda: repository.job_actions.cancel("0" * 32),
    )
    assert repository.jobs.page("eve").jobs == ()
    assert repository.jobs.get(job.id).state is JobState.QUEUED


@pytest.mark.both_databases
def test_pages_are_stable_while_jobs_come_in(repository: Repository) -> None:
    arrays = [repository.submissions.submit("ada", submission(5)) for _ in range(3)]
    repository.submissions.submit("eve", submission(2))
    newest_first = [j.id for a in reversed(arrays) for j in a.jobs]
    found: list[str] = []
    page = repository.jobs.page("ada", limit=4)
    while True:
        found += [job.id for job in page.jobs]
        if not page.next:
            break
        repository.submissions.submit("ada", submission(1))
        page = repository.jobs.page("ada", limit=4, cursor=page.next)
    assert sorted(found) == sorted(newest_first)
    assert len(repository.jobs.page(None, limit=2000).jobs) == 15 + 2 + 3
    first = repository.jobs.page("ada", array=arrays[0].array).jobs
    assert [j.id for j in first] == [j.id for j in arrays[0].jobs]
    refused(InvalidRequest, lambda: repository.jobs.page("ada", cursor="' OR 1=1"))


def test_the_version_grows_with_every_change(repository: Repository) -> None:
    job = one(repository)
    seen = [repository.jobs.version(job.id, "ada")]
    attempt = claim(repository, job.id)
    seen.append(repository.jobs.version(job.id))
    repository.attempts.report(job.id, attempt, told(JobState.STAGING))
    seen.append(repository.jobs.version(job.id))
    repository.attempts.put_output(job.id, attempt, "f", io.BytesIO(b"1"), 1)
    seen.append(repository.jobs.version(job.id))
    assert seen == sorted(set(seen))
    assert repository.jobs.version(job.id) == seen[-1]


def test_a_job_that_was_never_handed_on_is_canceled_at_once(repository: Repository) -> None:
    job = one(repository)
    published: list[str] = []
    for _ in range(2):
        canceled = repository.job_actions.cancel(job.id, "ada", lambda _, ids: published.extend(ids))
        assert canceled.state is JobState.CANCELED
        assert canceled.reason.code is ReasonCode.USER_CANCELED
    assert published == []


@pytest.mark.both_databases
def test_a_set_of_jobs_is_canceled_together(repository: Repository) -> None:
    waits = repository.submissions.submit("ada", submission(3)).jobs
    handed, other = one(repository), one(repository, "bob")
    running, ended = one(repository), one(repository)
    repository.job_actions.cancel(ended.id)
    repository.condor_sync.begin_dispatch(4)  # the first jobs of both owners
    bring(repository, running.id, claim(repository, running.id), JobState.RUNNING)
    published: list[str] = []

    def cancel(*jobs: str, state: tuple[JobState, ...] = ()) -> dict[str, JobState]:
        selection = JobSelection(jobs=jobs, state=state)
        found = repository.job_actions.change(
            JobAction.CANCEL, selection, "ada", lambda _, ids: published.extend(ids)
        )
        return {job.id: job.state for job in found}

    before = len(repository.jobs.events(handed.id))
    refused(NotFound, lambda: cancel(handed.id, other.id), lambda: cancel(handed.id, "0" * 32, "\0"))
    assert len(repository.jobs.events(handed.id)) == before
    assert published == []
    array = dict.fromkeys([job.id for job in waits], JobState.CANCELING)
    for _ in range(2):
        assert cancel(waits[0].array) == array
        assert set(published) == set(array)
        assert states(repository, waits[0].id) == ["QUEUED", "CANCELING"]
    published.clear()
    assert cancel(running.id[:30], handed.id, ended.id) == {
        running.id: JobState.CANCELING,
        handed.id: JobState.CANCELED,
        ended.id: JobState.CANCELED,
    }
    assert published == [running.id]
    assert states(repository, handed.id) == ["QUEUED", "CANCELING", "CANCELED"]
    assert [event.seq for event in repository.jobs.events(handed.id)] == [1, 2, 3]
    assert cancel(state=(JobState.QUEUED,)) == {}
    assert repository.jobs.get(other.id).state is JobState.QUEUED


def test_too_many_jobs_for_one_request(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repository.jobs.selection.MAX_SELECTED_JOBS", 2)
    array = repository.submissions.submit("ada", submission(3)).array
    selection = JobSelection(jobs=(array,))
    change = repository.job_actions.change
    refused(InvalidRequest, lambda: change(JobAction.HOLD, selection, "ada"), match="more than 2 jobs")
    refused(NotFound, lambda: repository.job_actions.cancel(array))


@pytest.mark.both_databases
def test_hostile_names_and_numbers(repository: Repository) -> None:
    job = one(repository)
    for name in ("", "\0", "\ud800", "x" * 10_000, "' OR 1=1 --", "../../etc/passwd"):
        refused(
            NotFound,
            lambda n=name: repository.jobs.get(n),
            lambda n=name: repository.jobs.version(n),
            lambda n=name: repository.job_actions.cancel(n),
            lambda n=name: repository.jobs.events(n),
            lambda n=name: repository.jobs.open_output(job.id, n),
            lambda n=name: repository.jobs.open_input(job.id, n),
            lambda n=name: repository.attempts.report(job.id, n, told(JobState.STAGING)),
            lambda n=name: repository.attempts.append_stream(job.id, n, StreamName.OUT, 0, b"x"),
            lambda n=name: repository.nodes.get(n),
        )
        assert repository.jobs.page("ada", array=name or "x").jobs == ()
    for number in (-1, 0):
        assert len(repository.jobs.events(job.id, after=number)) == 1
    assert repository.jobs.events(job.id, after=2**70) == []
    assert len(repository.jobs.page("ada", limit=-5).jobs) == 1
    refused(InvalidRequest, lambda: repository.submissions.submit("ada", submission(), "a\0b"))
    refused(InvalidRequest, lambda: repository.jobs.page("a\0b\ud800"))


@pytest.mark.both_databases
def test_a_guests_last_words_do_not_stop_the_record(repository: Repository) -> None:
    job = one(repository)
    attempt = claim(repository, job.id)
    words = told(JobState.FAILED, ReasonCode.KERNEL_PANIC)
    why = words.reason.model_copy(update={"message": "Oops \0\x1b[31m \uffff"})
    seconds = {"staging": float("nan"), "booting": float("inf"), "running": 1.5, "x\0": 1.0}
    repository.attempts.report(
        job.id, attempt, words.model_copy(update={"reason": why, "seconds": seconds})
    )
    done = repository.jobs.get(job.id)
    assert done.reason.message.startswith("Oops \N{REPLACEMENT CHARACTER}")
    assert done.seconds.pop("queued") >= 0
    assert done.seconds == {"running": 1.5}


@pytest.mark.both_databases
def test_a_full_size_array(repository: Repository) -> None:
    done = repository.submissions.submit("ada", submission(1000))
    assert len({job.id for job in done.jobs}) == 1000
    assert len(repository.jobs.page("ada", limit=2000).jobs) == 1000


def test_a_database_that_is_away_is_unavailable(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = Config(data_dir=tmp_path, database_url="postgresql://x@127.0.0.1:1/x")
    away = open_repository(config, migrate=False)
    for ask in (away.database.ping, lambda: away.jobs.get("0" * 32), lambda: one(away)):
        with pytest.raises(Unavailable) as caught:
            ask()
        assert caught.value.service == "database"
    refused(Unavailable, lambda: open_repository(config))


def test_a_file_broker_that_cannot_be_written_is_unavailable(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = Config(data_dir=tmp_path)
    publisher = TaskPublisher(config)
    publisher.ping()
    publisher.submit_array("0" * 32)
    folder = tmp_path / "broker"
    assert len(list(folder.glob("*.msg"))) == 1
    for path in folder.glob("*.msg"):
        path.unlink()
    (folder / "control").rename(tmp_path / "c")
    folder.rmdir()
    folder.write_text("not a folder")
    for ask in (publisher.ping, lambda: publisher.submit_array("0" * 32)):
        with pytest.raises(Unavailable) as caught:
            ask()
        assert caught.value.service == "broker"
