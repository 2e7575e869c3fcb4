"""libslirp through ctypes: a TCP/IP stack in user space, for one guest.

The layout below is that of ``libslirp.h`` with ``SLIRP_CONFIG_VERSION`` 4 (libslirp 4.7 and
later). Standard library only: the process that runs this is started once for every machine.
"""

from __future__ import annotations

import ctypes as c
import ipaddress
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

_LIBRARY = "libslirp.so.0"
_CONFIG_VERSION = 4
_FOREVER_MS = 0xFFFFFFFF

#: (libslirp's bit, poll's bit)
_EVENTS = (
    (1 << 0, select.POLLIN),
    (1 << 1, select.POLLOUT),
    (1 << 2, select.POLLPRI),
    (1 << 3, select.POLLERR),
    (1 << 4, select.POLLHUP),
)


class _InAddr(c.Structure):
    _fields_ = [("s_addr", c.c_uint32)]


class _In6Addr(c.Structure):
    _fields_ = [("s6_addr", c.c_uint32 * 4)]


_WRITE = c.CFUNCTYPE(c.c_ssize_t, c.c_void_p, c.c_size_t, c.c_void_p)
_MESSAGE = c.CFUNCTYPE(None, c.c_char_p, c.c_void_p)
_CLOCK = c.CFUNCTYPE(c.c_int64, c.c_void_p)
_TIMER_NEW = c.CFUNCTYPE(c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p)
_TIMER_FREE = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p)
_TIMER_MOD = c.CFUNCTYPE(None, c.c_void_p, c.c_int64, c.c_void_p)
_POLL_FD = c.CFUNCTYPE(None, c.c_int, c.c_void_p)
_NOTIFY = c.CFUNCTYPE(None, c.c_void_p)
_ADD_POLL = c.CFUNCTYPE(c.c_int, c.c_int, c.c_int, c.c_void_p)
_GET_REVENTS = c.CFUNCTYPE(c.c_int, c.c_int, c.c_void_p)


class _Callbacks(c.Structure):
    _fields_ = [
        ("send_packet", _WRITE),
        ("guest_error", _MESSAGE),
        ("clock_get_ns", _CLOCK),
        ("timer_new", _TIMER_NEW),
        ("timer_free", _TIMER_FREE),
        ("timer_mod", _TIMER_MOD),
        ("register_poll_fd", _POLL_FD),
        ("unregister_poll_fd", _POLL_FD),
        ("notify", _NOTIFY),
        ("init_completed", c.c_void_p),
        ("timer_new_opaque", c.c_void_p),
    ]


class _Config(c.Structure):
    _fields_ = [
        ("version", c.c_uint32),
        ("restricted", c.c_int),
        ("in_enabled", c.c_bool),
        ("vnetwork", _InAddr),
        ("vnetmask", _InAddr),
        ("vhost", _InAddr),
        ("in6_enabled", c.c_bool),
        ("vprefix_addr6", _In6Addr),
        ("vprefix_len", c.c_uint8),
        ("vhost6", _In6Addr),
        ("vhostname", c.c_char_p),
        ("tftp_server_name", c.c_char_p),
        ("tftp_path", c.c_char_p),
        ("bootfile", c.c_char_p),
        ("vdhcp_start", _InAddr),
        ("vnameserver", _InAddr),
        ("vnameserver6", _In6Addr),
        ("vdnssearch", c.c_void_p),
        ("vdomainname", c.c_char_p),
        ("if_mtu", c.c_size_t),
        ("if_mru", c.c_size_t),
        ("disable_host_loopback", c.c_bool),
        ("enable_emu", c.c_bool),
        ("outbound_addr", c.c_void_p),
        ("outbound_addr6", c.c_void_p),
        ("disable_dns", c.c_bool),
        ("disable_dhcp", c.c_bool),
    ]


@dataclass(frozen=True)
class Settings:
    """The guest's network.

    network: its address and prefix, e.g. ``10.0.2.0/24``.
    gateway, nameserver, guest: addresses in it; the guest's is what DHCP gives out.
    restricted: the guest reaches nothing but what :meth:`Stack.forward` adds.
    mtu: bytes in an IP packet.
    """

    network: str
    gateway: str
    nameserver: str
    guest: str
    restricted: bool
    mtu: int


class Stack:
    """One guest's network. Not for use by more than one thread.

    Raises:
        OSError: there is no libslirp, or it refuses the settings.
    """

    def __init__(self, settings: Settings, send: Callable[[bytes], None]) -> None:
        self._lib = _library()
        self._watched: list[tuple[int, int]] = []
        self._happened: dict[int, int] = {}
        self._callbacks = _callbacks(send)  # must live as long as the stack
        self._add_poll = _ADD_POLL(self._watch)
        self._get_revents = _GET_REVENTS(self._revents)
        config = _config(settings)
        self._stack: int | None = self._lib.slirp_new(c.byref(config), c.byref(self._callbacks), None)
        if not self._stack:
            raise OSError("libslirp refuses the settings")

    def forward(self, address: str, port: int, unix_socket: str) -> None:
        """Connect the guest's ``address``:``port`` to a Unix socket, anew for each connection."""
        target = _address(address)
        failed = self._lib.slirp_add_unix(self._stack, unix_socket.encode(), c.byref(target), port)
        if failed:
            raise OSError(f"libslirp refuses to forward {address}:{port}")

    def receive(self, frame: bytes) -> None:
        """Take an Ethernet frame from the guest."""
        self._lib.slirp_input(self._stack, frame, len(frame))

    def prepare(self) -> tuple[list[tuple[int, int]], int | None]:
        """What to wait for: (descriptor, events of :mod:`select`) pairs, and ms at most."""
        self._watched.clear()
        timeout = c.c_uint32(_FOREVER_MS)
        self._lib.slirp_pollfds_fill(self._stack, c.byref(timeout), self._add_poll, None)
        return self._watched, None if timeout.value == _FOREVER_MS else timeout.value

    def handle(self, happened: dict[int, int]) -> None:
        """Act on what happened, by descriptor; after every wait, even if nothing did."""
        self._happened = happened
        self._lib.slirp_pollfds_poll(self._stack, 0, self._get_revents, None)

    def close(self) -> None:
        """Drop all connections and free the stack."""
        if self._stack:
            self._lib.slirp_cleanup(self._stack)
            self._stack = None

    def _watch(self, fd: int, events: int, _opaque: int | None) -> int:
        self._watched.append((fd, sum(ours for theirs, ours in _EVENTS if events & theirs)))
        return len(self._watched) - 1

    def _revents(self, index: int, _opaque: int | None) -> int:
        happened = self._happened.get(self._watched[index][0], 0)
        return sum(theirs for theirs, ours in _EVENTS if happened & ours) if happened else 0


def version() -> str:
    """The library's version.

    Raises:
        OSError: it is not installed.
    """
    text: bytes = _library().slirp_version_string()
    return text.decode()


def _library() -> c.CDLL:
    lib = c.CDLL(_LIBRARY)
    lib.slirp_new.restype = c.c_void_p
    lib.slirp_new.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p]
    lib.slirp_cleanup.restype = None
    lib.slirp_cleanup.argtypes = [c.c_void_p]
    lib.slirp_add_unix.restype = c.c_int
    lib.slirp_add_unix.argtypes = [c.c_void_p, c.c_char_p, c.c_void_p, c.c_int]
    lib.slirp_input.restype = None
    lib.slirp_input.argtypes = [c.c_void_p, c.c_char_p, c.c_int]
    lib.slirp_pollfds_fill.restype = None
    lib.slirp_pollfds_fill.argtypes = [c.c_void_p, c.c_void_p, _ADD_POLL, c.c_void_p]
    lib.slirp_pollfds_poll.restype = None
    lib.slirp_pollfds_poll.argtypes = [c.c_void_p, c.c_int, _GET_REVENTS, c.c_void_p]
    lib.slirp_version_string.restype = c.c_char_p
    lib.slirp_version_string.argtypes = []
    return lib


def _address(text: str) -> _InAddr:
    return _InAddr.from_buffer_copy(ipaddress.IPv4Address(text).packed)  # network byte order


def _config(settings: Settings) -> _Config:
    network = ipaddress.IPv4Network(settings.network)
    return _Config(
        version=_CONFIG_VERSION,
        restricted=int(settings.restricted),
        in_enabled=True,
        vnetwork=_address(str(network.network_address)),
        vnetmask=_address(str(network.netmask)),
        vhost=_address(settings.gateway),
        in6_enabled=False,
        vdhcp_start=_address(settings.guest),
        vnameserver=_address(settings.nameserver),
        if_mtu=settings.mtu,
        if_mru=settings.mtu,
        disable_host_loopback=True,
        enable_emu=False,
        disable_dns=settings.restricted,
    )


def _callbacks(send: Callable[[bytes], None]) -> _Callbacks:
    def send_packet(data: int, size: int, _opaque: int | None) -> int:
        send(c.string_at(data, size))
        return size

    # Timers serve IPv6 router advertisements alone, which are off. A guest's misbehaviour is
    # not logged: it could fill the disk.
    return _Callbacks(
        send_packet=_WRITE(send_packet),
        guest_error=_MESSAGE(lambda _text, _opaque: None),
        clock_get_ns=_CLOCK(lambda _opaque: time.monotonic_ns()),
        timer_new=_TIMER_NEW(lambda _callback, _data, _opaque: None),
        timer_free=_TIMER_FREE(lambda _timer, _opaque: None),
        timer_mod=_TIMER_MOD(lambda _timer, _when, _opaque: None),
        register_poll_fd=_POLL_FD(lambda _fd, _opaque: None),
        unregister_poll_fd=_POLL_FD(lambda _fd, _opaque: None),
        notify=_NOTIFY(lambda _opaque: None),
    )
