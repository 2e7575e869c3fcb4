"""Networks of VMs: a network namespace for each, with a tap device for UML or QEMU.

::

    guest 10.0.2.15 ── tap0 ┬ endpoint 10.0.2.100: sockets of the agent
                            └ out0 ── 10.0.2.2, slirp4netns ── the node's network (mode outbound alone)

In mode ``repository`` a guest can reach nothing else in the namespace. In mode ``outbound`` packets are
routed to slirp4netns, which turns them into connections; nftables rules limit the destinations
(:mod:`.outbound`). The namespace ends with its VM and the last connection in it.

The card of a Xen VM comes from the node's kernel. For it ``tap0`` is a bridge, which the card joins,
and a process holds the namespace for as long as the VM runs.
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
    Network,
    VmConfig,
)
from vmjobs.hypervisor.network import published_ports
from vmjobs.hypervisor.network.namespaces import TAP, TUN_DEVICE
from vmjobs.hypervisor.network.outbound import (
    OUTBOUND_DEVICE,
    OutboundPolicy,
    nftables_rules,
    node_addresses,
)
from vmjobs.hypervisor.sandbox.launcher import Steps
from vmjobs.hypervisor.sandbox.process_launcher import Launcher
from vmjobs.model import NetworkMode
from vmjobs.subprocess import environment

MAC: Final = "52:54:00:12:34:56"
#: The same on every node: a guest that is resumed on another node knows it.
_TAP_MAC: Final = "52:55:0a:00:02:02"
#: Bytes in an IP packet. Long ones cost slirp4netns as much processor time as short ones.
MTU: Final = 32000
#: The same of a card in a bridge. slirp4netns sends packets as long as it was told to, even if a guest
#: asks for shorter ones, so they must agree.
BRIDGED_MTU: Final = 1500

_PROGRAM: Final = "slirp4netns"
#: Names of slirp4netns's parent, and of the process that holds a network, in their command lines.
SLIRP_MARK: Final = "vmjobs-outside"
HOLDER_MARK: Final = "vmjobs-network"
_PARENT: Final = 'shift; "$@"; exit $?'
#: Its input is a pipe whose other end it has, too: this never returns.
_HOLD: Final = "read -r _"
#: Numbers of its handles of the namespaces.
_HELD_USER, _HELD_NETWORK = 4, 5
_NETMASK: Final = str(IPv4Network((0, GUEST_NETMASK_BITS)).netmask)
#: Interface where a guest's packets wait, if its network is limited.
_IFB_DEVICE: Final = "in0"
#: Seconds in which a program that sets up a network must end, and slirp4netns be ready.
_SETUP_SECONDS: Final = 10.0
#: Burst of a VM whose network is limited: milliseconds' worth, and bytes at least.
_BURST_MILLISECONDS: Final = 100
_MIN_BURST_BYTES: Final = 128 * 1024
_LOG_BYTES: Final = 16 * 1024
_HINT: Final = "run vmjobs doctor on the node, which says what is missing"


def open_network(
    launcher: Launcher,
    mode: NetworkMode,
    ports: Sequence[int],
    namespaces: tuple[Path, Path] | None,
    *,
    bridged: bool = False,
) -> Network:
    """Return a VM's network, with sockets that listen at these ports of the endpoint.

    namespaces: files of a running VM's user and network namespaces; None: create a network.
    bridged: with a bridge instead of a tap device.

    Raises:
        HypervisorError: this node cannot give VMs a network, and why.
    """
    mtu = BRIDGED_MTU if bridged else MTU
    tap = {"address": ENDPOINT_ADDRESS, "mask": _NETMASK, "mac": _TAP_MAC, "mtu": mtu}
    try:
        with ExitStack() as closing:
            present = None
            if namespaces is not None:
                present = open_namespaces(*namespaces)
                for handle in present:
                    closing.callback(os.close, handle)
            steps: Steps = [] if present else [("add_bridge" if bridged else "add_tap", tap)]
            steps += [("listen_for_dhcp", {})]
            steps += [("listen", {"address": ENDPOINT_ADDRESS, "ports": list(ports)})]
            there, sockets = launcher.run_steps(steps, present)
    except OSError as error:
        why = unavailable_reason() or reason_of(error)
        raise HypervisorError(f"no VM can have a network on this node: {why}", hint=_HINT) from error
    dhcp, *listening = sockets
    return Network(mode, there, dict(zip(ports, listening, strict=True)), dhcp, mtu)


def unavailable_reason() -> str:
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


def outbound_unavailable_reason() -> str:
    """Return what mode ``outbound`` lacks on this node; ``""`` if nothing."""
    path = environment()["PATH"]
    missing = [name for name in (_PROGRAM, "nft", "ip") if shutil.which(name, path=path) is None]
    if not missing:
        return ""
    return f"not installed: {', '.join(missing)} (apt-get install slirp4netns nftables iproute2)"


def available_modes() -> tuple[NetworkMode, ...]:
    if unavailable_reason():
        return (NetworkMode.NONE,)
    return tuple(
        mode
        for mode in NetworkMode
        if mode is not NetworkMode.OUTBOUND or not outbound_unavailable_reason()
    )


def set_up_network(launcher: Launcher, vm: VmConfig, policy: OutboundPolicy) -> int | None:
    """Set up the limits and the outbound connection that a new VM's network has.

    Returns:
        The number of the slirp4netns process's parent; None if there is none.

    Raises:
        HypervisorError: a step failed, with the output of the program that failed.
    """
    network = vm.network
    if network is None:
        return None
    if vm.limits is not None and vm.limits.network_bits is not None:
        _shape_traffic(launcher, network, vm.limits.network_bits)
    if network.mode is NetworkMode.OUTBOUND:
        return _connect_outbound(launcher, vm, network, policy)
    return None


def _shape_traffic(launcher: Launcher, network: Network, bits: int) -> None:
    """Shape both directions. Packets from the guest queue in a separate interface."""
    burst = max(_MIN_BURST_BYTES, bits // 8 * _BURST_MILLISECONDS // 1000)
    shaper = f"tbf rate {bits}bit burst {burst} latency 1s"
    made = f"link add {_IFB_DEVICE} type ifb\nlink set {_IFB_DEVICE} up mtu {network.mtu}\n"
    shaped = (
        f"qdisc add dev {TAP} root {shaper}\n"
        f"qdisc add dev {_IFB_DEVICE} root {shaper}\n"
        f"qdisc add dev {TAP} handle ffff: ingress\n"
        f"filter add dev {TAP} parent ffff: protocol all u32 match u32 0 0 "
        f"action mirred egress redirect dev {_IFB_DEVICE}\n"
    )
    run_in_namespaces(launcher, network.namespaces, ["ip", "-batch", "-"], made)
    run_in_namespaces(launcher, network.namespaces, ["tc", "-batch", "-"], shaped)


def _connect_outbound(
    launcher: Launcher, vm: VmConfig, network: Network, policy: OutboundPolicy
) -> int:
    if missing := outbound_unavailable_reason():
        raise HypervisorError(f"VMs cannot have an outbound network on this node: {missing}")
    slirp_pid = _start_slirp4netns(launcher, vm, network)
    rules = nftables_rules(policy, node_addresses(), vm.published)
    run_in_namespaces(launcher, network.namespaces, ["nft", "-f", "-"], rules)
    routes = (
        f"link set {OUTBOUND_DEVICE} up mtu {network.mtu}\n"
        f"route add {GATEWAY_ADDRESS} dev {OUTBOUND_DEVICE}\n"
        f"route add {NAMESERVER_ADDRESS} dev {OUTBOUND_DEVICE}\n"
        f"route add default via {GATEWAY_ADDRESS}\n"
        # Each side takes the other one's addresses for neighbors; the kernel answers at once.
        f"neighbour add proxy {GATEWAY_ADDRESS} dev {TAP}\n"
        f"neighbour add proxy {NAMESERVER_ADDRESS} dev {TAP}\n"
        f"neighbour add proxy {GUEST_ADDRESS} dev {OUTBOUND_DEVICE}\n"
        f"ntable change name arp_cache dev {TAP} proxy_delay 0\n"
        f"ntable change name arp_cache dev {OUTBOUND_DEVICE} proxy_delay 0\n"
    )
    run_in_namespaces(
        launcher, network.namespaces, ["ip", "-batch", "-"], routes, forward=(TAP, OUTBOUND_DEVICE)
    )
    if vm.published:
        published_ports.publish(vm)
    return slirp_pid


def _start_slirp4netns(launcher: Launcher, vm: VmConfig, network: Network) -> int:
    """Start slirp4netns and wait until it is ready; return its parent's number."""
    user, net, ready = 3, 4, 5  # numbers of its handles
    argv = [
        *("sh", "-c", _PARENT, SLIRP_MARK, vm.name),
        # As root of that namespace it can create its own sandbox; it then gives up all rights.
        *("nsenter", "--preserve-credentials", f"--user=/proc/self/fd/{user}", "--"),
        *(_PROGRAM, "--enable-sandbox", "--enable-seccomp", "--disable-host-loopback"),
        *(f"--mtu={network.mtu}", f"--ready-fd={ready}", "--netns-type=path"),
        *([f"--api-socket={published_ports.API_SOCKET}"] if vm.published else []),
        *(f"/proc/self/fd/{net}", OUTBOUND_DEVICE),
    ]
    with ExitStack() as closing:
        nothing, output_file = closing.enter_context(open(os.devnull, "rb")), _create_output_file()  # noqa: PTH123
        closing.callback(os.close, output_file)
        reader, writer = os.pipe()
        closing.callback(os.close, reader)
        try:
            passed_handles = [nothing.fileno(), output_file, output_file, *network.namespaces, writer]
            process = launcher.start(argv, passed_handles, environment(), vm.workdir)
        finally:
            os.close(writer)
        process.close()
        if not procs.readable([reader], _SETUP_SECONDS) or not os.read(reader, 1):
            why = _read_output(output_file) or "it printed nothing"
            raise HypervisorError(f"{_PROGRAM} cannot connect {vm.name}: {why}")
    return process.pid


def hold_network(launcher: Launcher, vm: str, network: Network) -> int:
    """Start a process that keeps a VM's network, and return its number.

    It is for VMs without a process in their network.

    Raises:
        HypervisorError: it cannot be started.
    """
    argv = ["sh", "-c", _HOLD, HOLDER_MARK, vm]
    with ExitStack() as closing:
        nothing = closing.enter_context(open(os.devnull, "r+b")).fileno()  # noqa: PTH123
        reader, writer = os.pipe()
        closing.callback(os.close, reader)
        closing.callback(os.close, writer)
        handles = [reader, nothing, nothing, writer, *network.namespaces]
        process = launcher.start(argv, handles, environment(), Path("/"))
        process.close()
    return process.pid


def run_in_namespaces(
    launcher: Launcher,
    namespaces: tuple[int, int],
    argv: Sequence[str],
    program_input: str,
    *,
    forward: Sequence[str] = (),
    passed_handles: Sequence[int] = (),
) -> None:
    """Run a program that sets up a network, in its namespaces.

    program_input: text. forward: as for :meth:`Launcher.start`. passed_handles: its handles from 3 on.

    Raises:
        HypervisorError: the program cannot be run or fails, with its output.
    """
    with ExitStack() as closing:
        input_file, output_file = os.memfd_create("input", os.MFD_CLOEXEC), _create_output_file()
        closing.callback(os.close, input_file)
        closing.callback(os.close, output_file)
        os.write(input_file, program_input.encode())
        os.lseek(input_file, 0, os.SEEK_SET)
        handles = [input_file, output_file, output_file, *passed_handles]
        process = launcher.start(argv, handles, environment(), Path("/"), namespaces, forward)
        closing.callback(process.close)
        status = process.status(_SETUP_SECONDS)
        if status != 0:
            process.kill()
            why = _read_output(output_file) or f"exit status {status}"
            raise HypervisorError(f"{argv[0]} cannot set up the network of a VM: {why}")


def _create_output_file() -> int:
    """Create a file in memory for a program's output. It silently drops any excess."""
    output_file = os.memfd_create("said", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(output_file, _LOG_BYTES)
    fcntl.fcntl(output_file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return output_file


def _read_output(output_file: int) -> str:
    return os.pread(output_file, _LOG_BYTES, 0).rstrip(b"\0").decode("utf-8", "replace").strip()[-500:]


def namespaces_of(sandbox: int) -> tuple[Path, Path]:
    """Return files of a VM's namespaces. sandbox: its first process, whose child is in them."""
    there = Path(f"/proc/{next(iter(procs.children(sandbox)), 0)}/ns")
    return there / "user", there / "net"


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


def vm_of(process: procs.Process) -> str:
    """Return the VM that a slirp4netns process serves, or whose network a process holds; or ``""``.

    process: the parent of slirp4netns, which itself is in the VM's user namespace.
    """
    is_ours = process.argv[3:4] in {(SLIRP_MARK,), (HOLDER_MARK,)} and len(process.argv) > 4
    return process.argv[4] if is_ours else ""


def held_namespaces(process: procs.Process) -> tuple[Path, Path] | None:
    """Return files of the namespaces that a process holds; None: it holds none."""
    if process.argv[3:4] != (HOLDER_MARK,):
        return None
    held = Path(f"/proc/{process.pid}/fd")
    return held / str(_HELD_USER), held / str(_HELD_NETWORK)
