"""The services that cluster VMs of a node share, and the job that their guests run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vmjobs.agent.cluster_vms.assignment_source import AssignmentSource
from vmjobs.agent.cluster_vms.journal import ClusterVmJournal
from vmjobs.agent.cluster_vms.ssh_sessions import SessionSource
from vmjobs.agent.cluster_vms.status_reporter import ConsoleUploader, StatusReporter
from vmjobs.agent.image_source import ImageSource
from vmjobs.cluster.wire import ClusterVmOrder
from vmjobs.hypervisor.base import DriverChooser, Hypervisor, PrivateCard, VmLimits
from vmjobs.local import describe_inputs
from vmjobs.model import MIB, HypervisorKind, JobSpec, JobTicket, PublishedPort
from vmjobs.paths import safe_join

SCRIPT = "script"
MEGABIT = 1_000_000


class GuestFiles(Protocol):
    """Files for the guest of a cluster VM: made by ``condor/``, delivered by the agent.

    The guest program runs ``script`` as root. The script finds the other files in its directory, and
    requests the VM's IDTOKEN with ``GET /v1/token`` from its guest endpoint. It receives signals.
    SIGUSR1: the VM is admitted and may run jobs. SIGUSR2: there is a new token. SIGTERM: drain:
    accept no new job, let the running ones end, leave the pool, and then end with status 0.
    """

    def files(self, order: ClusterVmOrder, incarnation: int) -> Mapping[str, bytes]:
        """Contents by name; ``script`` is one of them."""


@dataclass(frozen=True)
class ClusterVmSettings:
    """Limits (bytes) and deadlines (seconds) of cluster VMs.

    admit_signal: signal that tells a guest's script that it may accept jobs.
    """

    max_console: int
    silence_seconds: float = 120.0
    admit_signal: int = signal.SIGUSR1


@dataclass(frozen=True)
class ClusterVmServices:
    """The services of this node that its cluster VMs share.

    sessions: None: no SSH sessions.
    card: returns the private network card of an order's VM; called at each boot. published: likewise
    the VM's published ports.
    words: receives the output of a VM's script with id and incarnation, from any thread.
    """

    images: ImageSource
    choose: DriverChooser
    drivers: Mapping[HypervisorKind, Hypervisor]
    journal: ClusterVmJournal
    source: AssignmentSource
    reporter: StatusReporter
    console_uploader: ConsoleUploader
    kit: GuestFiles
    settings: ClusterVmSettings
    write_seed: Callable[[Path, JobTicket], object] | None = None
    sessions: SessionSource | None = None
    card: Callable[[ClusterVmOrder], PrivateCard | None] = lambda _order: None
    published: Callable[[ClusterVmOrder], tuple[PublishedPort, ...]] = lambda _order: ()
    words: Callable[[str, int, bytes], object] = lambda _vm, _incarnation, _words: None


def vm_limits(order: ClusterVmOrder) -> VmLimits:
    """Return the order's limits in a driver's units."""
    disk, network = order.limits.disk_mib_s, order.limits.network_mbit_s
    return VmLimits(
        cpu_percent=order.limits.cpu_percent,
        cpu_weight=order.limits.cpu_weight,
        disk_bytes=None if disk is None else disk * MIB,
        network_bits=None if network is None else network * MEGABIT,
    )


def script_ticket(order: ClusterVmOrder, incarnation: int, kit: GuestFiles, inputs: Path) -> JobTicket:
    """Return the guest's script as a job; write the files beside the script to ``inputs``."""
    contents = dict(kit.files(order, incarnation))
    script = contents.pop(SCRIPT)
    files = {}
    for name, data in contents.items():
        files[name] = safe_join(inputs, name)
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
