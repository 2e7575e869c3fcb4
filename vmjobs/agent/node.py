"""Describes this node to the API and to HTCondor."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from vmjobs import __version__
from vmjobs.agent.background import StoppableLoop
from vmjobs.config import Config
from vmjobs.errors import Forbidden, Unauthenticated, VMJobsError
from vmjobs.hypervisor.base import ProbeResult
from vmjobs.hypervisor.network import guest_network
from vmjobs.hypervisor.sandbox import bubblewrap
from vmjobs.model import MIB, HypervisorInfo, NetworkMode, Node, now
from vmjobs.wire import NodeWishes

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 15.0


def describe(
    name: str,
    settings: Config,
    probes: tuple[ProbeResult, ...],
    images: list[str],
    running: tuple[str, ...],
    image_names: tuple[str, ...] = (),
) -> Node:
    free = shutil.disk_usage(settings.state_dir).free // MIB
    networks = (
        guest_network.available_modes() if _has_isolation(settings.isolation) else (NetworkMode.NONE,)
    )
    return Node(
        name=name,
        site=settings.site,
        version=__version__,
        cpus=settings.node_cpus or len(os.sched_getaffinity(0)),
        memory=settings.node_memory or memory_mib(),
        disk=free,
        hypervisors=tuple(
            HypervisorInfo(
                kind=p.kind,
                works=p.works,
                detail=p.detail[:4096],
                seconds=p.seconds,
                version=p.version[:256],
                cpus=p.abilities.cpus,
                cloud_init=p.abilities.cloud_init,
                architectures=p.abilities.architectures,
            )
            for p in probes
        ),
        images=tuple(images),
        running=running,
        image_names=image_names,
        cluster_cpus=settings.cluster_cpus,
        cluster_memory=settings.cluster_memory if NetworkMode.OUTBOUND in networks else 0,
        cluster_disk=settings.cluster_disk or (free + _cluster_vm_disk_mib(settings)) // 2,
        networks=networks,
        updated=now(),
    )


@cache
def _has_isolation(isolation: str) -> bool:
    """Whether VMs are isolated, which a network requires."""
    return isolation == "required" or not bubblewrap.unavailable_reason()


class NodeAnnouncer(StoppableLoop):
    """Registers the node at once, every few seconds, and on :meth:`wake`, after a change.

    register: registers the node at the service, and returns the service's requests to it.
    on_wishes: called with these requests, after each registration.
    on_token_fault: called with why the service rejects the node's token, or with "" if it accepts it.
    """

    def __init__(
        self,
        register: Callable[[Node], NodeWishes],
        describe_now: Callable[[], Node],
        on_wishes: Callable[[NodeWishes], object],
        on_token_fault: Callable[[str], object] = lambda _why: None,
    ) -> None:
        super().__init__()
        self._register, self._describe, self._on_wishes = register, describe_now, on_wishes
        self._on_token_fault = on_token_fault

    def run(self) -> None:
        while not self._stopped:
            self.step()
            self._await_wake(ANNOUNCE_SECONDS)

    def step(self) -> None:
        """Register once; log a failure."""
        try:
            wishes = self._register(self._describe())
        except (VMJobsError, OSError, ValueError) as error:
            log.warning("cannot register this node with the API: %s", error)
            if isinstance(error, Unauthenticated | Forbidden):
                self._on_token_fault(error.message)
        else:
            self._on_token_fault("")
            self._on_wishes(wishes)


def cluster_vm_directory(settings: Config) -> Path:
    return settings.state_dir / "members"


def _cluster_vm_disk_mib(settings: Config) -> int:
    """Return the MiB of disk that cluster VMs use now.

    The scheduler subtracts the VMs' disks from the node's offer, so the offer includes them.
    """
    found = 0
    for directory, _, files in os.walk(cluster_vm_directory(settings)):
        for name in files:
            with suppress(OSError):  # it may be removed meanwhile
                found += Path(directory, name).lstat().st_blocks * 512
    return found // MIB


def memory_mib() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
