"""Two machines on a switch of their own: User Mode Linux, the kernel's own cards, real frames."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypervisor_host
import pytest
from hypervisor_guest import root_disk_guest
from hypervisor_host import Bench

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import switch
from vmjobs.hypervisor.base import BootImage, Machine, MachineState, Network, PrivateLink
from vmjobs.hypervisor.uml import UserModeLinux
from vmjobs.model import NetworkMode

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SUM = "7202826a7791073fe2787f0c94603278"  # of a MiB of the letter a


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> BootImage:
    return root_disk_guest(tmp_path_factory.mktemp("guest"))


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "switch"
    yield path
    if (pid := switch.process(path)) is not None:
        os.kill(pid, signal.SIGTERM)


@pytest.fixture
def lan(image: BootImage, cable: Path) -> Iterator[Bench]:
    with hypervisor_host.bench(UserModeLinux(), image, cable.parent, memory=64) as made:
        yield made


def neighbour(lan: Bench, number: int, network: Network | None = None) -> Machine:
    """One of the machines."""
    targets = f"targets={ADDRESSES[number]},{ADDRESSES[1 - number]}"
    links = (PrivateLink(lan.directory / "switch", switch.mac(number)),)
    return lan.machine("lan", targets, network=network, links=links)


def check_met(lan: Bench, number: int, machine: Machine, card: str) -> None:
    """Wait until a machine has met the other one through this card, and got a MiB from it."""
    other = ADDRESSES[1 - number]
    lan.until(machine, f"met={other} through {card} at {switch.mac(number)}")
    lan.until(machine, f"got={SUM}")


def test_two_machines_reach_each_other_beside_their_way_out(lan: Bench, cable: Path) -> None:
    switch.ensure(cable)
    pair = [neighbour(lan, number, lan.network(NetworkMode.OUTBOUND)) for number in (0, 1)]
    for machine in pair:
        lan.driver.start(machine)
    for number, machine in enumerate(pair):
        check_met(lan, number, machine, "vec1")


def test_they_go_on_without_who_started_them_and_see_a_newcomer(lan: Bench, cable: Path) -> None:
    """Without another way out. The switch has no parent to lose: it is found again by its socket."""
    pid = switch.ensure(cable)
    pair = [neighbour(lan, number) for number in (0, 1)]
    for machine in pair:
        lan.driver.start(machine)
    for number, machine in enumerate(pair):
        check_met(lan, number, machine, "vec0")
    lan.driver.destroy(pair[1].name)
    assert switch.process(cable) == pid
    assert lan.driver.state(pair[0].name) is MachineState.RUNNING
    newcomer = neighbour(lan, 1)
    lan.driver.start(newcomer)
    check_met(lan, 1, newcomer, "vec0")


def test_without_a_switch_no_machine_starts(lan: Bench) -> None:
    machine = neighbour(lan, 0)
    with pytest.raises(HypervisorError, match="no switch answers at"):
        lan.driver.start(machine)
    assert lan.driver.state(machine.name) is MachineState.GONE
