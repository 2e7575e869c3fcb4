"""Ports of a VM that the node publishes: slirp4netns listens there, and connects to the VM."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack, suppress
from typing import Final

from vmjobs.errors import HypervisorError, reason_of
from vmjobs.hypervisor.base import GUEST_ADDRESS, VmConfig
from vmjobs.model import PublishedPort

#: The socket of slirp4netns's API, in the VM's directory, until its ports are published.
API_SOCKET: Final = "slirp4netns"
_ANSWER_SECONDS: Final = 10.0
_ANSWER_BYTES: Final = 4096


def publish(vm: VmConfig) -> None:
    """Publish a VM's ports; afterwards slirp4netns takes no more requests.

    Raises:
        HypervisorError: a port cannot be published, and why.
    """
    with ExitStack() as closing:
        # A socket's name has at most 107 bytes; that of the directory may have more.
        directory = os.open(vm.workdir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        closing.callback(os.close, directory)
        closing.enter_context(suppress(FileNotFoundError))
        closing.callback(os.unlink, API_SOCKET, dir_fd=directory)
        for one in vm.published:
            try:
                is_published = _forward(f"/proc/self/fd/{directory}/{API_SOCKET}", one)
            except (OSError, ValueError) as error:
                why = reason_of(error) if isinstance(error, OSError) else "its answer is no JSON"
                raise HypervisorError(f"slirp4netns publishes no port of {vm.name}: {why}") from error
            if not is_published:
                raise HypervisorError(
                    f"cannot publish the port {one} of {vm.name}: "
                    "another program uses it, or this host has no such address"
                )


def _forward(api: str, one: PublishedPort) -> bool:
    """Ask slirp4netns to forward a port; return whether it does (slirp4netns(1), API socket)."""
    here = {"host_addr": str(one.address), "host_port": one.port}
    there = {"guest_addr": GUEST_ADDRESS, "guest_port": one.vm_port}
    wanted = {"execute": "add_hostfwd", "arguments": {"proto": "tcp", **here, **there}}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        connection.connect(api)
        connection.sendall(json.dumps(wanted).encode())
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return "return" in json.loads(answer.read(_ANSWER_BYTES))
