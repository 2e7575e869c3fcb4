"""A VM that was started, with its watch and the session of its guest."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.run.vm_watch import VmWatch
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import Hypervisor, ShutdownCause

log = logging.getLogger(__name__)


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
