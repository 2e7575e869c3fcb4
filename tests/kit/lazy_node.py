"""A node that runs jobs on real VMs while their images are still being fetched.

The guest is a kernel with an initial file system, so that the root disk is read only as the job says:
by an input file with commands for its shell. As a program it is an agent for one job, to be
killed. Arguments: the node's directory, the API's URL, a node's token, the image and the commands.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from images.cache.node_cache import ImageCache
from tests.kit.agent_runs import SETTINGS, Lease, executed, job_that
from tests.kit.guests import BEGIN
from tests.kit.lazy_images import PATIENT
from vmjobs.agent.journal import Journal
from vmjobs.agent.run.job_run import execute
from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.agent.run.services import RunServices, RunSettings
from vmjobs.agent.run.state import Run, RunRequest
from vmjobs.agent.vm.events import EventQueue
from vmjobs.client import ImageClient
from vmjobs.hypervisor.base import Hypervisor
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.local import LocalJob
from vmjobs.model import HypervisorKind, Report

#: The init of the guest's initial file system.
INIT = (
    BEGIN
    + r"""
mount -t tmpfs tmp /tmp
mkdir -p /tmp/job /tmp/outputs
cd /tmp
tar xf /dev/vdb -C job
. job/inputs/do
tar cf /dev/vdd outputs
sync
poweroff -f
"""
)


def qemu() -> Libvirt:
    return Libvirt(HypervisorKind.QEMU, node_connection())


@dataclass
class Node:
    folder: Path
    cache: ImageCache
    driver: Hypervisor
    image: str
    settings: RunSettings = SETTINGS

    def start(self, do: str, **fields: object) -> tuple[Run, Lease, Path]:
        """Make a run, its lease, and the directory of its outputs."""
        job = job_that(do, self.folder, LocalJob, self.image, **{"exit": "poweroff", **fields})
        journal = Journal(self.folder / "runs")
        services = RunServices(self.cache, lambda *_, **__: self.driver, journal, self.settings)
        lease = Lease()
        run = Run(RunRequest(job, lease.progress, services, job.job_id, uuid.uuid4().hex, EventQueue()))
        return run, lease, job.output_directory

    def run(
        self, do: str, meddle: Callable[[Run, Lease], None] | None = None, **fields: object
    ) -> tuple[RunOutcome, Path]:
        """Run a job; returns its outcome and output directory. meddle: acts on it meanwhile."""
        run, lease, outputs = self.start(do, **fields)
        return executed(run, lease, meddle), outputs


def agent(folder: str, url: str, token: str, image: str, do: str) -> None:
    """Run one job, and print each of its states."""
    fetcher = ImageClient(url, token, retries=PATIENT)
    cache = ImageCache(Path(folder) / "images", fetcher, lazy_start=True)
    node = Node(Path(folder), cache, qemu(), image)
    run, _, _ = node.start(do)

    def progress(report: Report) -> None:
        sys.stdout.write(f"{report.state}\n")
        sys.stdout.flush()

    run.request = replace(run.request, on_report=progress)
    execute(run)


if __name__ == "__main__":
    agent(*sys.argv[1:])
