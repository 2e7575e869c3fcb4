"""Starts workers of a pool in VMs by hand: what they cost without vmjobs.

It runs on an execute node: ``cluster_by_hand.py STORE DIGEST MEMORY DISK COLLECTOR DOMAIN VM...``,
each ``NAME=TOKEN=ID``. Image, guest program and its script are those of a virtual cluster. Disks,
endpoint, network and token exist before the clock starts. The program prints ``prepared``, starts
all VMs at once when it reads a line from stdin, and ends them when stdin ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.raw_boot import Disks, connect, uml
from condor.worker import WorkerKit
from images.store.image_store import ImageStore
from vmjobs.agent.cluster_vms.services import script_ticket
from vmjobs.agent.guest.endpoint import serving
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.vm.events import EventQueue
from vmjobs.agent.vm.job_disk import SIZE_UNIT, JobDescription, create_blank_disk, write_job_disk
from vmjobs.cluster.vm_state import Goal
from vmjobs.cluster.wire import ClusterVmOrder, PoolAddress
from vmjobs.config import load
from vmjobs.hypervisor.base import ENDPOINT_ADDRESS, BootImage, VmConfig
from vmjobs.hypervisor.network import guest_network
from vmjobs.hypervisor.network.outbound import OutboundPolicy
from vmjobs.hypervisor.sandbox import bubblewrap, helper_processes
from vmjobs.hypervisor.sandbox.process_launcher import Launcher
from vmjobs.model import MIB, NetworkMode

TOKEN, SENTINEL = "t" * 43, "5" * 32


def prepare(
    stack: ExitStack, image: BootImage, order: ClusterVmOrder, pool_token: str
) -> Callable[[], subprocess.Popen[bytes]]:
    """Prepare all that a VM needs; returns the function that starts it."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="by-hand-")))
    inputs = directory / "inputs"
    inputs.mkdir()
    ticket = script_ticket(order, 1, WorkerKit(), inputs)
    disks = Disks(
        directory / "job.disk", directory / "scratch.disk", directory / "output.disk", SENTINEL
    )
    address = f"http://{ENDPOINT_ADDRESS}"
    job_description = JobDescription(ticket, address, TOKEN, SENTINEL)
    write_job_disk(
        disks.job, job_description, lambda f, disk: disk.write((inputs / f.name).read_bytes())
    )
    create_blank_disk(disks.scratch, order.disk * MIB)
    create_blank_disk(disks.output, SIZE_UNIT)
    link = GuestSession(
        token=TOKEN,
        event_queue=EventQueue(),
        logs={},
        max_log=0,
        on_output=lambda words: None,
        pool_token=lambda: pool_token,
    )
    network = connect(stack, NetworkMode.OUTBOUND)
    stack.enter_context(serving(link, network))
    around = VmConfig(order.name, 1, order.memory, image, (), directory / "console", directory, network)
    guest_network.set_up_network(Launcher(), around, OutboundPolicy(load().network_allow))
    stack.callback(_end_helpers, order.name)
    inside = bubblewrap.enter_command(network.namespace_files)
    argv = [*inside, *uml(image, ticket.spec, disks, directory, networked=True)]
    console = stack.enter_context((directory / "console").open("wb"))

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            cwd=directory,
            env={"PATH": os.environ["PATH"], "TMPDIR": "/dev/shm"},  # noqa: S108 - as the agent's
            start_new_session=True,
        )

    return start


def _end_helpers(name: str) -> None:
    for process in helper_processes.find(name):
        os.kill(process.pid, signal.SIGKILL)


def main() -> None:
    """Prepare the VMs, start them after a line on stdin, and end them when stdin ends."""
    store, digest, memory, disk, collector, domain, *vms = sys.argv[1:]
    image = ImageStore(Path(store)).prepare(digest)
    with ExitStack() as stack:
        starts = []
        for name, token, vm in (vm.split("=") for vm in vms):
            order = ClusterVmOrder(
                id=vm,
                cluster="byhand",
                name=name,
                goal=Goal.RUN,
                image=digest,
                cpus=1,
                memory=int(memory),
                disk=int(disk),
                pool=PoolAddress(name="byhand", collector=collector, trust_domain=domain),
                boot_seconds=300,
                drain_seconds=0,
            )
            starts.append(prepare(stack, image, order, token))
        print("prepared", flush=True)  # noqa: T201
        if sys.stdin.readline():
            running = [start() for start in starts]
            sys.stdin.read()
            for guest in running:
                os.killpg(guest.pid, 9)
                guest.wait()


if __name__ == "__main__":
    main()
