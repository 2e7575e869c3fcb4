"""Foreign images end to end: pushed in other formats, run by HTCondor, outputs fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cli import vmjobs
from tests.kit.faults import lost
from tests.kit.foreign_images import (
    FIT,
    LIFETIME,
    as_format,
    disk,
    kernel_options,
    push,
    submit,
    tiny,
    wait,
)
from tests.kit.grid import NODES, Grid, run, wait_for
from tests.kit.grid_clusters import Submitter
from vmjobs.model import ExitChannel, HypervisorKind, Job, JobState, ReasonCode

UML = ("--hypervisor", "uml")
TINY = ("--boot", "kernel", "--append", "init=/init quiet")
MIB = 1024 * 1024


@dataclass(frozen=True)
class Case:
    """A job in an image, and what tells its end."""

    image: str
    options: tuple[str, ...]
    channel: ExitChannel


CASES = {
    "bios": Case("foreign-bios", ("--exit", "poweroff", "--network", "none"), ExitChannel.POWEROFF),
    "release": Case("foreign-trixie", ("--exit", "poweroff", *UML), ExitChannel.POWEROFF),
    "line": Case("foreign-hangs", ("--exit", "console:^odd: hang", *UML), ExitChannel.CONSOLE),
}


@pytest.fixture(scope="module")
def pushed(grid: Grid, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Images pushed to the user's own namespace, from three disk formats."""
    folder = tmp_path_factory.mktemp("disks")
    trixie = disk("trixie")
    vmdk = as_format(trixie, "vmdk", folder)
    return {
        "bios": push(as_format(disk("bios"), "qcow2", folder), "foreign-bios"),
        "trixie": push(vmdk, "foreign-trixie", *kernel_options("odd-poweroff")),
        "hangs": push(trixie, "foreign-hangs", *kernel_options("odd-hang")),
    }


@pytest.fixture(scope="module")
def ended(pushed: dict[str, Any]) -> dict[str, Job]:
    jobs = {
        name: submit(case.image, "--output", "*.csv", *case.options)[0] for name, case in CASES.items()
    }
    found = wait(*jobs.values())
    return {name: found[job] for name, job in jobs.items()}


def test_the_same_disk_in_any_format_is_stored_once(pushed: dict[str, Any]) -> None:
    roots = {name: answer["image"]["manifest"]["root"]["digest"] for name, answer in pushed.items()}
    assert roots["trixie"] == roots["hangs"]
    assert len({answer["image"]["digest"] for answer in pushed.values()}) == 3
    assert pushed["hangs"]["sent"] < MIB
    assert pushed["bios"]["image"]["manifest"]["boot"] == "bios"
    assert pushed["trixie"]["image"]["origin"]["format"] == "vmdk"


@pytest.mark.parametrize("name", CASES)
def test_jobs_succeed_and_their_outputs_and_console_are_fetched(
    ended: dict[str, Job], tmp_path: Path, name: str
) -> None:
    """test_agent_image_jobs.py has how else jobs of such images end."""
    job = ended[name]
    assert (job.state, job.reason.code) == (JobState.COMPLETED, ReasonCode.SUCCEEDED), job.reason
    assert (job.exit.channel if job.exit else None) is CASES[name].channel
    vmjobs("job", "outputs", job.id, "--fetch", tmp_path, code=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decays.csv", "fit.csv"]
    assert (tmp_path / "fit.csv").read_text() == FIT
    assert LIFETIME in vmjobs("job", "console", job.id).out


def test_a_disk_that_boots_by_itself_needs_a_vm(ended: dict[str, Job]) -> None:
    """UML, which the nodes otherwise prefer, cannot boot it."""
    assert ended["bios"].hypervisor in {HypervisorKind.KVM, HypervisorKind.QEMU}


def test_nothing_is_left_on_the_nodes(grid: Grid, ended: dict[str, Job]) -> None:
    grid.assert_clean(*ended.values())


# --------------------------------------------------------------------------- transfer to the nodes


@pytest.mark.disruptive  # jobs of other tests may fill the node that has the image
def test_a_job_goes_where_its_image_is(grid: Grid, tmp_path: Path) -> None:
    """HTCondor by itself fills the fullest node first."""
    has, fuller = (f"{node}.grid" for node in NODES)
    digest = push(tiny(tmp_path, 16), "foreign-there", *TINY)["image"]["digest"]
    vmjobs("image", "prefetch", "foreign-there", "--wait", "--timeout", "150", "--node", has)
    user = Submitter(grid)
    filler = user.submit_where(f'TARGET.Machine == "{fuller}"', "sleep 300", memory=1024)
    try:
        told(grid, f'stringListMember("{digest}", VMJobsImageDigests)')
        told(grid, f'Machine == "{fuller}" && PartitionableSlot && Memory <= TotalSlotMemory - 1024')
        (job,) = submit("foreign-there", "--exit", "poweroff", *UML)
        ended = wait(job)[job]
        assert (ended.state, ended.node) == (JobState.COMPLETED, has)
    finally:
        user("condor_rm", filler)
    assert vmjobs("image", "rm", "foreign-there").code == 0


def told(grid: Grid, what: str) -> None:
    """Wait until an ad in the pool matches a constraint."""
    pool = ("condor_status", "-constraint", what, "-af", "Name")
    wait_for(lambda: grid.on("site", *pool).strip() or None, f"the pool to know: {what}", 120)


def received(grid: Grid, node: str) -> int:
    """Bytes that a node has received over its network so far."""
    return int(grid.on(node, "cat", "/sys/class/net/eth0/statistics/rx_bytes"))


def slow(grid: Grid, service: str, rate: str) -> None:
    """Limit a service's send rate (tc-tbf(8)) until its container restarts."""
    pid = run("docker", "inspect", "-f", "{{.State.Pid}}", grid.container(service)).strip()
    limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
    run("nsenter", "-t", pid, "-n", "tc", "qdisc", "add", "dev", "eth0", *limit)


@pytest.mark.disruptive
@pytest.mark.soak  # tests/contract/test_node_cache.py tests the node's part
def test_a_fetch_that_was_cut_off_goes_on(grid: Grid, tmp_path: Path) -> None:
    """The repository dies while a node fetches an image from it."""
    push(tiny(tmp_path, 256), "foreign-cut", *TINY)
    slow(grid, "api", "240mbit")  # otherwise the whole image arrives before the test sees the transfer
    before = {node: received(grid, node) for node in NODES}
    (job,) = submit("foreign-cut", "--exit", "poweroff", *UML)

    def under_way() -> str | None:
        came = {node: received(grid, node) - before[node] for node in NODES}
        return next((node for node, size in came.items() if size > 24 * MIB), None)

    node = wait_for(under_way, "the image to be on its way", 120)
    with lost(grid, "api"):
        partial = received(grid, node) - before[node]
    ended = wait(job)[job]
    assert ended.state is JobState.COMPLETED, ended.reason.message
    assert vmjobs("image", "rm", "foreign-cut").code == 0
    whole = received(grid, node) - before[node]
    assert partial < 250 * MIB, "the fetch was over before the repository went"
    assert whole < (256 + 48) * MIB, "what had come was fetched again"
