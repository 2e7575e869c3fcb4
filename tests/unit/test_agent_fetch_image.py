"""First step of a run: the image arrives and stays, or the run ends with a reason."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from images.cache.node_cache import ImageCache
from images.content import SEGMENT_BYTES
from images.signature import require_signed
from tests.kit.image_cache import Remote, put
from tests.kit.noise import noise
from vmjobs.agent.run.outcome import RunEnded, run_stopped
from vmjobs.agent.run.state import VmChoice
from vmjobs.agent.run.steps import choose_hypervisor, fetch_image
from vmjobs.agent.vm.events import EventQueue
from vmjobs.errors import StorageFull, Unavailable
from vmjobs.model import CAPABILITIES, HypervisorKind, JobSpec, ReasonCode


def driver_of(kind: HypervisorKind) -> Any:
    """As much of a driver as the step uses."""
    return SimpleNamespace(kind=kind, abilities=CAPABILITIES[kind])


@dataclass
class Job:
    """As much of a run as the step uses. A hypervisor that is chosen later is UML."""

    cache: ImageCache
    digest: str
    patience: float = 0.0
    resources: ExitStack = field(default_factory=ExitStack)
    looks: int = 0
    wanted: bool = True
    image: Any = None
    kind: HypervisorKind = HypervisorKind.QEMU
    directory: Path = Path()

    def __post_init__(self) -> None:
        self.spec = JobSpec(image="x", script="true")
        self.ticket = SimpleNamespace(image_digest=self.digest, checkpoint=None)
        self.choice = VmChoice(driver_of(self.kind), "", "")
        self.settings = SimpleNamespace(deliver_seconds=self.patience)
        self.reports = SimpleNamespace(hypervisor=None)
        services = SimpleNamespace(
            images=self.cache,
            choose=lambda _needs: driver_of(HypervisorKind.UML),
            journal=SimpleNamespace(reassign=lambda _attempt, _machine, _driver: None),
            file_transfer=None,
        )
        self.request = SimpleNamespace(services=services, attempt="", event_queue=EventQueue())

    def begin_fetch(self) -> None:
        pass

    def fetch(self) -> None:
        self.image = fetch_image(self)  # type: ignore[arg-type]

    def check_stop(self, wait: float = 0.0) -> None:
        self.looks += 1
        time.sleep(wait / 20)
        if not self.wanted:
            raise run_stopped("not wanted any more")


def reason_of(job: Job) -> ReasonCode:
    """Why the step ended the run."""
    with pytest.raises(RunEnded) as caught, job.resources:
        job.fetch()
    return caught.value.outcome.reason.code


def test_the_image_stays_until_the_vm_is_gone(tmp_path: Path, remote: Remote) -> None:
    first, _ = put(remote.store, noise(2 * SEGMENT_BYTES))
    second, _ = put(remote.store, noise(2 * SEGMENT_BYTES, 1))
    cache = ImageCache(tmp_path / "node", remote, limit=3 * SEGMENT_BYTES)
    job = Job(cache, first)
    with job.resources:
        job.fetch()
        with pytest.raises(StorageFull):
            cache.prepare(second)
        assert job.image.root.read_bytes() == noise(2 * SEGMENT_BYTES)
    cache.prepare(second)
    assert cache.cached() == [second]
    assert job.looks > 2


def test_why_there_is_no_image(node: Path, remote: Remote) -> None:
    digest, _ = put(remote.store, noise(2 * SEGMENT_BYTES))
    assert (
        reason_of(Job(ImageCache(node, remote, limit=SEGMENT_BYTES), digest)) is ReasonCode.NODE_FAILED
    )
    strict = ImageCache(node, remote, trust=lambda d, s: require_signed(d, s, {}))
    assert reason_of(Job(strict, digest)) is ReasonCode.IMAGE_REJECTED
    unknown = Job(ImageCache(node, remote), "sha256:" + "0" * 64)
    assert reason_of(unknown) is ReasonCode.IMAGE_UNAVAILABLE
    remote.change = lambda _data: b"no segment"
    assert reason_of(Job(ImageCache(node, remote), digest)) is ReasonCode.IMAGE_REJECTED
    unwanted = Job(ImageCache(node, remote), digest, wanted=False)
    assert reason_of(unwanted) is ReasonCode.EVICTED


def test_a_repository_that_is_away_for_a_while_is_waited_for(tmp_path: Path, remote: Remote) -> None:
    digest, _ = put(remote.store, noise(4 * SEGMENT_BYTES))

    def flaky(count: int) -> None:
        if count % 2:
            raise Unavailable("api", "restarting")

    remote.before = flaky
    job = Job(ImageCache(tmp_path / "node", remote), digest, patience=60.0)
    with job.resources:
        job.fetch()
        assert job.image.root.read_bytes() == noise(4 * SEGMENT_BYTES)
    remote.before = lambda _count: (_ for _ in ()).throw(Unavailable("api", "gone"))
    again = Job(ImageCache(tmp_path / "other", remote), digest)
    assert reason_of(again) is ReasonCode.IMAGE_UNAVAILABLE


@pytest.mark.parametrize("kind", list(HypervisorKind))
def test_an_image_is_given_out_early_only_where_it_can_be(
    tmp_path: Path, remote: Remote, kind: HypervisorKind
) -> None:
    """UML and Xen have no NBD: they wait for the whole image."""
    digest, _ = put(remote.store, noise(2 * SEGMENT_BYTES))
    cache = ImageCache(tmp_path / "node", remote, lazy_start=True)
    job = Job(cache, digest, kind=kind, directory=tmp_path)
    with job.resources:
        job.fetch()
        whole = kind in {HypervisorKind.UML, HypervisorKind.XEN}
        assert (job.image.live is None) == whole
        assert (cache.cached() == [digest]) == whole
    cache.close()


def test_a_change_to_uml_waits_for_the_rest(tmp_path: Path, remote: Remote) -> None:
    digest, _ = put(remote.store, noise(2 * SEGMENT_BYTES))
    cache = ImageCache(tmp_path / "node", remote, lazy_start=True)
    job: Any = Job(cache, digest, directory=tmp_path)
    with job.resources:
        job.fetch()
        assert job.image.live is not None
        image = choose_hypervisor(job).image
        assert image.live is None
        assert image.root.read_bytes() == noise(2 * SEGMENT_BYTES)
    cache.close()
