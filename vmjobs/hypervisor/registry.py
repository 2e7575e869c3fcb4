"""Creates the hypervisor drivers of a node, from its settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from vmjobs.config import Config
from vmjobs.hypervisor.base import Hypervisor
from vmjobs.hypervisor.libvirt import qemu_sandbox, qemu_wrapper
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.network.outbound import OutboundPolicy
from vmjobs.hypervisor.probe import node_kernels
from vmjobs.hypervisor.sandbox import bubblewrap
from vmjobs.hypervisor.sandbox.process_launcher import Launcher
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.hypervisor.xen.driver import Xen
from vmjobs.model import HypervisorKind

log = logging.getLogger(__name__)

_NOT_ISOLATED_WARNING = (
    "%s are NOT ISOLATED: %s; a guest that breaks out of its VM has the agent's rights"
)


def drivers(
    config: Config, kernels: Callable[[], Iterable[Path]] = tuple
) -> dict[HypervisorKind, Hypervisor]:
    """Return the configured drivers, best first; the process launcher starts meanwhile.

    Args:
        kernels: kernels of images on this node, for probes; the node's own are tried after them.
    """
    connection, launcher = node_connection(), Launcher()
    launcher.prepare()
    policy = OutboundPolicy(config.network_allow, config.network_deny)
    isolated, by_libvirt = _isolated(config), _isolated_by_libvirt(config)

    def candidates() -> list[Path]:
        return [*kernels(), *node_kernels()]

    def make(kind: HypervisorKind) -> Hypervisor:
        if kind is HypervisorKind.UML:
            return UserModeLinux(
                isolated=isolated,
                launcher=launcher,
                system_calls=config.uml_system_calls,
                policy=policy,
            )
        if kind is HypervisorKind.XEN:
            return Xen(kernels=candidates, launcher=launcher, policy=policy)
        return Libvirt(
            kind,
            connection,
            kernels=candidates,
            launcher=launcher,
            isolated=isolated and by_libvirt,
            policy=policy,
            hidden_features=config.kvm_hidden_features,
        )

    return {kind: make(kind) for kind in config.hypervisors}


def _isolated(config: Config) -> bool:
    """Whether VMs are isolated; if the operator prefers that only: if possible."""
    if config.isolation == "required":
        return True
    fault = bubblewrap.unavailable_reason()
    if fault:
        log.warning(_NOT_ISOLATED_WARNING, "VMs", fault)
    return not fault


def _isolated_by_libvirt(config: Config) -> bool:
    """The same for VMs that libvirt starts, which need one more program."""
    missing = qemu_sandbox.find() is None and config.isolation == "preferred"
    if missing:
        log.warning(
            _NOT_ISOLATED_WARNING, "qemu and kvm VMs", f"{qemu_wrapper.PROGRAM} is not installed"
        )
    return not missing
