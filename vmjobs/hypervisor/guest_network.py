"""Networks of VMs: a network namespace for each, with a tap device for UML or QEMU.

::

    guest 10.0.2.15 ── tap0 ┬ endpoint 10.0.2.100: sockets of the agent
                            └ out0 ── 10.0.2.2, slirp4netns ── the node's network (mode outbound alone)

In mode ``repository`` a guest can reach nothing else in the namespace. In mode ``outbound`` packets are
routed to slirp4netns, which turns them into connections; nftables rules limit the destinations
(:mod:`vmjobs.hypervisor.outbound`). The namespace ends with its VM and the last connection in it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

from vmjobs.errors import HypervisorError, reason_of
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import (
    ENDPOINT_ADDRESS,
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    GUEST_NETMASK_BITS,
    NAMESERVER_ADDRESS,
    Machine,
    Network,
)
from vmjobs.hypervisor.detached import Launcher
from vmjobs.hypervisor.launcher import Steps
from vmjobs.hypervisor.namespaces import TAP, TUN_DEVICE
from vmjobs.hypervisor.outbound import OUTSIDE, OutboundPolicy, node_addresses, rules
from vmjobs.model import NetworkMode
from vmjobs.subprocess import environment

MAC: Final = "52:54:00:12:34:56"
#: The same on every node: a guest that is resumed on another node knows it.
_TAP_MAC: Final = "52:55:0a:00:02:02"
#: Bytes in an IP packet. Long ones cost slirp4netns as much processor time as short ones.
MTU: Final = 32000

_PROGRAM: Final = "slirp4netns"
#: Name of slirp4netns's parent in its command line.
MARK: Final = "vmjobs-outside"
_PARENT: Final = 'shift; "$@"; exit $?'
_NETMASK: Final = str(IPv4Network((0, GUEST_NETMASK_BITS)).netmask)
#: Interface where a guest's packets wait, if its network is limited.
_INCOMING: Final = "in0"
#: Seconds in which a program that sets up a network must end, and slirp4netns be ready.
_SETUP_SECONDS: Final = 10.0
#: Burst of a VM whose network is limited: milliseconds' worth, and bytes at least.
_BURST_MILLISECONDS: Final = 100
_LEAST_BURST: Final = 128 * 1024
_LOG_BYTES: Final = 16 * 1024
_HINT: Final = "run vmjobs doctor on the node, which says what is missing"


def open_network(
    launcher: Launcher, mode: NetworkMode, ports: Sequence[int], process: procs.Process | None
) -> Network:
    """Return a VM's network, with sockets that listen at these ports of the endpoint.

    process: of a running VM, to open its network; None: create a network.

    Raises:
        HypervisorError: this node cannot give VMs a network, and why.
    """
    tap = {"address": ENDPOINT_ADDRESS, "mask": _NETMASK, "mac": _TAP_MAC, "mtu": MTU}
    try:
        with ExitStack() as closing:
            present = None
            if process is not None:
                present = _namespaces_of(process.pid)
                for handle in present:
                    closing.callback(os.close, handle)
            steps: Steps = [] if present else [("add_tap", tap)]
            steps += [("listen_for_dhcp", {})]
            steps += [("listen", {"address": ENDPOINT_ADDRESS, "ports": list(ports)})]
            there, sockets = launcher.take_steps(steps, present)
    except OSError as error:
        why = fault() or reason_of(error)
        raise HypervisorError(f"no VM can have a network on this node: {why}", hint=_HINT) from error
    dhcp, *listening = sockets
    return Network(mode, there, dict(zip(ports, listening, strict=True)), dhcp)


def fault() -> str:
    """Return why VMs cannot have a network on this node; ``""``: no known reason."""
    try:
        os.close(os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return f"there is no {TUN_DEVICE} (modprobe tun; for a container: --device {TUN_DEVICE})"
    except PermissionError:
        return f"this user may not open {TUN_DEVICE} (chmod 0666 {TUN_DEVICE}, as udev does)"
    except OSError as error:
        return f"{TUN_DEVICE} cannot be opened: {reason_of(error)} (modprobe tun)"
    return ""


def outside_fault() -> str:
    """Return what mode ``outbound`` lacks on this node; ``""`` if nothing."""
    missing = [name for name in (_PROGRAM, "nft", "ip") if _found(name) is None]
    if not missing:
        return ""
    return f"not installed: {', '.join(missing)} (apt-get install slirp4netns nftables iproute2)"


def modes() -> tuple[NetworkMode, ...]:
    """Return the network modes that VMs can have on this node."""
    if fault():
        return (NetworkMode.NONE,)
    return tuple(
        mode for mode in NetworkMode if mode is not NetworkMode.OUTBOUND or not outside_fault()
    )


def set_up(launcher: Launcher, machine: Machine, policy: OutboundPolicy) -> int | None:
    """Set up the limits and the outbound connection that a new VM's network has.

    Returns:
        The number of the slirp4netns process's parent; None if there is none.

    Raises:
        HypervisorError: a step failed, with the output of the program that failed.
    """
    network = machine.network
    if network is None:
        return None
    if machine.limits is not None and machine.limits.network_bits is not None:
        _limit(launcher, network, machine.limits.network_bits)
    if network.mode is NetworkMode.OUTBOUND:
        return _connect_outside(launcher, machine, network, policy)
    return None


def _limit(launcher: Launcher, network: Network, bits: int) -> None:
    """Shape both directions. Packets from the guest queue in a separate interface."""
    burst = max(_LEAST_BURST, bits // 8 * _BURST_MILLISECONDS // 1000)
    shaper = f"tbf rate {bits}bit burst {burst} latency 1s"
    made = f"link add {_INCOMING} type ifb\nlink set {_INCOMING} up mtu {MTU}\n"
    shaped = (
        f"qdisc add dev {TAP} root {shaper}\n"
        f"qdisc add dev {_INCOMING} root {shaper}\n"
        f"qdisc add dev {TAP} handle ffff: ingress\n"
        f"filter add dev {TAP} parent ffff: protocol all u32 match u32 0 0 "
        f"action mirred egress redirect dev {_INCOMING}\n"
    )
    run_there(launcher, network.namespaces, ["ip", "-batch", "-"], made)
    run_there(launcher, network.namespaces, ["tc", "-batch", "-"], shaped)


def _connect_outside(
    launcher: Launcher, machine: Machine, network: Network, policy: OutboundPolicy
) -> int:
    if missing := outside_fault():
        raise HypervisorError(f"VMs cannot have an outbound network on this node: {missing}")
    outside = _start_outside(launcher, machine, network)
    run_there(launcher, network.namespaces, ["nft", "-f", "-"], rules(policy, node_addresses()))
    routes = (
        f"link set {OUTSIDE} up mtu {MTU}\n"
        f"route add {GATEWAY_ADDRESS} dev {OUTSIDE}\n"
        f"route add {NAMESERVER_ADDRESS} dev {OUTSIDE}\n"
        f"route add default via {GATEWAY_ADDRESS}\n"
        # Each side takes the other one's addresses for neighbors; the kernel answers at once.
        f"neighbour add proxy {GATEWAY_ADDRESS} dev {TAP}\n"
        f"neighbour add proxy {NAMESERVER_ADDRESS} dev {TAP}\n"
        f"neighbour add proxy {GUEST_ADDRESS} dev {OUTSIDE}\n"
        f"ntable change name arp_cache dev {TAP} proxy_delay 0\n"
        f"ntable change name arp_cache dev {OUTSIDE} proxy_delay 0\n"
    )
    run_there(launcher, network.namespaces, ["ip", "-batch", "-"], routes, forward=(TAP, OUTSIDE))
    return outside


def _start_outside(launcher: Launcher, machine: Machine, network: Network) -> int:
    """Start slirp4netns and wait until it is ready; return its parent's number."""
    user, net, ready = 3, 4, 5  # numbers of its handles
    argv = [
        *("sh", "-c", _PARENT, MARK, machine.name),
        # As root of that namespace it can create its own sandbox; it then gives up all rights.
        *("nsenter", "--preserve-credentials", f"--user=/proc/self/fd/{user}", "--"),
        *(_PROGRAM, "--enable-sandbox", "--enable-seccomp", "--disable-host-loopback"),
        *(f"--mtu={MTU}", f"--ready-fd={ready}", "--netns-type=path", f"/proc/self/fd/{net}", OUTSIDE),
    ]
    with ExitStack() as closing:
        nothing, said = closing.enter_context(open(os.devnull, "rb")), _log()  # noqa: PTH123
        closing.callback(os.close, said)
        reader, writer = os.pipe()
        closing.callback(os.close, reader)
        try:
            given = [nothing.fileno(), said, said, *network.namespaces, writer]
            process = launcher.start(argv, given, environment(), Path("/"))
        finally:
            os.close(writer)
        process.close()
        if not procs.readable([reader], _SETUP_SECONDS) or not os.read(reader, 1):
            why = _content(said) or "it printed nothing"
            raise HypervisorError(f"{_PROGRAM} cannot connect {machine.name}: {why}")
    return process.pid


def run_there(
    launcher: Launcher,
    namespaces: tuple[int, int],
    argv: Sequence[str],
    words: str,
    *,
    forward: Sequence[str] = (),
    given: Sequence[int] = (),
) -> None:
    """Run a program that sets up a network, in its namespaces.

    program_input: text. forward: as for :meth:`Launcher.start`. passed_handles: its handles from 3 on.

    Raises:
        HypervisorError: the program cannot be run or fails, with its output.
    """
    with ExitStack() as closing:
        told, said = os.memfd_create("told", os.MFD_CLOEXEC), _log()
        closing.callback(os.close, told)
        closing.callback(os.close, said)
        os.write(told, words.encode())
        os.lseek(told, 0, os.SEEK_SET)
        handles = [told, said, said, *given]
        try:
            process = launcher.start(argv, handles, environment(), Path("/"), namespaces, forward)
        except OSError as error:
            raise HypervisorError(f"cannot run {argv[0]}: {reason_of(error)}") from error
        closing.callback(process.close)
        status = process.status(_SETUP_SECONDS)
        if status != 0:
            process.kill()
            why = _content(said) or f"exit status {status}"
            raise HypervisorError(f"{argv[0]} cannot set up the network of a VM: {why}")


def _log() -> int:
    """Create a file in memory for a program's output. It silently drops any excess."""
    said = os.memfd_create("said", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(said, _LOG_BYTES)
    fcntl.fcntl(said, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return said


def _content(said: int) -> str:
    return os.pread(said, _LOG_BYTES, 0).rstrip(b"\0").decode("utf-8", "replace").strip()[-500:]


def _namespaces_of(sandbox: int) -> tuple[int, int]:
    """Open a VM's namespaces. sandbox: its first process, whose child is in them."""
    there = Path(f"/proc/{next(iter(procs.children(sandbox)), 0)}/ns")
    return open_namespaces(there / "user", there / "net")


def open_namespaces(user: Path, network: Path) -> tuple[int, int]:
    """Open a user namespace and a network namespace by their files.

    Raises:
        OSError: one of them cannot be opened; then both handles are closed.
    """
    first = os.open(user, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return first, os.open(network, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.close(first)
        raise


def _found(program: str) -> str | None:
    return shutil.which(program, path=environment()["PATH"])


def machine_of(process: procs.Process) -> str:
    """Return the VM that a slirp4netns process serves; ``""`` if the process is none.

    process: the parent of slirp4netns, which itself is in the VM's user namespace.
    """
    return process.argv[4] if process.argv[3:4] == (MARK,) and len(process.argv) > 4 else ""
