"""The cable between a guest and its network, and the stack behind it."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator

import pytest

from vmjobs.hypervisor import slirp
from vmjobs.hypervisor.usernet import MAX_FRAME, MAX_QUEUED, DatagramLink, StreamLink


def framed(*frames: bytes) -> bytes:
    return b"".join(struct.pack("!I", len(frame)) + frame for frame in frames)


@pytest.fixture
def cable() -> Iterator[tuple[StreamLink, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield StreamLink(ours), theirs


Cable = tuple[StreamLink, socket.socket]


def test_stream_frames_in_any_pieces(cable: Cable) -> None:
    link, theirs = cable
    found: list[bytes] = []
    for byte in framed(b"one", b"", b"three"):
        theirs.send(bytes([byte]))
        found += link.frames() or []
    assert found == [b"one", b"", b"three"]
    theirs.send(framed(b"four", b"five"))
    assert link.frames() == [b"four", b"five"]
    assert link.frames() == []
    theirs.close()
    assert link.frames() is None


def test_stream_with_an_impossible_length_ends(cable: Cable) -> None:
    link, theirs = cable
    theirs.send(struct.pack("!I", MAX_FRAME + 1))
    assert link.frames() is None


def test_stream_keeps_a_bounded_queue(cable: Cable) -> None:
    link, theirs = cable
    for _ in range(MAX_QUEUED * 3):
        link.send(b"x" * 1500)
    assert link.flush()
    theirs.settimeout(5)
    (size,) = struct.unpack("!I", theirs.recv(4))
    assert size == 1500


def test_datagrams() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        link = DatagramLink(ours)
        theirs.send(b"a")
        theirs.send(b"b")
        assert link.frames() == [b"a", b"b"]
        for _ in range(MAX_QUEUED * 2):
            link.send(b"x" * 1500)
        assert link.flush(), "a guest that does not read"
        theirs.close()
        assert link.frames() is None


def test_structures_are_laid_out_as_in_c() -> None:
    # offsets of libslirp.h on 64-bit Linux, as a C compiler tells
    config = slirp._Config
    offsets = {"vnetwork": 12, "vprefix_addr6": 28, "vhostname": 64, "vdhcp_start": 96, "if_mtu": 136}
    assert {name: getattr(config, name).offset for name in offsets} == offsets
    assert ctypes.sizeof(config) == 184


def test_stack_answers_arp() -> None:
    sent: list[bytes] = []
    settings = slirp.Settings("10.0.2.0/24", "10.0.2.2", "10.0.2.3", "10.0.2.15", True, 1500)
    stack = slirp.Stack(settings, sent.append)
    stack.forward("10.0.2.100", 80, "/no/such/socket")
    guest = bytes.fromhex("525400123456")
    who_has = bytes.fromhex("0001080006040001") + guest + bytes([10, 0, 2, 15]) + bytes(6)
    stack.receive(b"\xff" * 6 + guest + b"\x08\x06" + who_has + bytes([10, 0, 2, 100]))
    assert len(sent) == 1
    assert sent[0][:6] == guest
    stack.receive(b"")
    stack.receive(b"\0" * 10)
    stack.close()
    stack.close()
