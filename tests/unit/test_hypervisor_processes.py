"""Processes: how they are inspected and ended, and those that outlive their starter."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.full_disk import files_left
from tests.kit.hypervisors import ancestors
from tests.kit.waiting import wait_until
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.sandbox.process_launcher import LaunchedProcess, Launcher


@pytest.fixture
def other() -> Iterator[procs.Process]:
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as process:

        def shown() -> procs.Process | None:
            found = procs.read(process.pid)
            return found if found and found.argv else None  # it may not show its command line yet

        yield wait_until(shown)
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
    looks, look = [], os.listdir

    def slow(folder: str) -> list[str]:
        looks.append(folder)
        time.sleep(0.1)
        return look(folder)

    monkeypatch.setattr(os, "listdir", slow)
    with ThreadPoolExecutor(20) as pool:
        seen = list(pool.map(lambda _: other.pid in {p.pid for p in procs.scan()}, range(20)))
    assert (seen, len(looks) < 5) == ([True] * 20, True)
    with subprocess.Popen(["sleep", "100"]) as later:
        assert later.pid in [process.pid for process in procs.scan()]
        later.kill()


PATH = {"PATH": "/usr/bin:/bin"}


class Shells:
    """Starts shells, and ends them."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.started: list[LaunchedProcess] = []

    def __call__(
        self, script: str, stdout: int | None = None, cwd: Path | None = None
    ) -> LaunchedProcess:
        with open(os.devnull, "r+b") as nothing:  # noqa: PTH123
            handles = [nothing.fileno(), nothing.fileno() if stdout is None else stdout, 2]
            found = self.launcher.start(["sh", "-c", script], handles, PATH, cwd)
        self.started.append(found)
        return found


@pytest.fixture
def shells() -> Iterator[Shells]:
    shells = Shells(Launcher())
    yield shells
    for process in shells.started:
        process.kill()
        process.close()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_it_is_no_descendant_and_its_environment_names_nobody(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_CONDOR_ANCESTOR_1", "1:2:3")
    process = shells("kill -STOP $$")  # runs no other program meanwhile
    assert os.getpid() not in ancestors(process.pid)
    for pid in [process.pid, parent(process.pid)]:
        assert b"_CONDOR_" not in Path(f"/proc/{pid}/environ").read_bytes()
    found = procs.read(process.pid)
    assert found.is_leader


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -ABRT $$", -6), ("exit 0", 0)])
def test_how_it_ended_is_told(shells: Shells, script: str, status: int) -> None:
    process = shells(script)
    assert process.status(20) == status
    assert process.status(0) == status


def test_what_it_has_used_is_told_with_its_end(shells: Shells) -> None:
    """Includes children that ended before it; memory is that of the largest process."""
    work = 'x = "x" * (48 << 20); n = 0\nwhile n < 3_000_000: n += 1'
    process = shells(f"{sys.executable} -c '{work}'; exit 0")
    used = process.used(60)
    assert used.cpu_seconds > 0.05
    assert 48 << 20 < used.memory < 256 << 20
    goes_on = shells("exec sleep 60")
    assert goes_on.used(0.05) is None


def test_one_that_has_ended_is_not_killed_by_its_number(
    shells: Shells, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = shells("exit 0")
    assert process.status(20) == 0
    bystander = shells("exec sleep 60")
    monkeypatch.setattr(process, "pid", bystander.pid)  # as if the PID was reused
    process.kill()
    assert bystander.status(0.1) is None


def test_it_has_the_handles_and_the_directory_it_was_given(shells: Shells, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as words:
        process = shells("pwd; ls /proc/self/fd", stdout=writer, cwd=tmp_path)
        os.close(writer)
        where, *handles = words.read().decode().split()
    assert process.status(20) == 0
    assert Path(where) == tmp_path.resolve()
    assert handles == ["0", "1", "2", "3"]  # the last one is the directory that is listed


def test_a_program_that_is_not_there(shells: Shells) -> None:
    with pytest.raises(HypervisorError, match="cannot run no-such-program: No such file"):
        shells.launcher.start(["no-such-program"], [0, 1, 2], PATH)
    assert shells("exit 3").status(20) == 3


@pytest.mark.parametrize("size", [140_000, 1_000_000])
def test_a_request_that_is_too_large_is_refused(shells: Shells, size: int) -> None:
    with pytest.raises(HypervisorError, match=r"process launcher failed|too long"):
        shells("#" * size)
    assert shells("exit 3").status(20) == 3


@pytest.mark.parametrize("spare", [0, 2])
def test_one_that_would_lack_handles_is_not_started(shells: Shells, spare: int) -> None:
    launcher = parent(shells("exec sleep 60").pid)
    taken = sum(1 for _ in Path(f"/proc/{launcher}/fd").iterdir())
    _, hard = resource.prlimit(launcher, resource.RLIMIT_NOFILE)
    resource.prlimit(launcher, resource.RLIMIT_NOFILE, (taken + spare, hard))
    with pytest.raises(HypervisorError, match=r"was not started|Too many open files"):
        shells("exec sleep 60")
    resource.prlimit(launcher, resource.RLIMIT_NOFILE, (hard, hard))
    after = shells("exec sleep 60")
    assert parent(after.pid) == launcher


def test_one_that_is_prepared_is_what_starts_them(shells: Shells) -> None:
    shells.launcher.prepare()
    shells.launcher.prepare()
    (first,) = procs.children(os.getpid())
    assert shells("exit 3").status(20) == 3
    assert first not in procs.children(os.getpid())


def test_what_starts_them_may_be_killed(shells: Shells) -> None:
    before = shells("exec sleep 60")
    os.kill(parent(before.pid), signal.SIGKILL)
    assert before.status(20) is None  # the status is lost, and the call does not wait
    assert procs.read(before.pid) is not None
    assert shells("exit 5").status(20) == 5


def asker(program: list[str], then: str = "") -> list[str]:
    """Return a command that starts ``program``, executes ``then``, and waits for the program."""
    script = f"""
from vmjobs.hypervisor.sandbox.process_launcher import Launcher
process = Launcher().start({program}, [0, 1, 2], {PATH!r})
{then}
process.status(60)
"""
    return [sys.executable, "-c", script]


def test_it_goes_on_when_whoever_asked_is_killed_and_what_started_it_ends_with_it() -> None:
    command = asker(["sleep", "60"], "print(process.pid, flush=True)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asked:
        pid = int(asked.stdout.readline())
        launcher = parent(pid)
        asked.kill()
    assert procs.read(pid) is not None
    assert parent(pid) == launcher
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: procs.read(launcher) is None, 20)


def test_it_ends_with_its_user_where_nothing_was_started_that_goes_on() -> None:
    command = asker(["sh", "-c", "echo $PPID"])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    launcher = int(done.stdout)
    wait_until(lambda: procs.read(launcher) is None, 20)
