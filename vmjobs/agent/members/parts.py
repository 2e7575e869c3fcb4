"""What machines of clusters are made with, and what their guests are given to run."""

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
    """Limits (bytes) and deadlines (seconds) of members.

    admit: signal that tells a guest's script that it is admitted.
    """

    max_console: int
    silence_seconds: float = 120.0
    admit: int = signal.SIGUSR1


@dataclass(frozen=True)
class MemberParts:
    """What machines of clusters are made with on this node.

    sessions: None: nobody logs in to them.
    card: the card on a private network that an order's machine gets, asked for whenever it boots.
    words: is told what a machine's script prints, by member and incarnation, from any thread.
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
    """The order's limits in a driver's units."""
    disk, network = order.limits.disk_mib_s, order.limits.network_mbit_s
    return MachineLimits(
        cpu_percent=order.limits.cpu_percent,
        cpu_weight=order.limits.cpu_weight,
        disk_bytes=None if disk is None else disk * MIB,
        network_bits=None if network is None else network * MEGABIT,
    )


def ticket_of(order: MemberOrder, incarnation: int, kit: GuestKit, inputs: Path) -> JobTicket:
    """What the guest runs, as a job of its; the files beside the script are put into ``inputs``."""
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
