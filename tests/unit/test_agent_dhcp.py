"""DHCP for guests: what busybox's and Debian's clients send, and what no client may do."""

from __future__ import annotations

import struct

import pytest

from vmjobs.agent.guest.dhcp import answer
from vmjobs.model import NetworkMode

COOKIE = bytes((99, 130, 83, 99))
CARD = bytes.fromhex("525400123456")


def request(*options: bytes, current: bytes = bytes(4), op: int = 1) -> bytes:
    head = struct.pack("!4BIHH", op, 1, 6, 0, 0xABCD, 1, 0x8000) + current + bytes(12)
    return head + CARD.ljust(16, b"\0") + bytes(192) + COOKIE + b"".join(options) + b"\xff"


def options(reply: bytes) -> dict[int, bytes]:
    found, at = {}, 240
    while reply[at] != 255:
        found[reply[at]] = reply[at + 2 : at + 2 + reply[at + 1]]
        at += 2 + reply[at + 1]
    return found


@pytest.mark.parametrize(("asks", "gets"), [(1, 2), (3, 5)])
def test_a_guest_gets_its_address_for_ever(asks: int, gets: int) -> None:
    reply = answer(request(b"\x00", bytes((53, 1, asks))), NetworkMode.OUTBOUND)
    assert reply is not None
    assert len(reply) >= 300
    assert (reply[0], reply[4:8]) == (2, b"\0\0\xab\xcd")
    assert (reply[16:20], reply[28:34]) == (bytes((10, 0, 2, 15)), CARD)
    assert options(reply) == {
        54: bytes((10, 0, 2, 100)),
        53: bytes([gets]),
        51: b"\xff\xff\xff\xff",
        1: bytes((255, 255, 255, 0)),
        3: bytes((10, 0, 2, 2)),
        6: bytes((10, 0, 2, 3)),
    }


def test_without_a_way_outside_it_is_told_of_none() -> None:
    reply = answer(request(bytes((53, 1, 1))), NetworkMode.REPOSITORY)
    assert {3, 6}.isdisjoint(options(reply))


@pytest.mark.parametrize("asked", [{"current": bytes((10, 0, 2, 16))}, {"wants": True}])
def test_no_other_address_is_for_it(asked: dict[str, object]) -> None:
    wanted = bytes((50, 4, 192, 168, 1, 7)) if asked.pop("wants", False) else b""
    reply = answer(request(bytes((53, 1, 3)), wanted, **asked), NetworkMode.OUTBOUND)  # type: ignore[arg-type]
    assert reply is not None
    assert reply[16:20] == bytes(4)
    assert options(reply) == {54: bytes((10, 0, 2, 100)), 53: b"\x06"}


@pytest.mark.parametrize(
    "asked",
    [
        b"",
        bytes(1000),
        request(),
        request(bytes((53, 1, 7))),
        request(bytes((53, 1, 1)), op=2),
        request(bytes((53, 200, 1))),
        request(bytes((53, 0))),
        request(bytes((53, 1, 1)))[:239],
        request(b"\x35"),
    ],
)
def test_what_is_no_request_is_not_answered(asked: bytes) -> None:
    assert answer(asked, NetworkMode.OUTBOUND) is None
