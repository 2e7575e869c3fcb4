"""The service's API about the cluster VMs of a node, as the agent uses it."""

from __future__ import annotations

from typing import Protocol

from vmjobs.cluster.wire import Assignment, ClusterVmReports, PoolToken


class AssignmentSource(Protocol):
    """The service's API about the cluster VMs of a node. Raises ``Unavailable("api", …)``.

    ``Forbidden``: the VM does not belong to this node, or has another incarnation now.
    """

    def assignment(self, seen: int, wait: float) -> Assignment:
        """The node's assignment; waits ``wait`` seconds for a revision other than ``seen``."""

    def report(self, reports: ClusterVmReports) -> None:
        """Report the states of cluster VMs."""

    def token(self, vm: str, incarnation: int) -> PoolToken:
        """A token for a VM that starts or runs. Its older tokens stay valid."""

    def append_console(self, vm: str, incarnation: int, offset: int, data: bytes) -> None:
        """Append to the VM's console; repeated calls are harmless."""
