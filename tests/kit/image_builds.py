"""Runs jobs in real VMs: the agent's own run, drivers and endpoint, without a repository."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pytest

from tests.kit import ROOT
from vmjobs.agent.guest import endpoint
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.image_source import ImageSource
from vmjobs.agent.journal import Journal
from vmjobs.agent.run import steps
from vmjobs.agent.run.job_run import execute
from vmjobs.agent.run.services import RunServices, RunSettings
from vmjobs.agent.run.state import Run, RunRequest
from vmjobs.agent.vm.events import EventQueue, LeaseLost
from vmjobs.hypervisor.base import Hypervisor, VmNeeds
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.local import LocalJob, describe_inputs
from vmjobs.model import (
    MIB,
    AttemptClaim,
    HypervisorKind,
    JobSpec,
    JobTicket,
    NetworkMode,
    Report,
    StreamName,
)

STORE = ROOT / "build" / "images"
WORK = ROOT / "build" / "work"
#: Seconds for a job from start to end, on a host that has other work as well.
DEADLINE = 300.0


def need(*programs: str) -> None:
    """Fail if a program is missing, because these tests would then show nothing."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.fail(f"not installed: {', '.join(missing)}")


def fsck(disk: Path) -> list[str]:
    """What e2fsck reports as wrong with a disk."""
    need("e2fsck")
    done = subprocess.run(["e2fsck", "-fn", disk], capture_output=True, text=True, check=False)
    *lines, last = (line for line in done.stdout.splitlines() if line and "Pass " not in line)
    assert re.search(r": \d+/\d+ files ", last), done.stdout
    return lines


def debugfs(disk: Path, command: str) -> bytes:
    """What debugfs, the reader of e2fsprogs, prints."""
    need("debugfs")
    return subprocess.run(["debugfs", "-R", command, disk], capture_output=True, check=True).stdout


class Sink(io.BytesIO):
    """A stream of a job; a test can wait for its contents."""

    def __init__(self) -> None:
        super().__init__()
        self._grown = threading.Condition()

    def write(self, data: object) -> int:
        with self._grown:
            self._grown.notify_all()
            return super().write(data)  # type: ignore[arg-type]

    def wait_for(self, text: bytes, timeout: float = DEADLINE) -> None:
        with self._grown:
            assert self._grown.wait_for(lambda: text in self.getvalue(), timeout), self.getvalue()


@dataclass
class Calls:
    """The requests of all guests. answer: returns a status to send in place of the endpoint's."""

    answer: Callable[[str], int | None] = lambda _path: None
    seen: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, line: str) -> int | None:
        """Record a request; returns the status that replaces its answer."""
        with self.changed:
            self.seen.append(line)
            self.changed.notify_all()
            return self.answer(line)

    def wait_for(self, line: str, count: int, timeout: float = DEADLINE) -> None:
        """Wait until this request has come ``count`` times."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.seen.count(line) >= count, timeout), self.seen


@dataclass
class Job(LocalJob):
    """A job of an array. at_end: called when the VM is gone and its disks still exist."""

    at_end: Callable[[], None] = lambda: None

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """Claim as the fourth of five jobs."""
        return super().claim(claim).model_copy(update={"index": 3, "count": 5})

    def report(self, report: Report) -> None:
        """Look at the disks before the last report."""
        if report.state.final:
            self.at_end()
        super().report(report)


@dataclass
class Guest:
    """A job in its VM. members, disk: the archive entries and files on the output disk."""

    run: Run
    job: Job
    out: Sink
    err: Sink
    console: Sink
    disk: dict[str, bytes] = field(default_factory=dict)
    members: list[tarfile.TarInfo] = field(default_factory=list)
    failure: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def start(self) -> None:
        self.job.at_end = self._read_disk
        self.thread = threading.Thread(target=self._execute, name="run")
        self.thread.start()

    def end(self, timeout: float = DEADLINE) -> Guest:
        self.thread.join(timeout)
        assert not self.thread.is_alive(), self.text
        if self.failure is not None:
            raise self.failure
        return self

    def remove(self) -> None:
        """Remove all processes of this VM, after any outcome of the test."""
        self.run.request.event_queue.put(LeaseLost())
        self.thread.join(DEADLINE)
        self.run.request.services.choose(VmNeeds(self.job.spec.hypervisor)).destroy(self.machine)

    @property
    def machine(self) -> str:
        """The hypervisor's name of the VM."""
        return self.run.request.services.journal.vm_name(self.run.request.attempt)

    @property
    def report(self) -> Report:
        assert self.job.final is not None
        return self.job.final

    @property
    def exit(self) -> dict[str, int]:
        """How the script ended, ``{"code": 3}`` or ``{"signal": 9}``."""
        told = self.report.exit
        assert told is not None, self.report
        return {"signal": told.signal} if told.signal is not None else {"code": told.code or 0}

    @property
    def text(self) -> str:
        """The console."""
        return self.console.getvalue().decode("utf-8", "replace")

    @property
    def outputs(self) -> dict[str, bytes]:
        folder = self.job.output_directory
        return {output.path: (folder / output.path).read_bytes() for output in self.job.outputs}

    def said(self, word: str) -> str:
        """The text after this run's sentinel ``word`` on the console."""
        mark = f"vmjobs:{self.run.choice.sentinel}:{word}"
        found = [line.partition(mark) for line in self.text.splitlines() if mark in line]
        assert len(found) == 1, self.text
        return found[0][2].strip("\r ")

    def _execute(self) -> None:
        try:
            execute(self.run)
        except BaseException as error:  # the test that waits raises it
            self.failure = error

    def _read_disk(self) -> None:
        try:
            with tarfile.open(self.run.directory / "output.disk", "r:") as archive:
                self.members = archive.getmembers()
                for member in self.members:
                    source = archive.extractfile(member)
                    self.disk[member.name] = source.read() if source else b""
        except tarfile.ReadError:
            return


Drivers = Mapping[HypervisorKind, Hypervisor]


@lru_cache(maxsize=1)
def drivers() -> Drivers:
    """One driver for each kind in a process, for all its tests: libvirt does not allow two."""
    need("linux.uml", "qemu-system-x86_64", "qemu-img")
    return {
        HypervisorKind.UML: UserModeLinux(),
        HypervisorKind.QEMU: Libvirt(HypervisorKind.QEMU, node_connection()),
    }


class Bench:
    """Starts guests below one directory."""

    def __init__(self, folder: Path, images: ImageSource, drivers: Drivers) -> None:
        self.calls = Calls()
        self._folder = folder
        self._drivers = drivers
        self._parts = RunServices(
            images=images,
            choose=lambda needs: self._drivers[needs.demanded or HypervisorKind.UML],
            journal=Journal(folder / "runs"),
            settings=RunSettings(node="bench", max_console=16 * MIB, max_log=64 * MIB),
        )
        self._guests: list[Guest] = []

    def start(
        self,
        image: str,
        script: str,
        *,
        network: NetworkMode = NetworkMode.REPOSITORY,
        hypervisor: HypervisorKind = HypervisorKind.UML,
        inputs: Mapping[str, bytes] | None = None,
        **fields: object,
    ) -> Guest:
        """Start a job in the image of this digest; ``fields`` are the spec's."""
        place = self._folder / f"job-{len(self._guests)}"
        files = {}
        for name, data in (inputs or {}).items():
            files[name] = place / "inputs" / name
            files[name].parent.mkdir(parents=True, exist_ok=True)
            files[name].write_bytes(data)
        values = {"disk": 256, "network": network, "hypervisor": hypervisor, **fields}
        spec = JobSpec.model_validate(
            {"image": image, "script": script, "inputs": describe_inputs(files), **values}
        )
        sinks = {name: Sink() for name in StreamName}
        job = Job(
            job_id="job-1",
            spec=spec,
            image_digest=image,
            files=files,
            output_directory=place / "outputs",
            on_report=lambda _report: None,
            sinks=sinks,
        )
        run = Run(
            RunRequest(
                job, lambda _report: None, self._parts, job.job_id, uuid.uuid4().hex, EventQueue()
            )
        )
        out, err, console = (sinks[n] for n in (StreamName.OUT, StreamName.ERR, StreamName.CONSOLE))
        guest = Guest(run, job, out, err, console)
        guest.start()
        self._guests.append(guest)
        return guest

    def close(self) -> None:
        """Remove all guests, and verify that the drivers list none."""
        for guest in self._guests:
            guest.remove()
        prefix = self._parts.journal.prefix
        left = [n for driver in self._drivers.values() for n in driver.list() if n.startswith(prefix)]
        assert left == []


@contextmanager
def bench(
    folder: Path, images: ImageSource, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """A bench that runs guests and records their requests."""
    made = Bench(folder, images, drivers)
    answer = endpoint.answer

    def watched(link: GuestSession, asked: endpoint.GuestRequest) -> endpoint.Answer:
        instead = made.calls.note(asked.target)
        return answer(link, asked) if instead is None else (instead, "no")

    monkeypatch.setattr(endpoint, "answer", watched)
    # Guests that lost their control loop reconnect soon.
    monkeypatch.setattr(endpoint, "MAX_WAIT_SECONDS", 3.0)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def vms(tmp_path: Path, store: ImageSource, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench with the images of the module's ``store``."""
    with bench(tmp_path, store, drivers(), monkeypatch) as made:
        yield made


def spoil_job_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give guests a job disk whose contents are not an archive."""

    def write(path: Path, *_more: object) -> None:
        path.write_bytes((b"not a tar archive" * 100).ljust(MIB, b"\0"))

    monkeypatch.setattr(steps, "write_job_disk", write)


def exit_json(guest: Guest) -> dict[str, int]:
    """The exit report on the output disk."""
    value: dict[str, int] = json.loads(guest.disk["exit.json"])
    return value
