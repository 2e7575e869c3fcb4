"""The switch: which frame goes where, and that nobody holds it up; a real process, real sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs, switch
from vmjobs.hypervisor.switch import LONGEST, Table, mac

A, B, C = (bytes.fromhex(mac(number).replace(":", "")) for number in (1, 2, 3))
ALL = b"\xff" * 6


def frame(target: bytes, source: bytes, text: bytes = b"hello") -> bytes:
    return target + source + b"\x08\x00" + text


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "net" / "switch"
    yield place
    if (pid := switch.process(place)) is not None:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def table() -> Table:
    made = Table()
    for port in (1, 2, 3):
        made.plug(port)
    return made


def plugged(path: Path) -> socket.socket:
    port = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    port.connect(str(path))
    port.settimeout(10)
    return port


def test_addresses_are_ones_that_anybody_may_give_out() -> None:
    assert mac(1) == "02:76:00:00:00:01"
    assert A[0] & 0x03 == 0x02


def test_frames_go_where_their_address_is(table: Table) -> None:
    assert table.route(1, frame(ALL, A)) == [2, 3]
    assert table.route(2, frame(A, B)) == [1]
    assert table.route(1, frame(B, A)) == [2]
    assert table.route(1, frame(C, A)) == [2, 3], "not known yet, so to everybody"
    assert table.route(1, frame(A, A)) == []


def test_nobody_speaks_for_another(table: Table) -> None:
    table.route(1, frame(ALL, A))
    assert table.route(2, frame(ALL, A)) == [], "that address is taken"
    assert table.route(2, frame(A, B)) == [1]
    assert table.route(2, frame(ALL, C)) == [], "a port has one address"
    assert table.route(3, frame(ALL, ALL)) == [], "no card has a group's address"
    table.unplug(1)
    assert table.route(3, frame(ALL, A)) == [2], "its owner is gone"


@pytest.mark.parametrize("data", [b"", A + B, frame(ALL, A, b"x" * (LONGEST - 13))])
def test_what_is_no_frame_is_dropped(table: Table, data: bytes) -> None:
    assert table.route(1, data) == []


def test_frames_cross_a_switch_that_is_a_process(path: Path) -> None:
    pid = switch.ensure(path)
    assert switch.ensure(path) == pid == switch.process(path)
    with plugged(path) as one, plugged(path) as two, plugged(path) as three:
        one.send(frame(ALL, A))
        assert two.recv(2000) == three.recv(2000) == frame(ALL, A)
        two.send(frame(A, B, b"yes"))
        assert one.recv(2000) == frame(A, B, b"yes")
        three.setblocking(False)
        with pytest.raises(BlockingIOError):
            three.recv(2000)


def test_a_port_that_does_not_read_holds_nobody_up(path: Path) -> None:
    switch.ensure(path)
    with plugged(path) as one, plugged(path), plugged(path) as three:
        one.send(frame(ALL, A))
        three.recv(2000)
        three.send(frame(A, C))
        one.recv(2000)
        for number in range(5000):  # the second port gets all of them, and reads none
            one.send(frame(ALL, A, b"x" * 1400))
            assert three.recv(2000)[:6] == ALL, number


def test_of_two_one_is_the_switch(path: Path) -> None:
    pid = switch.ensure(path)
    argv = [sys.executable, "-m", "vmjobs.hypervisor.switch", "--listen", str(path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "there is a switch" in ended.stderr
    assert switch.process(path) == pid


def test_after_a_kill_there_is_another(path: Path) -> None:
    first = switch.ensure(path)
    handle = os.pidfd_open(first)
    os.kill(first, signal.SIGKILL)
    assert procs.readable([handle], 10)
    os.close(handle)
    assert path.exists()
    assert switch.process(path) is None
    assert switch.ensure(path) != first


@pytest.mark.slow
@pytest.mark.parametrize("how", ["told", "removed"])
def test_it_ends(path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = switch.ensure(path)
    handle = os.pidfd_open(pid)
    if how == "told":
        os.kill(pid, signal.SIGTERM)
    else:
        path.unlink()
        path.parent.rename(path.parent.with_name("gone"))
    began = time.monotonic()
    assert procs.readable([handle], 2 * switch.LOOK_SECONDS)
    assert time.monotonic() - began < (1 if how == "told" else 2 * switch.LOOK_SECONDS)
    assert not path.exists()
    os.close(handle)


def test_where_it_cannot_listen_its_words_are_told(tmp_path: Path) -> None:
    (tmp_path / "switch").mkdir()
    (tmp_path / "switch" / "x").touch()
    with pytest.raises(HypervisorError, match="does not come up: no switch can listen"):
        switch.ensure(tmp_path / "switch")
