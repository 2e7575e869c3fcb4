"""A VM that was started, with its watch, the session of its guest, and its network."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from socket import socket as Socket

from vmjobs.agent.guest.endpoint import serving
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.vm.vm_watch import VmWatch
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import ENDPOINT_PORT, Hypervisor, Network, ShutdownCause
from vmjobs.model import NetworkMode

log = logging.getLogger(__name__)

#: Serves a listening socket while the context lasts.
PortHandler = Callable[[Socket], AbstractContextManager[None]]


@dataclass(frozen=True)
class RunningVm:
    """A VM that was started. name: of the VM, as its driver knows it."""

    driver: Hypervisor
    name: str
    guest_session: GuestSession
    watch: VmWatch

    def expect_heartbeats(self) -> None:
        """Expect heartbeats from now on: a silent guest counts as lost."""
        self.guest_session.heard = time.monotonic()
        self.watch.listening = True

    def ignore_silence(self) -> None:
        """Expect no heartbeats from now on."""
        self.watch.listening = False

    def ask_to_power_off(self) -> None:
        """Ask the guest to power off; log a failure."""
        try:
            self.driver.stop(self.name)
        except HypervisorError as error:
            log.warning("cannot ask %s to power off: %s", self.name, error)

    def shutdown_cause(self) -> ShutdownCause:
        """Return how the VM ended; UNKNOWN if the driver cannot determine that now."""
        try:
            return self.driver.shutdown_cause(self.name)
        except HypervisorError as error:
            log.warning("cannot determine how %s ended: %s", self.name, error)
            return ShutdownCause.UNKNOWN


def serve_guest(
    resources: ExitStack,
    driver: Hypervisor,
    guest_session: GuestSession,
    mode: NetworkMode,
    port_handlers: Mapping[int, PortHandler],
    running: str = "",
) -> Network:
    """Make a VM's network; serve the guest endpoint and further ports there until ``resources`` end.

    running: name of the VM if it runs already.
    """
    network = driver.open_network(mode, (ENDPOINT_PORT, *port_handlers), running=running)
    resources.callback(network.close)
    resources.enter_context(serving(guest_session, network))
    for port, handler in port_handlers.items():
        resources.enter_context(handler(network.listening[port]))
    return network
