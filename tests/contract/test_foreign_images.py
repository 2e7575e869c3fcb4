"""Strategy `image` with foreign operating systems: with GRUB, by mkosi, of other releases.

None of them contains any part of vmjobs; all compute something and write it to their output disk.
test_agent_image_jobs.py tests how jobs of such images end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.foreign_images import FIT, LIFETIME, run
from vmjobs.model import ExitChannel, HypervisorKind, JobState


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.mark.soak_for("uefi")
@pytest.mark.parametrize(("image", "network"), [("bios", "repository"), ("uefi", "none")])
def test_a_disk_that_boots_by_itself_and_powers_off(place: Path, image: str, network: str) -> None:
    """The image with GRUB does not use its network; the one by mkosi has none."""
    done = run(image, place, "--exit", "poweroff", "--network", network, "--output", "*.csv")
    assert (done.report.state, done.code) == (JobState.COMPLETED, 0), done.report.reason.message
    assert done.report.reason.message == "the VM powered off by itself"
    assert done.report.exit is not None
    assert done.report.exit.channel is ExitChannel.POWEROFF
    assert sorted(done.outputs) == ["decays.csv", "fit.csv"]
    assert done.outputs["fit.csv"] == FIT
    assert sum(int(line.split(",")[1]) for line in done.outputs["decays.csv"].splitlines()[1:]) == 20000
    assert LIFETIME in done.console


@pytest.mark.soak_for("bullseye", "qemu")
@pytest.mark.parametrize(
    ("image", "version", "hypervisor"),
    [("bullseye", "11", "uml"), ("trixie", "13", "uml"), ("trixie", "13", "qemu")],
)
def test_userlands_of_other_releases(place: Path, image: str, version: str, hypervisor: str) -> None:
    done = run(
        image, place, "--exit", "poweroff", "--hypervisor", hypervisor,
        "--output", "os-release.txt", "--output", "fit.csv",
    )  # fmt: skip
    assert done.report.state is JobState.COMPLETED, done.report.reason.message
    assert done.report.hypervisor is HypervisorKind(hypervisor)
    assert f'VERSION_ID="{version}"' in done.outputs["os-release.txt"]
    assert done.outputs["fit.csv"] == FIT
    assert [r.path for r in done.report.rejected] == ["decays.csv"]
