"""Private networks between VMs of one node: a bridge in a network namespace.

::

    network namespace of the network     network namespace of a card    VM
    lan (bridge) ┬ p7f3a09c1 ─────────── card ───── packet socket ───── vec1
                 └ p0b44e2d7 ─────────── card ───── packet socket ───── vec1 of another VM

A VM gets only the socket. The namespace of its card has only the card and a loopback device that is
down. It ends with the VM, which also removes the card from the bridge. The network ends with the last
VM on it and the last handle of its namespace: it needs no process of its own.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from typing import Final

from vmjobs.errors import HypervisorError, reason_of
from vmjobs.hypervisor.base import PrivateCard, PrivateNetwork
from vmjobs.hypervisor.network.guest_network import run_in_namespaces
from vmjobs.hypervisor.network.namespaces import CARD
from vmjobs.hypervisor.sandbox.launcher import Steps
from vmjobs.hypervisor.sandbox.process_launcher import Launcher

#: Bytes in an IP packet.
MTU: Final = 1500

# The bridge forwards frames and sends none of its own.
_BRIDGE: Final = """\
link add lan type bridge mcast_snooping 0
link set lan addrgenmode none
link set lan up
"""
_PORT: Final = """\
link add {port} mtu {mtu} type veth peer name {card} address {mac} mtu {mtu} netns /proc/self/fd/3
link set {port} addrgenmode none
"""
#: The node's kernel sends nothing through the card: it is the VM's.
_CARD: Final = """\
link set {card} addrgenmode none
link set {card} up
"""
#: After both ends are up: the bridge would wait for link events otherwise.
_JOIN: Final = """\
link set {port} up
link set {port} master lan
"""
#: A VM cannot use another VM's address. The chain ends with its device.
_FILTER: Final = """\
table netdev lan {{
    chain {port} {{
        type filter hook ingress device {port} priority 0
        ether saddr != {mac} drop
    }}
}}
"""


def create(launcher: Launcher) -> PrivateNetwork:
    """Create a network.

    Raises:
        HypervisorError: this node cannot create it, and why.
    """
    there, _ = _run_steps(launcher, [])
    with ExitStack() as undo:
        network = PrivateNetwork(there)
        undo.callback(network.close)
        run_in_namespaces(launcher, there, ["ip", "-batch", "-"], _BRIDGE)
        undo.pop_all()
    return network


def connect_card(launcher: Launcher, card: PrivateCard) -> socket.socket:
    """Create a card; return a socket of its frames.

    The card exists until the last copy of the socket is closed.

    Raises:
        HypervisorError: the card cannot be created, and why.
    """
    there = card.network.namespaces
    alone, _ = _run_steps(launcher, [("leave_network", {})], there)
    with ExitStack() as closing:
        for handle in alone:
            closing.callback(os.close, handle)
        names = {"port": f"p{os.urandom(4).hex()}", "card": CARD, "mac": card.mac, "mtu": MTU}
        run_in_namespaces(
            launcher, there, ["ip", "-batch", "-"], _PORT.format(**names), passed_handles=[alone[1]]
        )
        run_in_namespaces(launcher, alone, ["ip", "-batch", "-"], _CARD.format(**names))
        run_in_namespaces(launcher, there, ["nft", "-f", "-"], _FILTER.format(**names))
        run_in_namespaces(launcher, there, ["ip", "-batch", "-"], _JOIN.format(**names))
        again, (card_socket,) = _run_steps(launcher, [("open_card", {})], alone)
        for handle in again:
            closing.callback(os.close, handle)
        return card_socket


def _run_steps(
    launcher: Launcher, steps: Steps, there: tuple[int, int] | None = None
) -> tuple[tuple[int, int], list[socket.socket]]:
    try:
        return launcher.run_steps(steps, there)
    except OSError as error:
        raise HypervisorError(f"no VM can have a private network: {reason_of(error)}") from error
