"""Foreign images end to end: pushed in other formats, run by HTCondor, outputs fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.cli import vmjobs
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
from tests.kit.grid import NODES, Grid, wait_for
from tests.kit.grid_clusters import Submitter
from vmjobs.model import ExitChannel, Job, JobState, ReasonCode

UML = ("--hypervisor", "uml")
TINY = ("--boot", "kernel", "--append", "init=/init quiet")


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
def ended(grid: Grid, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Jobs in images that a user pushed from three disk formats."""
    folder = tmp_path_factory.mktemp("disks")
    trixie = disk("trixie")
    push(as_format(disk("bios"), "qcow2", folder), "foreign-bios")
    vmdk = as_format(trixie, "vmdk", folder)
    pushed = push(vmdk, "foreign-trixie", *kernel_options("odd-poweroff"))
    assert pushed["image"]["origin"]["format"] == "vmdk"
    push(trixie, "foreign-hangs", *kernel_options("odd-hang"))
    jobs = {
        name: submit(case.image, "--output", "*.csv", *case.options)[0] for name, case in CASES.items()
    }
    found = wait(*jobs.values())
    return {name: found[job] for name, job in jobs.items()}


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
