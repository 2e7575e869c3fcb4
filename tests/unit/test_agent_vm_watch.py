"""VM watch: a silent guest is lost, unless it was the agent that did not listen."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.kit.waiting import wait_until
from vmjobs.agent.vm import vm_watch
from vmjobs.agent.vm.console import ConsoleReader
from vmjobs.agent.vm.events import EventQueue, ExitReported, GuestSilent, RunEvent, VmEnded
from vmjobs.agent.vm.vm_watch import MAX_FAILED_READS, watching
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import Hypervisor, VmState

SILENCE = 0.6


@dataclass
class Sleepy:
    """A driver with a running VM; the first look at it takes ``first`` seconds longer."""

    first: float = 0.0

    def wait(self, name: str, timeout: float, beside: Sequence[int] = ()) -> VmState:
        seconds, self.first = self.first, 0.0
        time.sleep(seconds)
        procs.readable(list(beside), timeout)
        return VmState.RUNNING


def watch_of(folder: Path, driver: object, **fields: Any) -> vm_watch.VmWatch:
    """A watch for a VM with its console in ``folder``."""
    reader = ConsoleReader(folder / "console", "sentinel")
    plain = {"event_queue": EventQueue(), "max_console": 1000, "silence": 60, "heard": lambda: 0.0}
    told = {"reader": reader, "on_console": lambda: None, **plain, **fields}
    return vm_watch.VmWatch(driver=cast(Hypervisor, driver), vm_name="it", **told)


def silent_after(folder: Path, asleep: float) -> float:
    """Seconds after which a guest that was heard just now counts as lost."""
    event_queue, began = EventQueue(), time.monotonic()
    one = watch_of(
        folder,
        Sleepy(asleep),
        event_queue=event_queue,
        silence=SILENCE,
        heard=lambda: began,
        listening=True,
    )
    with watching(one):
        assert isinstance(event_queue.next(began + 10), GuestSilent)
    return time.monotonic() - began


def test_a_silent_guest_is_lost_and_what_was_not_heard_in_sleep_does_not_count(tmp_path: Path) -> None:
    assert SILENCE <= silent_after(tmp_path, asleep=0.0) < 2 * SILENCE + 1
    assert silent_after(tmp_path, asleep=3 * SILENCE) >= 4 * SILENCE


@pytest.mark.parametrize(("failures", "read"), [(3, True), (2 * MAX_FAILED_READS, False)])
def test_a_console_that_could_not_be_read_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, *, read: bool
) -> None:
    """The watch goes on; the last output precedes the VM's end, if it can be read."""
    monkeypatch.setattr(vm_watch, "TICK_SECONDS", 0.001)
    (tmp_path / "console").write_text("vmjobs:sentinel:exit code=3\n")
    reader, tries = ConsoleReader(tmp_path / "console", "sentinel"), iter(range(failures))
    look = reader.read

    def may_fail() -> list[RunEvent]:
        if next(tries, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return look()

    monkeypatch.setattr(reader, "read", may_fail)
    event_queue = EventQueue()
    gone = SimpleNamespace(wait=lambda *_: VmState.GONE)
    with watching(
        watch_of(tmp_path, gone, event_queue=event_queue, reader=reader, heard=time.monotonic)
    ):
        seen = event_queue.next(time.monotonic() + 10)
        if read:
            assert isinstance(seen, ExitReported)
            seen = event_queue.next(time.monotonic() + 10)
        assert isinstance(seen, VmEnded)


def test_what_a_console_says_is_heard_at_once_and_an_idle_one_costs_nothing(tmp_path: Path) -> None:
    console, event_queue, looks = tmp_path / "console", EventQueue(), 0
    console.touch()
    reader = ConsoleReader(console, "sentinel")
    look = reader.read

    def count() -> list[RunEvent]:
        nonlocal looks
        looks += 1
        return look()

    reader.read = count  # type: ignore[method-assign]
    with watching(
        watch_of(tmp_path, Sleepy(), event_queue=event_queue, reader=reader, heard=time.monotonic)
    ):
        for _ in range(3):
            time.sleep(0.5)
            began = time.monotonic()
            with console.open("ab") as file:
                file.write(b"vmjobs:sentinel:exit code=3\n")
            assert isinstance(event_queue.next(began + 10), ExitReported)
            assert time.monotonic() - began < 0.3
    assert looks < 20


@pytest.mark.slow
def test_a_watch_says_from_time_to_time_that_it_is_time(tmp_path: Path) -> None:
    times: list[float] = []
    watch = watch_of(tmp_path, Sleepy(), on_time=lambda: times.append(time.monotonic()))
    began = time.monotonic()
    with watching(watch):
        wait_until(lambda: len(times) >= 2, 30)
    assert times[0] - began >= 1
    assert times[1] - began >= 1 + 2


def test_a_full_disk_that_another_vm_saw_counts_for_all_that_ran_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A VM's write has failed, but others have freed space before its own watch looks."""
    (tmp_path / "console").touch()
    gone = SimpleNamespace(wait=lambda *_: VmState.GONE)

    event_queue = EventQueue()

    def end(watch: vm_watch.VmWatch, free: int) -> None:
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=4096))
        with watching(watch):
            assert isinstance(event_queue.next(time.monotonic() + 10), VmEnded)

    def begin() -> vm_watch.VmWatch:
        return watch_of(tmp_path, gone, event_queue=event_queue, disk=tmp_path)

    earlier, saw, unlucky = begin(), begin(), begin()
    end(earlier, 1 << 20)
    assert not earlier.disk_was_full
    end(saw, 0)
    end(unlucky, 1 << 20)
    assert saw.disk_was_full
    assert unlucky.disk_was_full
    later = begin()
    end(later, 1 << 20)
    assert not later.disk_was_full
