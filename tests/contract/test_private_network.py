"""VMs on a private network: User-mode Linux, network cards of the kernel, real frames."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from tests.kit import hypervisors
from tests.kit.guests import root_disk_guest
from tests.kit.hypervisors import Bench
from tests.kit.waiting import wait_until
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import (
    BootImage,
    Network,
    PrivateCard,
    PrivateNetwork,
    VmConfig,
    VmState,
)
from vmjobs.hypervisor.network import private_network
from vmjobs.hypervisor.sandbox.process_launcher import Launcher
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import NetworkMode

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SUM = "7202826a7791073fe2787f0c94603278"  # of a MiB of the letter a
ALL = "ff:ff:ff:ff:ff:ff"


def mac(number: int) -> str:
    return f"02:76:00:00:00:{number:02x}"


def frame(target: str, source: str, text: bytes = b"hello") -> bytes:
    """Return an Ethernet frame of an experimental protocol (IEEE 802, 0x88b5)."""
    addresses = bytes.fromhex(f"{target}{source}".replace(":", ""))
    return addresses + b"\x88\xb5" + text.ljust(46)


# --------------------------------------------------------------------------- cards without VMs


@pytest.fixture
def launcher() -> Launcher:
    return Launcher()


@pytest.fixture
def network(launcher: Launcher) -> Iterator[PrivateNetwork]:
    with closing(private_network.create(launcher)) as made:
        yield made


@pytest.fixture
def cards(launcher: Launcher, network: PrivateNetwork) -> Iterator[list[socket.socket]]:
    """Three cards, as VMs use them."""
    with ExitStack() as stack:
        plugged = [
            private_network.connect_card(launcher, PrivateCard(network, mac(n))) for n in range(3)
        ]
        for card in plugged:
            stack.enter_context(card)
        yield plugged


def got(card: socket.socket, least: int = 1) -> list[bytes]:
    """Receive frames, at least so many, until none arrives any more."""
    found: list[bytes] = []
    while True:
        card.settimeout(60 if len(found) < least else 0.3)
        try:
            found.append(card.recv(2000))
        except TimeoutError:
            return found


def check_got(cards: list[socket.socket], *frames: list[bytes]) -> None:
    """Check that the cards receive these frames, and no others."""
    assert [got(card, len(few)) for card, few in zip(cards, frames, strict=True)] == [*frames]


def test_a_frame_reaches_its_receivers_and_not_its_sender(cards: list[socket.socket]) -> None:
    asked, answer = frame(ALL, mac(0)), frame(mac(0), mac(1), b"here")
    cards[0].send(asked)
    check_got(cards, [], [asked], [asked])
    cards[1].send(answer)
    check_got(cards, [answer], [], [])


@pytest.mark.parametrize("source", [mac(1), mac(9), ALL])
def test_a_frame_from_a_foreign_address_is_dropped(cards: list[socket.socket], source: str) -> None:
    cards[0].send(frame(mac(2), source))
    cards[0].send(frame(ALL, source))
    cards[1].send(frame(ALL, mac(1)))
    check_got(cards, [frame(ALL, mac(1))], [], [frame(ALL, mac(1))])


def test_the_namespace_of_a_card_has_no_other_device(cards: list[socket.socket]) -> None:
    """A compromised hypervisor can bind the socket to any device of the card's namespace."""
    assert [_devices(card) for card in cards] == [{"lo", "card"}] * 3


def _devices(of: socket.socket) -> set[str]:
    """Return the names of all devices in a socket's namespace (netdevice(7), SIOCGIFNAME)."""
    found = set()
    for index in range(1, 100):
        with suppress(OSError):
            named = fcntl.ioctl(of, 0x8910, struct.pack("16xi20x", index))
            found.add(named[:16].rstrip(b"\0").decode())
    return found


def test_a_new_card_may_have_the_address_of_one_that_was_closed(
    launcher: Launcher, network: PrivateNetwork, cards: list[socket.socket]
) -> None:
    cards[0].close()
    with private_network.connect_card(launcher, PrivateCard(network, mac(0))) as again:
        again.send(frame(mac(1), mac(0)))
        assert got(cards[1]) == [frame(mac(1), mac(0))]
        cards[1].send(frame(mac(0), mac(1)))
        assert got(again) == [frame(mac(0), mac(1))]


def test_a_network_ends_with_its_last_handle(launcher: Launcher) -> None:
    with closing(private_network.create(launcher)) as network:
        card = private_network.connect_card(launcher, PrivateCard(network, mac(0)))
        assert "card" in _devices(card)
    with card:
        wait_until(lambda: "card" not in _devices(card), what="its other end is gone")


# --------------------------------------------------------------------------- VMs


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> BootImage:
    return root_disk_guest(tmp_path_factory.mktemp("guest"))


@pytest.fixture
def lan(image: BootImage, tmp_path: Path) -> Iterator[Bench]:
    with hypervisors.bench(UserModeLinux(), image, tmp_path, memory=64) as made:
        yield made


def neighbour(
    lan: Bench, private: PrivateNetwork, number: int, network: Network | None = None
) -> VmConfig:
    """Return the configuration of one of the VMs."""
    targets = f"targets={ADDRESSES[number]},{ADDRESSES[1 - number]}"
    return lan.vm("lan", targets, network=network, card=PrivateCard(private, mac(number)))


def check_met(lan: Bench, number: int, vm: VmConfig, card: str) -> None:
    """Wait until a VM has reached the other one through this card and received a MiB."""
    other = ADDRESSES[1 - number]
    lan.until(vm, f"met={other} through {card} at {mac(number)}")
    lan.until(vm, f"got={SUM}")


def test_two_vms_reach_each_other_beside_their_way_out(lan: Bench) -> None:
    with closing(lan.driver.open_private_network([])) as private:
        outs = [lan.network(NetworkMode.OUTBOUND) for _ in ADDRESSES]
        pair = [neighbour(lan, private, number, out) for number, out in enumerate(outs)]
        for vm in pair:
            lan.driver.start(vm)
        for number, vm in enumerate(pair):
            check_met(lan, number, vm, "vec1")


def test_they_go_on_without_who_started_them_and_see_a_newcomer(lan: Bench) -> None:
    """The VMs have no other network. A new driver finds this one by any VM on it."""
    with closing(lan.driver.open_private_network([])) as private:
        pair = [neighbour(lan, private, number) for number in (0, 1)]
        for vm in pair:
            lan.driver.start(vm)
    for number, vm in enumerate(pair):
        check_met(lan, number, vm, "vec0")
    lan.driver.destroy(pair[1].name)
    assert lan.driver.state(pair[0].name) is VmState.RUNNING
    names = ["vmjobs-never-seen", *(vm.name for vm in pair)]
    with closing(UserModeLinux().open_private_network(names)) as found:
        newcomer = neighbour(lan, found, 1)
        lan.driver.start(newcomer)
    check_met(lan, 1, newcomer, "vec0")


def test_a_card_that_cannot_be_made_starts_no_vm(lan: Bench) -> None:
    with closing(lan.driver.open_private_network([])) as private:
        vm = lan.vm("lan", card=PrivateCard(private, "no address"))
        with pytest.raises(HypervisorError, match="cannot set up the network of a VM"):
            lan.driver.start(vm)
    assert lan.driver.state(vm.name) is VmState.GONE
