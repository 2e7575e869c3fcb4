"""Ports and listening sockets, such as those of a VM's guest network."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from vmjobs.hypervisor.base import ENDPOINT_PORT, Network
from vmjobs.model import NetworkMode

#: Below those that the kernel gives to programs that ask for any: none of them can take such a port.
_PORTS = range(10000, 32768)


def free_ports(count: int) -> list[int]:
    """Ports of this host at which nothing listens now."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            port = secrets.choice(_PORTS)
            with suppress(OSError):  # it is in use
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


def free_port() -> int:
    return free_ports(1)[0]


def listener(path: Path) -> socket.socket:
    """A socket that listens at a path."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()
    return server


def guest_network() -> Network:
    """The network of a guest whose endpoint is a port on loopback."""
    server = socket.create_server(("127.0.0.1", 0))
    dhcp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    return Network(NetworkMode.REPOSITORY, (-1, -1), {ENDPOINT_PORT: server}, dhcp, 1500)
