"""Process inspection: a process that cannot be inspected does not count as ended."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.full_disk import files_left
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs


@pytest.fixture
def other() -> Iterator[procs.Process]:
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as process:
        found = procs.read(process.pid)
        assert found is not None
        yield found
        process.kill()


def test_nobody_has_ended_since_there_is_no_file_to_look_by(other: procs.Process) -> None:
    for look in (
        lambda: list(procs.scan()),
        lambda: procs.read(other.pid),
        lambda: procs.children(os.getpid()),
        lambda: procs.start_ticks(other.pid),
    ):
        with files_left(0), pytest.raises((HypervisorError, OSError), match="Too many open files"):
            look()
    with files_left(1):
        assert other.pid in [process.pid for process in procs.scan()]


def test_what_is_to_end_ends_once_it_can_be_looked_at(other: procs.Process) -> None:
    asked = 0

    def find() -> list[procs.Process]:
        nonlocal asked
        asked += 1
        with files_left(0 if asked < 3 else 10):
            return [process for process in procs.scan() if process.pid == other.pid]

    procs.kill_all(find, 10, "it")
    assert asked > 3
    assert procs.read(other.pid) is None


def test_what_cannot_be_looked_at_is_not_gone(other: procs.Process) -> None:
    def find() -> list[procs.Process]:
        with files_left(0):
            return list(procs.scan())

    with pytest.raises(HypervisorError, match=r"^it is not gone 0\.5 s after SIGKILL: cannot look at"):
        procs.kill_all(find, 0.5, "it")


def test_a_slow_search_is_no_reason_to_take_what_has_ended_for_living(other: procs.Process) -> None:
    """This happens on a node where hundreds of VMs end at the same moment."""

    def find() -> list[procs.Process]:
        time.sleep(0.3)
        return [other] if procs.read(other.pid) else []

    procs.kill_all(find, 0.1, "it")
    assert procs.read(other.pid) is None


def test_many_who_look_at_the_same_time_share_what_is_seen(
    other: procs.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = [], procs._scan

    def slow() -> Iterator[procs.Process]:
        looks.append(1)
        time.sleep(0.1)
        yield from look()

    monkeypatch.setattr(procs, "_scan", slow)
    with ThreadPoolExecutor(20) as pool:
        seen = list(pool.map(lambda _: other.pid in {p.pid for p in procs.scan()}, range(20)))
    assert (seen, len(looks) < 5) == ([True] * 20, True)
    with subprocess.Popen(["sleep", "100"]) as later:
        assert later.pid in [process.pid for process in procs.scan()]
        later.kill()
