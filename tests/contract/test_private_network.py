"""Two machines on a switch of their own: User Mode Linux, the kernel's own cards, real frames."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypervisor_guest import root_disk_guest
from hypervisor_host import said, wait_until

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import switch
from vmjobs.hypervisor.base import BootImage, Machine, MachineState, Network, PrivateLink
from vmjobs.hypervisor.uml import UserModeLinux
from vmjobs.model import NetworkMode

UML = UserModeLinux()
NAMES = tuple(f"vmjobs-lan-{os.getpid()}-{which}" for which in ("one", "two"))
ADDRESSES = ("10.77.0.1", "10.77.0.2")
SUM = "7202826a7791073fe2787f0c94603278"  # of a MiB of the letter a


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> BootImage:
    return root_disk_guest(tmp_path_factory.mktemp("guest"))


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "switch"
    yield path
    for name in NAMES:
        UML.destroy(name)
    if (pid := switch.process(path)) is not None:
        os.kill(pid, signal.SIGTERM)


def start(number: int, image: BootImage, cable: Path, network: Network | None) -> Path:
    """One of the machines; its console."""
    folder = cable.parent / NAMES[number]
    folder.mkdir()
    console = folder.with_suffix(".console")
    targets = f"targets={ADDRESSES[number]},{ADDRESSES[1 - number]}"
    link = PrivateLink(cable, switch.mac(number))
    UML.start(
        Machine(
            name=NAMES[number],
            cpus=1,
            memory=64,
            image=image,
            disks=(),
            console=console,
            workdir=folder,
            network=network,
            cmdline=("do=lan", targets),
            links=(link,),
        )
    )
    return console


@pytest.mark.parametrize("outside", [False, True], ids=["alone", "beside the way out"])
def test_two_machines_reach_each_other(image: BootImage, cable: Path, *, outside: bool) -> None:
    switch.ensure(cable)
    network = Network(NetworkMode.OUTBOUND, cable.parent / "endpoint") if outside else None
    consoles = [start(number, image, cable, network) for number in (0, 1)]
    for number, console in enumerate(consoles):
        card = "vec1" if outside else "vec0"
        other = ADDRESSES[1 - number]
        met = f"met={other} through {card} at {switch.mac(number)}"
        wait_until(lambda c=console, m=met: m in said(c), 60, met)
        wait_until(lambda c=console: f"got={SUM}" in said(c), 60, f"a MiB from {other}")


def test_they_go_on_without_who_started_them_and_see_a_newcomer(image: BootImage, cable: Path) -> None:
    """The switch has no parent to lose: it is found again by its socket."""
    pid = switch.ensure(cable)
    first = start(0, image, cable, None)
    second = start(1, image, cable, None)
    wait_until(lambda: "met=" in said(first), 60, "they meet")
    UML.destroy(NAMES[1])
    assert switch.process(cable) == pid
    assert UML.state(NAMES[0]) is MachineState.RUNNING
    before = said(second)
    (cable.parent / NAMES[1]).rename(cable.parent / "old")
    start(1, image, cable, None)
    wait_until(lambda: "met=" in said(second)[len(before) :], 60, "the second meets the first again")


def test_without_a_switch_no_machine_starts(image: BootImage, cable: Path) -> None:
    with pytest.raises(HypervisorError, match="no switch answers at"):
        start(0, image, cable, None)
    assert UML.state(NAMES[0]) is MachineState.GONE
