"""Jobs that start before their image is complete: real agent steps, nbdkit, QEMU, API."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from images.content import CHUNK_BYTES, SEGMENT_BYTES
from images.manifest import ImageManifest, Part
from tests.kit import lazy_node
from tests.kit.agent_runs import Lease
from tests.kit.guests import direct_boot_guest, kernel_tree
from tests.kit.lazy_images import QUICK, Place, place_at
from tests.kit.lazy_node import INIT, Node, qemu
from tests.kit.noise import noise
from tests.kit.repository_jobs import ADMIN, send
from tests.kit.segments import compute_layout_of_bytes
from tests.kit.waiting import wait_until
from vmjobs.agent.journal import Journal, sweep
from vmjobs.agent.run.job_run import execute
from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.agent.run.services import RunSettings
from vmjobs.agent.run.state import Run
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import BootImage
from vmjobs.hypervisor.libvirt import nbd_server
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.model import MIB, HypervisorKind, JobState, ReasonCode
from vmjobs.wire import Publication

DISK = noise(3 * SEGMENT_BYTES) + bytes(SEGMENT_BYTES) + noise(SEGMENT_BYTES, 2)
READ = "dd if=/dev/vda bs=64k skip={} count={} 2>/dev/null"
#: Reads chunks from all parts of the disk, and writes their checksum.
LOOK = (
    f"for at in 0 1 130 260 300 400 520 639; do {READ.format('$at', 1)}; done"
    " | md5sum | cut -c1-32 > outputs/sum"
)
LOOKED = b"".join(DISK[at * CHUNK_BYTES :][:CHUNK_BYTES] for at in (0, 1, 130, 260, 300, 400, 520, 639))
SUM = hashlib.md5(LOOKED).hexdigest()  # noqa: S324


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> BootImage:
    return direct_boot_guest(tmp_path_factory.mktemp("lazy-guest"), kernel_tree(), INIT)


@pytest.fixture
def place() -> Iterator[Place]:
    # Socket paths must be short; those of pytest's directories are long.
    with tempfile.TemporaryDirectory(prefix="lazy-") as directory, place_at(Path(directory)) as place:
        yield place


@pytest.fixture
def driver() -> Libvirt:
    return qemu()


@pytest.fixture
def image(place: Place, guest: BootImage) -> str:
    """Publish the guest's image, with a root disk worth fetching; return its digest."""
    repository = place.site.repository
    assert guest.kernel is not None
    assert guest.initrd is not None
    files = {"root": DISK, "kernel": guest.kernel.read_bytes(), "initrd": guest.initrd.read_bytes()}
    upload = repository.uploads.begin(ADMIN, sum(map(len, files.values()))).id
    sent = {name: send(repository, ADMIN, upload, data) for name, data in files.items()}
    parts = {name: Part(digest=layout.digest, size=layout.size) for name, layout in sent.items()}
    manifest = ImageManifest.model_validate({**parts, "cmdline": ("rdinit=/init",)})
    body = {"manifest": manifest.model_dump(mode="json", by_alias=True), "upload": upload}
    return repository.publisher.publish(ADMIN, Publication.model_validate(body)).digest


@pytest.fixture
def node(place: Place, driver: Libvirt, image: str) -> Iterator[Node]:
    cache = place.cache()
    yield Node(place.folder, cache, driver, image)
    cache.close()
    assert vms(place.folder, driver) == servers(place.folder) == []
    assert list((place.folder / "runs").iterdir()) == []


def vms(folder: Path, driver: Libvirt) -> list[str]:
    """VMs of a node."""
    prefix = Journal(folder / "runs").prefix
    return [name for name in driver.list() if name.startswith(prefix)]


def servers(folder: Path) -> list[int]:
    """Block servers of the VMs of a node."""
    ours = [p for p in procs.scan() if nbd_server.vm_of(p)]
    return [p.pid for p in ours if any(str(folder) in word for word in p.argv)]


def assert_looked(ended: RunOutcome, outputs: Path) -> None:
    assert ended.reason.code is ReasonCode.SUCCEEDED, ended.reason.message
    assert (outputs / "sum").read_text().strip() == SUM


def test_the_same_job_before_and_after_its_image_is_complete(place: Place, node: Node) -> None:
    with ThreadPoolExecutor(2) as pool:  # concurrent runs share what arrives
        for ended in pool.map(lambda _: node.run(LOOK, outputs=("sum",)), range(2)):
            assert_looked(*ended)
    wait_until(lambda: node.cache.cached() == [node.image])
    assert set(place.gate.ranges.values()) == {1}
    assert place.plain().prepare(node.image).root.read_bytes() == DISK
    place.gate.away = True
    assert_looked(*node.run(LOOK, outputs=("sum",)))


def test_a_job_of_a_damaged_image_is_rejected(place: Place, node: Node) -> None:
    spoilt: list[bytes] = []

    def spoil(data: bytes) -> bytes:
        spoilt.append(bytes([data[0] ^ 1]) + data[1:])
        return spoilt[-1]

    def meddle(_run: Run, lease: Lease) -> None:
        lease.wait_for(JobState.BOOTING)
        wait_until(lambda: bool(place.gate.bytes))
        place.gate.spoil = spoil

    do = f"{READ.format(0, 1)} | md5sum; sleep 3; {READ.format(300, 2)} | md5sum"
    ended, _ = node.run(do, meddle, ready="console:-$")
    assert ended.reason.code is ReasonCode.IMAGE_REJECTED, ended.reason
    assert "damaged" in ended.reason.message
    assert spoilt


def test_the_repository_goes_away_while_a_guest_boots(
    place: Place, driver: Libvirt, image: str
) -> None:
    place.retries = QUICK
    cache = place.cache(patience=3.0)
    node = Node(place.folder, cache, driver, image)

    def cut(run: Run, lease: Lease) -> None:
        lease.wait_for(JobState.BOOTING)
        place.gate.away = True
        wait_until(lambda: run.waited_for_image > 2)
        assert not lease.reached(JobState.COLLECTING)

    ended, _ = node.run(LOOK, cut, outputs=("sum",), boot_seconds=300)
    assert ended.reason.code is ReasonCode.IMAGE_UNAVAILABLE, ended.reason
    assert vms(place.folder, driver) == servers(place.folder) == []
    cache.close()


def test_waiting_for_the_image_is_not_the_guests_time(
    place: Place, driver: Libvirt, image: str
) -> None:
    """The guest has enough time to boot, and waits longer than that in total."""
    cache = place.cache()
    node = Node(place.folder, cache, driver, image)
    do = f"{READ.format(300, 2)} | md5sum; echo up; {LOOK}"
    elsewhere = Place(place.site, place.gate, place.url, place.folder / "elsewhere", place.token)
    elsewhere.folder.mkdir()
    plain = Node(elsewhere.folder, elsewhere.cache(), driver, image)
    ready, _, _ = plain.start("echo up", ready="console:^up")
    execute(ready)
    boot = 3 * int(ready.reports.seconds["booting"]) + 10  # other tests may take the processors later
    place.gate.withheld = frozenset(
        digest.hex() for _, digest in compute_layout_of_bytes(DISK).stored()
    )

    def release(run: Run, lease: Lease) -> None:
        try:
            lease.wait_for(JobState.BOOTING)
            wait_until(lambda: run.waited_for_image > boot + 1, boot + 120)
        finally:
            place.gate.withheld = frozenset()

    wishes = {"ready": "console:^up", "boot_seconds": boot, "outputs": ("sum",)}
    assert_looked(*node.run(do, release, **wishes))
    cache.close()


def test_the_block_server_is_killed(node: Node) -> None:
    def kill(run: Run, lease: Lease) -> None:
        lease.wait_for(JobState.RUNNING)
        (server,) = nbd_server.find(run.choice.vm_name)
        os.kill(server.pid, signal.SIGKILL)

    ended, _ = node.run("sleep 1000", kill, run_seconds=300)
    assert ended.reason.code is ReasonCode.NODE_FAILED
    assert "serves the root disk" in ended.reason.message


@pytest.mark.soak
def test_the_agent_is_killed(place: Place, driver: Libvirt, image: str) -> None:
    script = lazy_node.__file__
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, script, str(place.folder), place.url, place.token, image, "sleep 1000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == JobState.RUNNING:
                break
        assert len(servers(place.folder)) == 1
        child.kill()
    wait_until(lambda: servers(place.folder) == [])  # before any cleanup
    journal = Journal(place.folder / "runs")
    drivers = {HypervisorKind.QEMU: driver}
    (left,) = journal.recover(drivers)
    assert left.record.job.startswith("job-")
    assert sweep(journal, drivers) == []
    assert vms(place.folder, driver) == []
    assert list(journal.root.iterdir()) == []
    # The data that had arrived is not lost.
    node = Node(place.folder, place.plain(), driver, image, RunSettings("here", MIB, MIB))
    assert_looked(*node.run(LOOK, outputs=("sum",)))
