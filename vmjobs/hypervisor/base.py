"""What every hypervisor driver offers, and the values that go in and out.

Drivers hold no policy: no retries, no time-outs of their own making, no names, no knowledge of
jobs. The agent decides; a driver does. ``tests/contract/test_hypervisor.py`` runs one body of
tests over every driver.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from vmjobs.model import Abilities, BootMethod, HypervisorKind, NetworkMode

#: Every machine's name starts with this; drivers list no other machine.
NAME_PREFIX = "vmjobs-"

#: Addresses in a VM's network. The gateway leads outside in mode ``outbound`` alone, and the name
#: server answers there alone.
GUEST_ADDRESS = "10.0.2.15"
GUEST_NETMASK_BITS = 24
GATEWAY_ADDRESS = "10.0.2.2"
NAMESERVER_ADDRESS = "10.0.2.3"
#: Where a guest finds its job endpoint, in every network mode but ``none``.
ENDPOINT_ADDRESS = "10.0.2.100"
ENDPOINT_PORT = 80
#: Ports of the endpoint's address: where a guest waits for those who log in, and where it finds
#: HTCondor's Chirp service of its job.
DOOR_PORT = 22
CHIRP_PORT = 9094


@dataclass(frozen=True)
class LiveDisk:
    """A root disk that is still on its way to this node: its blocks come when they are read.

    socket: Unix socket where a read is announced, and answered once its blocks are in the file
        (:mod:`vmjobs.hypervisor.nbd_plugin` says how).
    size: of the disk, in bytes.
    """

    socket: Path
    size: int


@dataclass(frozen=True)
class BootImage:
    """An image as it lies on this node, verified: what to boot.

    root: raw root disk, never written to.
    boot: by the kernel below, or by what the firmware finds on the root disk.
    partition: of the root file system, for a kernel's ``root=``; 0: the disk itself.
    kernel, initrd: for direct boot by kvm and qemu; a UML machine brings its own kernel.
    cmdline: kernel parameters that the image asks for.
    cloud_init: the image looks for NoCloud data.
    kinds: what can boot it.
    architecture: of its machine code, as ``uname -m`` calls it; "": the node's own.
    live: where the root disk comes from while ``root`` is not complete; None: it is.
    """

    digest: str
    root: Path
    boot: BootMethod = BootMethod.KERNEL
    partition: int = 0
    kernel: Path | None = None
    initrd: Path | None = None
    cmdline: tuple[str, ...] = ()
    cloud_init: bool = False
    kinds: tuple[HypervisorKind, ...] = tuple(HypervisorKind)
    architecture: str = ""
    live: LiveDisk | None = None


@dataclass(frozen=True)
class DataDisk:
    """A raw disk besides the root disk. The order of disks is the order in the guest."""

    path: Path
    read_only: bool = False


@dataclass(frozen=True)
class Network:
    """The network of a VM: a namespace that has nothing but the VM's tap device, and sockets there.

    namespaces: handles of the user namespace and the network namespace, to be closed by :meth:`close`.
    listening: TCP sockets that listen at :data:`ENDPOINT_ADDRESS`, by port. dhcp: UDP socket to which
    requests for an address come. What serves a socket closes it.
    """

    mode: NetworkMode
    namespaces: tuple[int, int]
    listening: Mapping[int, socket.socket]
    dhcp: socket.socket

    @property
    def namespace_files(self) -> list[str]:
        """Paths by which processes of this user can open the namespaces while this one lives."""
        return [f"/proc/{os.getpid()}/fd/{handle}" for handle in self.namespaces]

    def close(self) -> None:
        """Close the namespaces' handles: they last as long as the VM and the sockets do."""
        for handle in self.namespaces:
            os.close(handle)


@dataclass(frozen=True)
class PrivateNetwork:
    """A network between VMs of one node, which leads nowhere else.

    namespaces: handles of the user namespace and the network namespace that it is in, to be closed by
    :meth:`close`. It lasts as long as these handles, and as any VM that has a card on it.
    """

    namespaces: tuple[int, int]

    def close(self) -> None:
        """Close the namespaces' handles."""
        for handle in self.namespaces:
            os.close(handle)


@dataclass(frozen=True)
class PrivateCard:
    """A network card besides the VM's own. mac: its hardware address, the only one it may send from."""

    network: PrivateNetwork
    mac: str


@dataclass(frozen=True)
class MachineLimits:
    """What a machine may use of its node at most; None: as much as it can.

    cpu_percent: of one processor, per processor of the machine, on average. cpu_weight: its share where
    several want the processors, as cgroup v2's ``cpu.weight``: 1 to 10000, 100 is that of others.
    disk_bytes: read and written, a second. network_bits: a second, each way.
    """

    cpu_percent: int | None = None
    cpu_weight: int | None = None
    disk_bytes: int | None = None
    network_bits: int | None = None


@dataclass(frozen=True)
class Machine:
    """A machine to start.

    name: unique on the node, begins with :data:`NAME_PREFIX`.
    workdir: an empty directory that the driver may fill (overlay, sockets); the caller removes it
        after :meth:`Hypervisor.destroy`.
    console: file to which the serial console is appended, every byte of it.
    overlay: the root disk's copy-on-write overlay, where it is to outlive the machine; made unless it
        is there. The next machine needs the same image and the same workdir. None: it is thrown away.
    limits: held to as far as :meth:`Hypervisor.unenforced` does not say otherwise.
    card: on a private network; the guest has it after the VM's own card.
    saved: what :meth:`Hypervisor.save` has written of a machine of this name: it goes on from there,
        with its disks, and its overlay in ``workdir``, as they were then. None: it begins anew.
    shared: several users share its guest, whose kernel has to keep them apart.
    """

    name: str
    cpus: int
    memory: int
    image: BootImage
    disks: tuple[DataDisk, ...]
    console: Path
    workdir: Path
    network: Network | None = None
    cmdline: tuple[str, ...] = ()
    overlay: Path | None = None
    limits: MachineLimits | None = None
    card: PrivateCard | None = None
    saved: Path | None = None
    shared: bool = False


class MachineState(StrEnum):
    """What a hypervisor says about a machine."""

    RUNNING = "running"
    PAUSED = "paused"
    GONE = "gone"


class Ending(StrEnum):
    """How a machine came to its end.

    POWEROFF: its guest switched it off. RESET: its guest restarted it, which ends a machine.
    PANICKED: its guest's kernel gave up, and the hypervisor knows. CRASHED: the hypervisor failed.
    KILLED: somebody outside of it ended it.
    """

    POWEROFF = "poweroff"
    RESET = "reset"
    PANICKED = "panicked"
    CRASHED = "crashed"
    KILLED = "killed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Usage:
    """What a machine has used so far.

    cpu_seconds: of its node's processors, by all of its processes, and those of its way outside.
    memory: bytes that its hypervisor's process had in memory at most, with what that needs itself.
    """

    cpu_seconds: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found. ``works`` is true only if a kernel really booted.

    abilities: as of the driver.
    """

    kind: HypervisorKind
    works: bool
    detail: str
    seconds: float
    version: str = ""
    abilities: Abilities = field(default_factory=Abilities)


class Hypervisor(Protocol):
    """A way to run machines. All methods are safe to call from several threads.

    Every method raises :class:`vmjobs.errors.HypervisorError` where the hypervisor fails.
    """

    @property
    def kind(self) -> HypervisorKind:
        """Which hypervisor this is."""

    @property
    def platform(self) -> str:
        """What a machine that is saved here can be resumed by: a driver that says the same words.
        Empty: no machine of this one can be saved.
        """

    @property
    def abilities(self) -> Abilities:
        """What machines can have here."""

    def probe(self, deadline: float) -> ProbeResult:
        """Boot a tiny guest and hear it speak within ``deadline`` seconds; never raises."""

    def unenforced(self, limits: MachineLimits, directory: Path) -> tuple[str, ...]:
        """What of these limits no machine is held to here, each in a sentence that names it.

        directory: where the machine's disks are going to lie.
        """

    def open_network(self, mode: NetworkMode, ports: Sequence[int], running: str = "") -> Network:
        """The network of the machine ``running``, or else one for a machine that is about to start,
        with sockets that listen at these ports.
        """

    def open_private_network(self, names: Sequence[str]) -> PrivateNetwork:
        """The private network that any of these VMs has a card on, or else a new one."""

    def start(self, machine: Machine) -> None:
        """Make the copy-on-write overlay and start; returns once the machine runs."""

    def stop(self, name: str) -> None:
        """Ask the guest to power off. Returns at once; a machine that is gone is no error."""

    def destroy(self, name: str) -> None:
        """Kill the machine and return when it is verified gone. Repeating it is no error."""

    def pause(self, name: str) -> None:
        """Stop the machine's processors. Where that fails they may stop all the same, and later."""

    def resume(self, name: str) -> None:
        """Let a machine go on that is paused, or was to be; one that runs is left as it is."""

    def save(self, name: str, path: Path) -> None:
        """Write the machine's memory and processors to a file, and end the machine.

        Where that fails the machine goes on, unless it is gone.
        """

    def state(self, name: str) -> MachineState:
        """What the machine does now; ``GONE`` for a name never seen."""

    def wait(self, name: str, timeout: float, beside: Sequence[int] = ()) -> MachineState:
        """Block until the machine is gone, one of the handles ``beside`` is readable, or ``timeout``
        seconds passed.
        """

    def ending(self, name: str) -> Ending:
        """How a machine ended that this process started; to be asked between its end and
        :meth:`destroy`, which forgets it. ``UNKNOWN`` for any other. Never ``POWEROFF`` by a guess.
        """

    def usage(self, name: str) -> Usage:
        """What a machine has used; to be asked before :meth:`destroy`, which forgets it.

        Of one that has ended: all of it where the kernel told (uml, started by this process), else what
        was seen when this was asked last. Nothing for a name never seen.
        """

    def list(self) -> list[str]:
        """Names of this user's machines that run or are paused, whoever started them."""
