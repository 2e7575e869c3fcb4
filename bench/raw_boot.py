"""Boots a guest from a hand-written command line: what a start costs without vmjobs.

As a program it boots once and prints seconds: ``raw_boot.py KIND STORE DIGEST NETWORK``. Or it
prepares a guest on an execute node: ``raw_boot.py prepare DIGEST DIRECTORY SCRIPT MEMORY``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from images.store.image_store import ImageStore
from vmjobs.agent.guest.endpoint import serving
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.vm.events import EventQueue, GuestReady
from vmjobs.agent.vm.job_disk import JobDescription, create_blank_disk, write_job_disk
from vmjobs.hypervisor.base import ENDPOINT_ADDRESS, ENDPOINT_PORT, BootImage, Network
from vmjobs.hypervisor.libvirt.domain_xml import board, kernel_parameters
from vmjobs.hypervisor.network import guest_network
from vmjobs.hypervisor.network.guest_network import MAC, MTU
from vmjobs.hypervisor.network.namespaces import TAP
from vmjobs.hypervisor.sandbox import bubblewrap
from vmjobs.hypervisor.sandbox.process_launcher import Launcher
from vmjobs.hypervisor.uml import kernel_boot
from vmjobs.model import MIB, HypervisorKind, JobSpec, JobTicket, NetworkMode

BOOT_SECONDS = 120.0


@dataclass(frozen=True)
class Disks:
    """What a guest needs besides its image, and the word that reports that it is ready."""

    job: Path
    scratch: Path
    output: Path
    sentinel: str


def lay_disks(directory: Path, spec: JobSpec, digest: str, token: str = "") -> Disks:
    """Make the disks that the agent would make for a job without inputs."""
    ticket = JobTicket(
        job_id="by-hand",
        attempt=secrets.token_hex(16),
        index=0,
        count=1,
        image_digest=digest,
        spec=spec,
    )
    sentinel = secrets.token_hex(16)
    endpoint = f"http://{ENDPOINT_ADDRESS}" if token else ""
    job_description = JobDescription(ticket, endpoint, token, sentinel)
    disks = Disks(
        directory / "job.disk", directory / "scratch.disk", directory / "output.disk", sentinel
    )
    write_job_disk(disks.job, job_description, lambda *_: None)
    create_blank_disk(disks.scratch, spec.disk * MIB)
    create_blank_disk(disks.output, (spec.disk + 16) * MIB)
    return disks


def raw_boot(kind: HypervisorKind, image: BootImage, spec: JobSpec, directory: Path) -> float:
    """Boot once in an empty directory, and wait for the guest's end.

    Returns the seconds until the guest is ready.
    """
    online = spec.network is not NetworkMode.NONE
    token = secrets.token_urlsafe(32) if online else ""
    disks = lay_disks(directory, spec, image.digest, token)
    ready: Queue[float] = Queue()
    with ExitStack() as stack:
        prefix: list[str] = []
        if online:
            event_queue = EventQueue()
            _tell(ready, event_queue)
            network = connect(stack, spec.network)
            logs = {name: directory / name for name in ("out", "err")}
            link = GuestSession(
                token=token, event_queue=event_queue, logs=logs, max_log=MIB, on_log=lambda: None
            )
            stack.enter_context(serving(link, network))
            prefix = bubblewrap.enter_command(network.namespace_files)
        make = uml if kind is HypervisorKind.UML else _qemu
        argv = [*prefix, *make(image, spec, disks, directory, networked=online)]
        return _time(argv, directory, None if online else disks.sentinel, ready)


def _tell(ready: Queue[float], event_queue: EventQueue) -> None:
    def work() -> None:
        while (seen := event_queue.next(time.monotonic() + BOOT_SECONDS)) is not None:
            if isinstance(seen, GuestReady):
                ready.put(time.monotonic())
                return

    threading.Thread(target=work, daemon=True).start()


def connect(stack: ExitStack, mode: NetworkMode) -> Network:
    network = guest_network.open_network(Launcher(), mode, [ENDPOINT_PORT], None)
    stack.callback(network.close)
    return network


def uml(
    image: BootImage, spec: JobSpec, disks: Disks, directory: Path, *, networked: bool
) -> list[str]:
    """The command line of a UML kernel, as one would type it."""
    network = [f"vec0:transport=tap,ifname={TAP},gro=1,mac={MAC},mtu={MTU}"] if networked else []
    return [
        kernel_boot.find_kernel(),
        *(["seccomp=on"] if kernel_boot.OWN_KERNEL.exists() else []),
        f"mem={spec.memory}M",
        *("umid=by-hand", "uml_dir=.", "hostfs=/dev/null", "con=null", "con0=null,fd:1", "noreboot"),
        *image.cmdline,
        *("root=/dev/ubda", "rw", "panic=1", "vmjobs=1"),
        f"ubd0c={directory / 'overlay'},{image.root.absolute()}",
        f"ubd1dr={disks.job}",
        f"ubd2d={disks.scratch}",
        f"ubd3d={disks.output}",
        *network,
    ]


def _qemu(
    image: BootImage, spec: JobSpec, disks: Disks, directory: Path, *, networked: bool
) -> list[str]:
    overlay = directory / "overlay.qcow2"
    make = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b"]
    make += [str(image.root.absolute()), str(overlay)]
    subprocess.run(make, check=True)
    network = []
    if networked:
        network = [
            *("-netdev", f"tap,id=net0,ifname={TAP},script=no,downscript=no"),
            *("-device", f"virtio-net-pci,netdev=net0,mac={MAC},host_mtu={MTU},romfile="),
        ]
    words = kernel_parameters(image, board())
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", "q35,accel=tcg", "-cpu", "max", "-m", str(spec.memory), "-serial", "stdio"),
        *("-kernel", _path(image.kernel), "-initrd", _path(image.initrd), "-append", " ".join(words)),
        *_drive(overlay, "qcow2"),
        *_drive(disks.job, "raw", ",readonly=on"),
        *_drive(disks.scratch, "raw"),
        *_drive(disks.output, "raw"),
        *("-object", "rng-random,id=rng0,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng0"),
        *network,
    ]


def _path(part: Path | None) -> str:
    if part is None:
        raise RuntimeError("an image without a kernel of its own is not booted by hand")
    return str(part.absolute())


def _drive(path: Path, kind: str, more: str = "") -> Sequence[str]:
    return ("-drive", f"file={path},format={kind},if=virtio,cache=unsafe,discard=unmap{more}")


def _time(argv: list[str], directory: Path, sentinel: str | None, ready: Queue[float]) -> float:
    memory = "/dev/shm"  # noqa: S108 - where the agent's guests have theirs
    began = time.monotonic()
    guest = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=directory,
        env={"PATH": os.environ["PATH"], "TMPDIR": memory},
        start_new_session=True,
    )
    said: list[bytes] = []
    with guest:
        watchdog = threading.Timer(BOOT_SECONDS, guest.kill)
        watchdog.start()
        try:
            for line in guest.stdout or ():  # until the guest's end
                if sentinel and f"vmjobs:{sentinel}:ready".encode() in line:
                    ready.put(time.monotonic())
                said.append(line)
        finally:
            watchdog.cancel()
    if ready.empty():
        raise RuntimeError(
            f"the guest was never ready: {b''.join(said[-20:]).decode(errors='replace')}"
        )
    return ready.get() - began


def prepared(digest: str, where: str, script: str, memory: str) -> str:
    """Lay out one guest for HTCondor's VM universe, and return its boot parameters.

    It has a kernel, an initial file system and kernel parameters. HTCondor makes no overlay, so the
    root disk is a copy, made here beforehand.
    """
    directory = Path(where)
    directory.mkdir(parents=True)
    image = ImageStore(Path("/var/lib/vmjobs/agent/images")).prepare(digest)
    spec = JobSpec(
        image=digest,
        script=script,
        memory=int(memory),
        network=NetworkMode.NONE,
        disk=64,
        run_seconds=60,
    )
    lay_disks(directory, spec, digest)
    subprocess.run(["cp", "--sparse=always", str(image.root), str(directory / "root.disk")], check=True)
    for name, part in (("kernel", image.kernel), ("initrd", image.initrd)):
        shutil.copyfile(str(part), directory / name)
    for path in directory.iterdir():
        shutil.chown(path, "vmjobs", "vmjobs")
    words = " ".join(kernel_parameters(image, board()))
    return f"{directory / 'kernel'}\n{directory / 'initrd'}\n{words}"


def main() -> None:
    """Boot once and print the seconds, or prepare a guest and print its boot parameters."""
    if sys.argv[1] == "prepare":
        print(prepared(*sys.argv[2:]))  # noqa: T201
        return
    kind, store, digest, mode = sys.argv[1:]
    spec = JobSpec(
        image=digest, script="exit 0\n", memory=128, disk=64, network=NetworkMode(mode), run_seconds=60
    )
    image = ImageStore(Path(store)).prepare(digest)
    with tempfile.TemporaryDirectory(prefix="by-hand-") as directory:
        print(raw_boot(HypervisorKind(kind), image, spec, Path(directory)))  # noqa: T201


if __name__ == "__main__":
    main()
