"""What this node says about itself, to the API and to HTCondor."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from typing import Protocol

from vmjobs import __version__
from vmjobs.config import Config
from vmjobs.errors import VMJobsError
from vmjobs.hypervisor.base import ProbeResult
from vmjobs.model import MIB, HypervisorInfo, Node, now

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 15.0


class NodeRegistry(Protocol):
    """Where nodes are announced."""

    def put_node(self, node: Node) -> None:
        """Announce a node, or refresh what is known of it."""


def describe(
    name: str,
    settings: Config,
    probes: tuple[ProbeResult, ...],
    images: list[str],
    running: tuple[str, ...],
) -> Node:
    """The node as it is now."""
    return Node(
        name=name,
        version=__version__,
        cpus=settings.node_cpus or len(os.sched_getaffinity(0)),
        memory=settings.node_memory or _memory_mib(),
        disk=shutil.disk_usage(settings.state_dir).free // MIB,
        hypervisors=tuple(
            HypervisorInfo(
                kind=p.kind,
                works=p.works,
                detail=p.detail[:4096],
                seconds=p.seconds,
                version=p.version[:256],
            )
            for p in probes
        ),
        images=tuple(images),
        running=running,
        updated=now(),
    )


def announce(registry: NodeRegistry, describe_now: Callable[[], Node], stop: threading.Event) -> None:
    """Announce the node at once and every few seconds until ``stop`` is set."""
    while True:
        try:
            registry.put_node(describe_now())
        except (VMJobsError, OSError, ValueError) as error:
            log.warning("the API was not told about this node: %s", error)
        if stop.wait(ANNOUNCE_SECONDS):
            return


def _memory_mib() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
