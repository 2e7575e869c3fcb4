"""Jobs and their images: which images a job may name; waiting jobs keep theirs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import update

from repository.images import Viewer
from repository.images.tables import HoldingRow
from repository.jobs import dispatcher
from repository.service import Repository
from tests.kit.cluster_nodes import node_of
from tests.kit.noise import noise
from tests.kit.repository_images import ADA, BOB, EVE, read, sweeper
from tests.kit.repository_jobs import (
    ADMIN,
    Ledger,
    bring,
    claim,
    dispatch_context,
    images_of,
    one,
    push,
    refused,
    submission,
    told,
)
from vmjobs.errors import ImageInUse, InvalidSpec, NotFound
from vmjobs.model import HypervisorInfo, HypervisorKind, JobState, now
from vmjobs.wire import ImageChange

pytestmark = pytest.mark.in_process

K = HypervisorKind
DISK = noise(5000)


def faults(repository: Repository, owner: str = "ada", **spec: object) -> list[tuple[str, str]]:
    with pytest.raises(InvalidSpec) as caught:
        one(repository, owner, **spec)
    return [(fault.field, fault.message) for fault in caught.value.faults]


def finish(repository: Repository, job_id: str) -> None:
    attempt = claim(repository, job_id)
    bring(repository, job_id, attempt, JobState.COLLECTING)
    repository.attempts.report(job_id, attempt, told(JobState.COMPLETED, exit_code=0))


def test_a_job_sees_what_its_owner_sees(repository: Repository) -> None:
    done = push(repository, ADA, DISK, name="own")
    assert one(repository, "ada", image="own").image_digest == done.digest
    assert one(repository, "ada", image="ada/own:latest").image_digest == done.digest
    for ref in ("own", "ada/own", done.digest):
        ((field, message),) = faults(repository, "eve", image=ref)
        assert field == "image"
        assert "there is no image" in message
    shares = [{"kind": "group", "name": "/atlas"}]
    push(repository, ADA, DISK, name="own", shares=shares)
    groups = frozenset({"/atlas"})
    spec = submission(image="ada/own")
    assert repository.submissions.submit("bob", spec, groups=groups).jobs[0].image_digest == done.digest


def test_a_tag_is_pinned_at_submission(repository: Repository) -> None:
    first = push(repository, ADA, DISK, name="own")
    job = one(repository, "ada", image="own")
    push(repository, ADA, noise(9), name="own")
    claim(repository, job.id)
    assert repository.jobs.get(job.id).image_digest == first.digest


def test_a_deprecated_image_runs_and_says_so(repository: Repository) -> None:
    done = push(repository, ADA, DISK, name="own")
    repository.catalog.change(ADA, done.digest, ImageChange(deprecated="use hep2"))
    job = one(repository, "ada", image="own")
    (event,) = repository.jobs.events(job.id)
    assert event.reason.message.endswith("its image is deprecated: use hep2")
    assert job.reason == event.reason


def test_what_boots_an_image(repository: Repository) -> None:
    push(repository, ADA, DISK, name="uml")
    push(repository, ADA, DISK, b"kernel", {"guest": {"contract": 1}, "xen": True}, name="any")
    push(repository, ADA, DISK, manifest={"boot": "bios"}, name="disk")
    uml = repository.catalog.resolve(ADA, "uml")
    assert repository.catalog.parsed_manifest(ADA, uml).hypervisors == (K.UML,)
    ((field, message),) = faults(repository, image="disk", hypervisor="uml")
    assert field == "hypervisor"
    assert message.startswith("the image cannot be booted by uml, only")
    handed: dict[str, tuple[HypervisorKind, ...]] = {}

    class Counter(Ledger):
        def submit(self, jobs):  # type: ignore[no-untyped-def]
            handed.update({job.id: job.kinds for job in jobs})
            return super().submit(jobs)

    wanted = {
        one(repository, image="uml").id: (K.UML,),
        one(repository, image="any").id: tuple(K),
        one(repository, image="any", cpus=2).id: tuple(K),
        one(repository, image="any", hypervisor="qemu").id: (K.QEMU,),
        one(repository, image="disk").id: (K.KVM, K.QEMU),
    }
    schedd = Counter()
    for job_id in wanted:
        dispatcher.submit_array(dispatch_context(repository, schedd), repository.jobs.get(job_id).array)
    assert handed == wanted


def test_what_no_live_node_boots(repository: Repository) -> None:
    push(repository, ADA, DISK, manifest={"boot": "uefi"}, name="disk")
    uml = HypervisorInfo(kind=K.UML, works=True)
    broken = HypervisorInfo(kind=K.KVM, works=False)
    repository.nodes.put(node_of("n", hypervisors=[uml, broken]))
    why = "no live node has what boots the image (kvm, qemu); there is uml"
    assert faults(repository, image="disk") == [("image", why)]
    one(repository)


def test_what_no_live_node_emulates(repository: Repository) -> None:
    arm = {"guest": {"contract": 1}, "architecture": "aarch64"}
    push(repository, ADA, DISK, b"kernel", arm, name="arm")
    repository.nodes.put(node_of("n", hypervisors=[HypervisorInfo(kind=K.QEMU, works=True)]))
    why = "the image is for aarch64, which no live node emulates"
    assert faults(repository, image="arm") == [("image", why)]
    emulating = HypervisorInfo(kind=K.QEMU, works=True, architectures=("aarch64",))
    repository.nodes.put(node_of("n", hypervisors=[emulating]))
    one(repository, image="arm")


@pytest.mark.both_databases
def test_an_image_that_jobs_need_stays(repository: Repository) -> None:
    done = push(repository, ADA, DISK, name="own", visibility="public")
    jobs = [one(repository, "ada", image="own").id for _ in range(6)]
    theirs = one(repository, "eve", image="ada/own").id
    with pytest.raises(ImageInUse) as caught:
        repository.catalog.remove(ADA, done.digest)
    assert sum(job in caught.value.message for job in jobs) == 5
    assert "2 more" in caught.value.message
    assert theirs not in caught.value.message
    repository.catalog.untag(ADA, "ada", "own", "latest")  # jobs keep the digest
    for job in jobs:
        finish(repository, job)
    refused(ImageInUse, lambda: repository.catalog.remove(ADA, done.digest), match="1 of other users")
    finish(repository, theirs)
    repository.catalog.remove(ADA, done.digest)


def test_somebody_elses_job_is_nobodys_business(repository: Repository) -> None:
    """Two users have the same private image; one's job does not block the other's removal."""
    done = push(repository, ADA, DISK, name="own")
    push(repository, BOB, DISK, name="his")
    job = one(repository, "bob", image="his")
    repository.catalog.remove(ADA, done.digest)
    refused(ImageInUse, lambda: repository.catalog.remove(BOB, done.digest), match=job.id)


@pytest.mark.both_databases
def test_bytes_stay_while_a_job_needs_them(repository: Repository) -> None:
    """Even if the job's owner may not see the image any more."""
    done = push(repository, ADA, DISK, name="own", visibility="public")
    job = one(repository, "eve", image="ada/own")
    repository.catalog.change(ADA, done.digest, ImageChange(visibility="private"))
    repository.catalog.remove(ADA, done.digest)
    sweeper(repository).garbage_collector.collect()
    token = Viewer("eve", image=done.digest)
    assert read(repository, token, done) == DISK
    finish(repository, job.id)
    assert sweeper(repository).garbage_collector.collect().images == 1
    refused(NotFound, lambda: repository.catalog.manifest(token, done.digest))


def test_the_time_of_an_image_is_over_when_its_jobs_are(repository: Repository) -> None:
    done = push(repository, ADA, DISK, name="own")
    job = one(repository, "ada", image="own")
    with repository.database.write() as session:
        past = now() - timedelta(days=1)
        which = update(HoldingRow).where(HoldingRow.image == done.digest)
        session.execute(which.values(expires=past))
    assert "expired" in faults(repository, image="own")[0][1]
    assert sweeper(repository).garbage_collector.collect().images == 0
    assert read(repository, Viewer("ada", image=done.digest), done) == DISK
    finish(repository, job.id)
    assert sweeper(repository).garbage_collector.collect().images == 1


@pytest.mark.both_databases
def test_removal_waits_for_a_submission(repository: Repository, other: Repository) -> None:
    """A submission that has found the image keeps it, even before its commit."""
    done = push(repository, ADA, DISK, name="own")
    said: list[str] = []

    def remove() -> None:
        try:
            other.catalog.remove(ADA, done.digest)
            said.append("removed")
        except ImageInUse as error:
            said.append(error.code)

    thread = threading.Thread(target=remove)

    def publish(array: str) -> None:
        del array
        thread.start()
        thread.join(0.3)  # without the lock, it would not wait
        assert said == []

    jobs = repository.submissions.submit("ada", submission(image="own"), publish=publish).jobs
    thread.join(120)
    assert said == ["IMAGE_IN_USE"]
    assert read(repository, Viewer("ada", image=jobs[0].image_digest), done) == DISK


def linger(repository: Repository, times: int) -> None:
    """Delay this thread by so many queries."""
    for _ in range(times):
        images_of(repository, EVE)


@pytest.mark.slow
@pytest.mark.both_databases
def test_submission_and_removal_at_the_same_moment(repository: Repository, other: Repository) -> None:
    outcomes = set()
    for seed in range(25):
        done = push(repository, ADA, noise(100, seed), name="own")
        start = threading.Barrier(3)

        def submit(start: threading.Barrier = start, later: int = seed % 2 * seed) -> str:
            start.wait(30)
            linger(repository, later)
            try:
                return one(repository, "ada", image="own").id
            except InvalidSpec:
                return ""

        def remove(
            start: threading.Barrier = start,
            digest: str = done.digest,
            later: int = (1 - seed % 2) * seed,
        ) -> bool:
            start.wait(30)
            linger(other, later)
            try:
                other.catalog.remove(ADA, digest)
            except ImageInUse:
                return False
            return True

        def collect(start: threading.Barrier = start) -> None:
            start.wait(30)
            sweeper(other).garbage_collector.collect()

        with ThreadPoolExecutor(3) as pool:
            job, gone, swept = pool.submit(submit), pool.submit(remove), pool.submit(collect)
            assert bool(job.result()) != gone.result()
            swept.result()
        outcomes.add(gone.result())
        if not gone.result():
            assert read(repository, Viewer("ada", image=done.digest), done) == noise(100, seed)
            finish(repository, job.result())
            repository.catalog.remove(ADA, done.digest)
    sweeper(other).garbage_collector.collect()
    (left,) = images_of(repository, EVE)
    assert (left.namespace, left.name) == ("library", "hep")
    assert images_of(repository, ADMIN) == [left]
    assert outcomes == {True, False}
