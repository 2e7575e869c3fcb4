"""Strategy `image` with operating systems that others built: GRUB's, mkosi's, other releases'.

None of them has any of vmjobs inside; all compute something and leave it on their output disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_kit import FIT, LIFETIME, run

from vmjobs.model import ExitChannel, HypervisorKind, JobState, ReasonCode


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


@pytest.mark.soak_for("uefi")
@pytest.mark.parametrize(("image", "network"), [("bios", "repository"), ("uefi", "none")])
def test_a_disk_that_boots_by_itself_and_powers_off(place: Path, image: str, network: str) -> None:
    """The one by GRUB does not know that it has a network; the one by mkosi has none."""
    done = run(image, place, "--exit", "poweroff", "--network", network, "--output", "*.csv")
    assert (done.report.state, done.code) == (JobState.COMPLETED, 0), done.report.reason.message
    assert done.report.reason.message == "the machine powered off by itself"
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


def test_an_image_that_never_powers_off_is_overdue(place: Path) -> None:
    done = run(
        "hangs", place, "--exit", "poweroff", "--hypervisor", "uml", "--run-seconds", "8",
        "--output", "fit.csv",
    )  # fmt: skip
    assert (done.report.state, done.report.reason.code) == (JobState.FAILED, ReasonCode.TIMED_OUT)
    assert "had not powered off after 8 s" in done.report.reason.message
    assert "odd: hang" in done.report.reason.message
    assert done.report.exit is None
    assert done.code != 0


def test_a_line_of_the_console_ends_one_that_never_powers_off(place: Path) -> None:
    done = run(
        "hangs", place, "--exit", "console:^odd: h[a]ng", "--hypervisor", "uml", "--output", "*.csv"
    )
    assert done.report.state is JobState.COMPLETED, done.report.reason.message
    assert done.report.exit is not None
    assert done.report.exit.channel is ExitChannel.CONSOLE
    assert "showed the line 'odd: hang'" in done.report.reason.message
    assert done.outputs["fit.csv"] == FIT


@pytest.mark.soak_for("qemu")
@pytest.mark.parametrize(
    ("hypervisor", "rule"),
    [("uml", "poweroff"), ("qemu", "poweroff"), ("uml", "console:muon lifetime 9")],
)
def test_a_panic_is_told_as_one_whatever_is_waited_for(place: Path, hypervisor: str, rule: str) -> None:
    done = run("panics", place, "--exit", rule, "--hypervisor", hypervisor)
    assert (done.report.state, done.report.reason.code) == (JobState.FAILED, ReasonCode.KERNEL_PANIC)
    assert "Attempted to kill init" in done.report.reason.message


@pytest.mark.soak_for("qemu")
@pytest.mark.parametrize("hypervisor", ["uml", "qemu"])
def test_a_restart_is_no_power_off(place: Path, hypervisor: str) -> None:
    done = run("resets", place, "--exit", "poweroff", "--hypervisor", hypervisor, "--output", "fit.csv")
    assert (done.report.state, done.report.reason.code) == (JobState.FAILED, ReasonCode.NO_EXIT_REPORT)
    assert "restarted its machine" in done.report.reason.message
    assert done.outputs["fit.csv"] == FIT  # what was there is delivered
    assert done.console.count("odd: Debian") == 1


def test_a_line_that_does_not_come_is_no_success(place: Path) -> None:
    done = run("trixie", place, "--exit", "console:muon lifetime 9", "--hypervisor", "uml")
    assert (done.report.state, done.report.reason.code) == (JobState.FAILED, ReasonCode.NO_EXIT_REPORT)
    assert "powered off before its console had shown" in done.report.reason.message


def test_an_end_that_has_to_be_reported_is_not_guessed(place: Path) -> None:
    done = run("trixie", place, "--exit", "report", "--ready", "started", "--hypervisor", "uml")
    assert (done.report.state, done.report.reason.code) == (JobState.FAILED, ReasonCode.NO_EXIT_REPORT)
    assert done.report.exit is None


def test_what_was_asked_for_has_to_be_there(place: Path) -> None:
    done = run("trixie", place, "--exit", "poweroff", "--hypervisor", "uml", "--output", "*.root")
    assert (done.report.state, done.report.reason.code) == (JobState.FAILED, ReasonCode.OUTPUT_MISSING)
    assert "powered off by itself but left nothing that matches *.root" in done.report.reason.message
