"""Network namespaces for VMs, created and entered without privilege.

Runs in the forked children of the launcher: they have one thread, which the kernel
requires of a process that enters a user namespace. It imports from the standard library alone.

Each network namespace belongs to its own user namespace (user_namespaces(7)), whose root has all
capabilities over it. The VM's process has none of them: its sandbox is a user namespace within it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from typing import Final

TAP: Final = "tap0"
#: The VM's end of a card on a private network.
CARD: Final = "card"
TUN_DEVICE: Final = "/dev/net/tun"

# linux/sched.h
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
# linux/if_tun.h
_TUNSETIFF: Final = 0x400454CA
_TUNSETPERSIST: Final = 0x400454CB
_TUNSETOWNER: Final = 0x400454CC
_IFF_TAP: Final = 0x0002
_IFF_NO_PI: Final = 0x1000
_IFF_VNET_HDR: Final = 0x4000
# linux/sockios.h and linux/if.h
_SIOCSIFFLAGS: Final = 0x8914
_SIOCSIFADDR: Final = 0x8916
_SIOCSIFNETMASK: Final = 0x891C
_SIOCSIFMTU: Final = 0x8922
_SIOCSIFHWADDR: Final = 0x8924
_SIOCBRADDBR: Final = 0x89A0
_ARPHRD_ETHER: Final = 1
_IFF_UP: Final = 0x1
# linux/rtnetlink.h, linux/netlink.h, linux/if_link.h and linux/ip.h
_RTM_SETLINK: Final = 19
_NLM_F_REQUEST: Final = 0x1
_NLM_F_ACK: Final = 0x4
_IFLA_AF_SPEC: Final = 26
_IFLA_INET_CONF: Final = 1
_IPV4_DEVCONF_FORWARDING: Final = 1

_BACKLOG: Final = 128
_DHCP_PORT: Final = 67
# linux/if_ether.h and linux/if_packet.h
_ETH_P_ALL: Final = 0x0003
_SOL_PACKET: Final = 263
_PACKET_IGNORE_OUTGOING: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)


def create() -> None:
    """Move this process into a new network namespace, owned by a new user namespace.

    It is root there, and its programs keep their capabilities over the network.

    Raises:
        OSError: the kernel does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNET)
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write(content)


def handles() -> list[int]:
    """Open this process's user namespace and network namespace."""
    return [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "net")]


def enter(user_handle: int, network_handle: int) -> None:
    """Move this process into a user namespace and a network namespace that this owns.

    Raises:
        OSError: they belong to another user.
    """
    _call("setns", user_handle, _CLONE_NEWUSER)
    _call("setns", network_handle, _CLONE_NEWNET)


def leave_network() -> None:
    """Move this process into a new network namespace within its user namespace.

    Raises:
        OSError: the kernel does not allow it.
    """
    _call("unshare", _CLONE_NEWNET)


def add_tap(address: str, mask: str, mac: str, mtu: int) -> None:
    """Create the tap device of a VM, which this process's user may open.

    It outlives its last user, so that a VM can take its card down and up again.

    Args:
        address, mask, mac: of this namespace's end.
        mtu: bytes in an IP packet.

    Raises:
        OSError: the node has no device /dev/net/tun, or this user may not open it.
    """
    owner = os.geteuid()
    tap = os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(
            tap, _TUNSETIFF, _ifreq(TAP, struct.pack("H", _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
        )
        fcntl.ioctl(tap, _TUNSETOWNER, owner)
        fcntl.ioctl(tap, _TUNSETPERSIST, 1)
    finally:
        os.close(tap)
    _set_up(address, mask, mac, mtu)


def add_bridge(address: str, mask: str, mac: str, mtu: int) -> None:
    """Create a bridge named :data:`TAP`, which the card of a Xen VM joins.

    Its arguments are those of :func:`add_tap`.

    Raises:
        OSError: the kernel does not allow it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCBRADDBR, TAP.encode() + b"\0")
    _set_up(address, mask, mac, mtu)


def _set_up(address: str, mask: str, mac: str, mtu: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        hardware = struct.pack("H6s", _ARPHRD_ETHER, bytes.fromhex(mac.replace(":", "")))
        fcntl.ioctl(control, _SIOCSIFHWADDR, _ifreq(TAP, hardware))
        fcntl.ioctl(control, _SIOCSIFMTU, _ifreq(TAP, struct.pack("i", mtu)))
        fcntl.ioctl(control, _SIOCSIFADDR, _ifreq(TAP, _sockaddr_in(address)))
        fcntl.ioctl(control, _SIOCSIFNETMASK, _ifreq(TAP, _sockaddr_in(mask)))
        for name in ("lo", TAP):
            fcntl.ioctl(control, _SIOCSIFFLAGS, _ifreq(name, struct.pack("H", _IFF_UP)))


def forward(interfaces: Sequence[str]) -> None:
    """Forward packets that arrive at these interfaces.

    Uses netlink (rtnetlink(7)), because /proc/sys is read-only in containers.

    Raises:
        OSError: an interface is missing.
    """
    for name in interfaces:
        setting = _attribute(_IFLA_INET_CONF, _attribute(_IPV4_DEVCONF_FORWARDING, struct.pack("I", 1)))
        family = _attribute(_IFLA_AF_SPEC, _attribute(socket.AF_INET, setting))
        about = struct.pack("BxHiII", socket.AF_UNSPEC, 0, socket.if_nametoindex(name), 0, 0) + family
        head = struct.pack("IHHII", 16 + len(about), _RTM_SETLINK, _NLM_F_REQUEST | _NLM_F_ACK, 1, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as peer:
            peer.send(head + about)
            (error,) = struct.unpack_from("i", peer.recv(4096), 16)
        if error:
            raise OSError(-error, os.strerror(-error))


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def open_card() -> list[socket.socket]:
    """Return a socket whose datagrams are the frames of :data:`CARD`."""
    card = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    card.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    card.bind((CARD, _ETH_P_ALL))
    return [card]


def listen(address: str, ports: Sequence[int]) -> list[socket.socket]:
    """Return TCP sockets that listen at these ports, shared with an earlier agent's."""
    return [socket.create_server((address, port), backlog=_BACKLOG, reuse_port=True) for port in ports]


def listen_for_dhcp() -> list[socket.socket]:
    """Return a UDP socket for DHCP requests, which may broadcast answers."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, TAP.encode())
    server.bind(("", _DHCP_PORT))
    return [server]


def _ifreq(name: str, value: bytes) -> bytes:
    """Return a ``struct ifreq`` (netdevice(7))."""
    return struct.pack("16s24s", name.encode(), value)


def _sockaddr_in(address: str) -> bytes:
    return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(address))


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
