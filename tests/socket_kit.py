"""Listening sockets for tests, such as those of a VM's guest network."""

from __future__ import annotations

import socket
from pathlib import Path

from vmjobs.hypervisor.base import ENDPOINT_PORT, Network
from vmjobs.model import NetworkMode


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
    return Network(NetworkMode.REPOSITORY, (-1, -1), {ENDPOINT_PORT: server}, dhcp)
