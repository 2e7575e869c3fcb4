"""The services that cluster VMs of a node share, and the job that their guests run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vmjobs.agent.members.journal import MemberJournal
from vmjobs.agent.members.telling import Reporter, Shipper
from vmjobs.agent.run import Choose
from vmjobs.cluster.wire import MemberOrder
from vmjobs.hypervisor.base import Hypervisor, MachineLimits, PrivateCard
from vmjobs.local import describe_inputs
from vmjobs.model import MIB, HypervisorKind, JobSpec, JobTicket
from vmjobs.paths import below
from vmjobs.ports import GuestKit, ImageSource, SeedSource, SessionSource, ShareSource

SCRIPT = "script"
MEGABIT = 1_000_000


@dataclass(frozen=True)
class MemberSettings:
    """Limits (bytes) and deadlines (seconds) of cluster VMs.

    admit_signal: signal that tells a guest's script that it may accept jobs.
    """

    max_console: int
    silence_seconds: float = 120.0
    admit: int = signal.SIGUSR1


@dataclass(frozen=True)
class MemberParts:
    """The services of this node that its cluster VMs share.

    sessions: None: no SSH sessions.
    card: returns the private network card of an order's VM; called at each boot.
    words: receives the output of a VM's script with id and incarnation, from any thread.
    """

    images: ImageSource
    choose: Choose
    drivers: Mapping[HypervisorKind, Hypervisor]
    journal: MemberJournal
    source: ShareSource
    reporter: Reporter
    shipper: Shipper
    kit: GuestKit
    settings: MemberSettings
    seeds: SeedSource | None = None
    sessions: SessionSource | None = None
    card: Callable[[MemberOrder], PrivateCard | None] = lambda _order: None
    words: Callable[[str, int, bytes], object] = lambda _member, _incarnation, _words: None


def limits_of(order: MemberOrder) -> MachineLimits:
    """Return the order's limits in a driver's units."""
    disk, network = order.limits.disk_mib_s, order.limits.network_mbit_s
    return MachineLimits(
        cpu_percent=order.limits.cpu_percent,
        cpu_weight=order.limits.cpu_weight,
        disk_bytes=None if disk is None else disk * MIB,
        network_bits=None if network is None else network * MEGABIT,
    )


def ticket_of(order: MemberOrder, incarnation: int, kit: GuestKit, inputs: Path) -> JobTicket:
    """Return the guest's script as a job; write the files beside the script to ``inputs``."""
    contents = dict(kit.files(order, incarnation))
    script = contents.pop(SCRIPT)
    files = {}
    for name, data in contents.items():
        files[name] = below(inputs, name)
        files[name].parent.mkdir(parents=True, exist_ok=True)
        files[name].write_bytes(data)
    spec = JobSpec(
        image=order.image,
        script=script.decode(),
        inputs=describe_inputs(files),
        cpus=order.cpus,
        memory=order.memory,
        disk=order.disk,
        network=order.network,
        boot_seconds=order.boot_seconds,
    )
    return JobTicket(
        job_id=order.id,
        attempt=f"{order.id}-{incarnation}",
        index=0,
        count=1,
        image_digest=order.image,
        spec=spec,
    )
