"""Answers to DHCP requests (RFC 2131) of guests, which stock images send. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from vmjobs.hypervisor.base import (
    ENDPOINT_ADDRESS,
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    GUEST_NETMASK_BITS,
    NAMESERVER_ADDRESS,
)
from vmjobs.model import NetworkMode

CLIENT_PORT: Final = 68
#: The longest request that is read, in bytes.
MAX_REQUEST: Final = 1500

# The fields before the options: RFC 2131, figure 1, and the cookie of RFC 2132, section 2.
_HEADER: Final = struct.Struct("!4BIHH4s4s4s4s16s192s4s")
_COOKIE: Final = bytes((99, 130, 83, 99))
_MIN_REPLY: Final = 300
_BOOTREQUEST, _BOOTREPLY = 1, 2
# Options and messages: RFC 2132.
_MASK, _ROUTER, _NAME_SERVER, _WANTED, _LEASE, _MESSAGE, _SERVER, _END = 1, 3, 6, 50, 51, 53, 54, 255
_DISCOVER, _OFFER, _REQUEST, _ACK, _NAK = 1, 2, 3, 5, 6
_INFINITE_LEASE: Final = bytes((255, 255, 255, 255))


def answer(request: bytes, mode: NetworkMode) -> bytes | None:
    """Return the reply to broadcast; None: the request gets no reply."""
    if len(request) < _HEADER.size:
        return None
    op, kind, length, _, number, _, flags, current, *_, card, _, cookie = _HEADER.unpack_from(request)
    asked = dict(_options(request[_HEADER.size :]))
    message = asked.get(_MESSAGE, b"")
    if (op, cookie) != (_BOOTREQUEST, _COOKIE) or message not in {
        bytes([_DISCOVER]),
        bytes([_REQUEST]),
    }:
        return None
    guest, server = _address(GUEST_ADDRESS), _address(ENDPOINT_ADDRESS)
    wanted = asked.get(_WANTED, current if any(current) else guest)
    refused = message[0] == _REQUEST and wanted != guest
    found = {_SERVER: server}
    if refused:
        found |= {_MESSAGE: bytes([_NAK])}
    else:
        netmask = IPv4Network((0, GUEST_NETMASK_BITS)).netmask.packed
        found |= {_MESSAGE: bytes([_OFFER if message[0] == _DISCOVER else _ACK])}
        found |= {_LEASE: _INFINITE_LEASE, _MASK: netmask}
        if mode is NetworkMode.OUTBOUND:
            found |= {_ROUTER: _address(GATEWAY_ADDRESS), _NAME_SERVER: _address(NAMESERVER_ADDRESS)}
    given = bytes(4) if refused else guest
    head = (_BOOTREPLY, kind, length, 0, number, 0, flags, bytes(4), given, server, bytes(4))
    options = b"".join(bytes([code, len(value)]) + value for code, value in found.items())
    reply = _HEADER.pack(*head, card, b"", _COOKIE) + options + bytes([_END])
    return reply.ljust(_MIN_REPLY, b"\0")


def _options(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 1 < len(data) and data[at] != _END:
        if not data[at]:  # padding
            at += 1
            continue
        yield data[at], data[at + 2 : at + 2 + data[at + 1]]
        at += 2 + data[at + 1]


def _address(text: str) -> bytes:
    return IPv4Address(text).packed
