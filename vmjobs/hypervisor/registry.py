"""The drivers of a node, from its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from vmjobs.config import Config
from vmjobs.hypervisor.base import Hypervisor
from vmjobs.hypervisor.libvirt import Connection, Libvirt
from vmjobs.hypervisor.probe import node_kernels
from vmjobs.hypervisor.uml import UserModeLinux
from vmjobs.model import HypervisorKind


def drivers(
    config: Config, kernels: Callable[[], Iterable[Path]] = tuple
) -> dict[HypervisorKind, Hypervisor]:
    """The drivers that are set up, best first. Nothing is started or opened yet.

    Args:
        kernels: kernels of images that are on this node, for probes; the node's own are tried
            after them.
    """
    connection = Connection()

    def candidates() -> list[Path]:
        return [*kernels(), *node_kernels()]

    def make(kind: HypervisorKind) -> Hypervisor:
        if kind is HypervisorKind.UML:
            return UserModeLinux()
        return Libvirt(kind, connection, kernels=candidates)

    return {kind: make(kind) for kind in config.hypervisors}
