"""The interface of every hypervisor driver, and the values that go in and out.

Drivers hold no policy: they make no retries and choose no timeouts or names, and know nothing of
jobs. The agent decides; a driver acts. ``tests/contract/test_hypervisor.py`` and
``test_hypervisor_guest.py`` run the same tests on every driver.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from vmjobs.model import BootMethod, Capabilities, HypervisorKind, NetworkMode, PublishedPort

#: Every VM's name starts with this prefix; drivers list only VMs that have it.
NAME_PREFIX = "vmjobs-"

#: Addresses in a VM's network. Only in mode ``outbound`` does the gateway lead to the node's network
#: and the name server answer.
GUEST_ADDRESS = "10.0.2.15"
GUEST_NETMASK_BITS = 24
GATEWAY_ADDRESS = "10.0.2.2"
NAMESERVER_ADDRESS = "10.0.2.3"
#: Address of the job endpoint in the guest's network, in every network mode but ``none``.
ENDPOINT_ADDRESS = "10.0.2.100"
ENDPOINT_PORT = 80
#: Ports of the endpoint's address: the SSH relay that the guest connects to for logins, and
#: HTCondor's Chirp service of its job.
SSH_PORT = 22
CHIRP_PORT = 9094


@dataclass(frozen=True)
class LazyDisk:
    """A root disk that this node does not have completely: reads fetch missing chunks.

    socket: Unix socket of the agent, which is asked before each read and answers once the chunks are in
        the file (:mod:`vmjobs.hypervisor.libvirt.nbd_plugin` defines the protocol).
    size: of the disk, in bytes.
    fetch_rest: must be called once the guest is ready; then the rest of the disk is fetched.
    is_waiting: whether a VM waits for a part of the disk now.
    waited: seconds for which VMs have waited.
    """

    socket: Path
    size: int
    fetch_rest: Callable[[], object] = lambda: None
    is_waiting: Callable[[], bool] = lambda: False
    waited: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True)
class BootImage:
    """A verified image on this node, ready to boot.

    root: raw root disk, never written to.
    boot: by the kernel below, or by what the firmware finds on the root disk.
    partition: of the root file system, for a kernel's ``root=``; 0: the disk itself.
    kernel, initrd: for direct boot by kvm and qemu; UML brings its own kernel.
    cmdline: kernel parameters that the image asks for.
    cloud_init: the image looks for NoCloud data.
    kinds: hypervisors that can boot it.
    architecture: of its machine code, as ``uname -m`` calls it; "": the node's own.
    live: source of the root disk while ``root`` is incomplete; None: ``root`` is complete.
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
    live: LazyDisk | None = None


@dataclass(frozen=True)
class DataDisk:
    """A raw disk besides the root disk. Their order is the order in the guest."""

    path: Path
    read_only: bool = False


@dataclass(frozen=True)
class Network:
    """The network of a VM: a namespace with only its tap device, and sockets there.

    namespaces: handles of the user namespace and the network namespace; :meth:`close` closes them.
    listening: TCP sockets that listen at :data:`ENDPOINT_ADDRESS`, by port. dhcp: UDP socket that
    receives DHCP requests. The server of a socket closes it. mtu: bytes in an IP packet to the guest.
    """

    mode: NetworkMode
    namespaces: tuple[int, int]
    listening: Mapping[int, socket.socket]
    dhcp: socket.socket
    mtu: int

    @property
    def namespace_files(self) -> list[str]:
        """Paths of the namespaces, valid for this user while this process lives."""
        return [f"/proc/{os.getpid()}/fd/{handle}" for handle in self.namespaces]

    def close(self) -> None:
        """Close the handles; the namespaces last as long as the VM and the sockets."""
        for handle in self.namespaces:
            os.close(handle)


@dataclass(frozen=True)
class PrivateNetwork:
    """A network between VMs of one node, without a connection to any other network.

    namespaces: handles of its user namespace and its network namespace; :meth:`close` closes them. The
    network lasts as long as these handles, and as any VM that has a card on it.
    """

    namespaces: tuple[int, int]

    def close(self) -> None:
        for handle in self.namespaces:
            os.close(handle)


@dataclass(frozen=True)
class PrivateCard:
    """A second network card. mac: the only hardware address it may send from."""

    network: PrivateNetwork
    mac: str


@dataclass(frozen=True)
class VmLimits:
    """Upper limits of a VM's use of its node; None: unlimited.

    cpu_percent: of one processor, per processor of the VM, on average. cpu_weight: its share when
    several VMs want the processors, as cgroup v2's ``cpu.weight``: 1 to 10000, default 100.
    disk_bytes: read and written, per second. network_bits: per second, each way.
    """

    cpu_percent: int | None = None
    cpu_weight: int | None = None
    disk_bytes: int | None = None
    network_bits: int | None = None


@dataclass(frozen=True)
class VmConfig:
    """A VM to start.

    name: unique on the node, begins with :data:`NAME_PREFIX`.
    workdir: an empty directory that the driver may fill (overlay, sockets); the caller removes it
        after :meth:`Hypervisor.destroy`.
    console: file to which the whole output of the serial console is appended.
    overlay: the root disk's copy-on-write overlay, if it shall outlive the VM; created unless it
        exists. The next VM needs the same image and the same workdir. None: it is discarded.
    limits: enforced, except for what :meth:`Hypervisor.unenforced` lists.
    card: on a private network; the guest sees it after the VM's own card.
    published: only in network mode ``outbound``.
    saved: file that :meth:`Hypervisor.save` wrote of a VM of this name: the VM resumes from it, with
        its disks and its overlay in ``workdir`` as they were then. None: it boots.
    shared: several users share its guest, whose kernel must isolate them from each other.
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
    limits: VmLimits | None = None
    card: PrivateCard | None = None
    published: tuple[PublishedPort, ...] = ()
    saved: Path | None = None
    shared: bool = False


class VmState(StrEnum):
    """The state of a VM, as its hypervisor reports it."""

    RUNNING = "running"
    PAUSED = "paused"
    GONE = "gone"


class ShutdownCause(StrEnum):
    """Why a VM ended.

    POWEROFF: its guest powered off. RESET: its guest restarted, which ends a VM. PANICKED: its guest's
    kernel panicked, and the hypervisor noticed. CRASHED: the hypervisor failed. KILLED: a process
    outside the VM ended it.
    """

    POWEROFF = "poweroff"
    RESET = "reset"
    PANICKED = "panicked"
    CRASHED = "crashed"
    KILLED = "killed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class VmUsage:
    """Resources that a VM has used so far.

    cpu_seconds: of the node's processors, by all of its processes, including its slirp4netns.
    memory: peak resident bytes of its hypervisor's process, with the hypervisor's own overhead.
    """

    cpu_seconds: float = 0.0
    memory: int = 0


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe. ``works`` is true only if a kernel really booted.

    abilities: of the driver. is_slow: a kernel was booting when the time was over.
    """

    kind: HypervisorKind
    works: bool
    detail: str
    seconds: float
    version: str = ""
    abilities: Capabilities = field(default_factory=Capabilities)
    is_slow: bool = False


class Hypervisor(Protocol):
    """A way to run VMs. All methods are safe to call from several threads.

    Every method raises :class:`vmjobs.errors.HypervisorError` if the hypervisor fails.
    """

    @property
    def kind(self) -> HypervisorKind:
        """The kind of hypervisor."""

    @property
    def platform(self) -> str:
        """Drivers with the same value can resume a VM that was saved here.

        Empty: this driver cannot save VMs.
        """

    @property
    def abilities(self) -> Capabilities:
        """The features that VMs can have here."""

    def probe(self, deadline: float) -> ProbeResult:
        """Boot a tiny guest and read its console; never raises. deadline: seconds."""

    def unenforced(self, limits: VmLimits, directory: Path) -> tuple[str, ...]:
        """Return a sentence for each of these limits that the node cannot enforce.

        directory: the future location of the VM's disks.
        """

    def open_network(self, mode: NetworkMode, ports: Sequence[int], running: str = "") -> Network:
        """Open a VM's network, with sockets that listen at these TCP ports.

        running: name of a running VM; empty: create the network, for a new VM.
        """

    def open_private_network(self, names: Sequence[str]) -> PrivateNetwork:
        """Open the private network that one of these VMs is on, or create one."""

    def start(self, vm: VmConfig) -> None:
        """Create the copy-on-write overlay and start; return once the VM runs."""

    def stop(self, name: str) -> None:
        """Ask the guest to power off, and do not wait. A missing VM is no error."""

    def destroy(self, name: str) -> None:
        """Kill the VM and return when it is verified gone. Repeating it is no error."""

    def pause(self, name: str) -> None:
        """Stop the VM's processors. If this fails, they may still stop, even later."""

    def resume(self, name: str) -> None:
        """Resume a VM after :meth:`pause`, failed or not; a running VM stays as is."""

    def save(self, name: str, path: Path) -> None:
        """Write the VM's memory and processor state to a file, and end the VM.

        If this fails, the VM keeps running, unless it is gone.
        """

    def state(self, name: str) -> VmState:
        """The present state; ``GONE`` for an unknown name."""

    def wait(self, name: str, timeout: float, beside: Sequence[int] = ()) -> VmState:
        """Block until the VM is gone, or for ``timeout`` seconds; return its state.

        beside: handles; return also when one of them is readable.
        """

    def shutdown_cause(self, name: str) -> ShutdownCause:
        """Return why a VM ended that this process started; ``UNKNOWN`` for any other.

        Call it before :meth:`destroy`, which discards the cause. Never returns ``POWEROFF`` by a guess.
        """

    def usage(self, name: str) -> VmUsage:
        """Return a VM's resource usage; zero for an unknown name.

        Call it before :meth:`destroy`, which discards it. After the VM's end: its final usage if the
        kernel reports it (uml, started by this process), else the result of the last call.
        """

    def list(self) -> list[str]:
        """Names of this user's running and paused VMs, also of other processes."""


@dataclass(frozen=True)
class VmNeeds:
    """What a VM needs of its driver.

    demanded: the hypervisor that its job demands; None: any. able: those that can boot its image and
    have the features that its job needs; all while the image is unknown. cpus: its processors.
    cloud_init: its guest looks for NoCloud data. architecture: of its image, as ``uname -m`` calls it;
    "": any.
    """

    demanded: HypervisorKind | None = None
    able: Sequence[HypervisorKind] = tuple(HypervisorKind)
    cpus: int = 1
    cloud_init: bool = False
    architecture: str = ""


#: Returns the driver for a VM. Raises NoHypervisor: no driver fits.
DriverChooser = Callable[[VmNeeds], Hypervisor]
