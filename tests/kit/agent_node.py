"""A node for transparent jobs: a real agent, and `exec-unchanged` as a starter runs it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from images.store.image_store import ImageStore
from tests.kit import ROOT
from tests.kit.agent_runs import SETTINGS
from tests.kit.chirp_service import ChirpService, chirp_service
from tests.kit.waiting import wait_until
from tests.kit.wrapper import build_wrapper, install_program
from vmjobs.agent.condor_job.services import CondorJobServices
from vmjobs.agent.job_runner import JobRunner
from vmjobs.agent.journal import Journal
from vmjobs.agent.listener import listening
from vmjobs.agent.run.services import RunServices
from vmjobs.agent.server import Agent
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import Node, now

UID, GID = 4242, 4343
BOOT = 180.0


def slot_of(pid: int) -> int:
    """What a process says itself, or its own: there are no starters here."""
    for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if word.startswith(b"SLOT="):
            return int(word.removeprefix(b"SLOT="))
    return pid


@dataclass
class AgentNode:
    """A node with an agent.

    program: how `exec-unchanged` is started. lasting: machines that go on beside other jobs.
    """

    folder: Path
    socket: Path
    agent: Agent
    driver: UserModeLinux
    prefix: str
    program: list[str]
    places: list[Path] = field(default_factory=list)
    lasting: set[str] = field(default_factory=set)

    def start(
        self,
        *command: str,
        files: Mapping[str, bytes] | None = None,
        ad: str = 'VMJobImage = "generic"',
        environment: Mapping[str, str] | None = None,
        given: bytes | None = None,
        prepare: Callable[[Path], object] = lambda _: None,
        wrapped: bool = False,
    ) -> Job:
        """Start a job as the starter does: in a directory of its own, as its user.

        wrapped: by the job wrapper, in the job's environment.
        """
        place = Path(tempfile.mkdtemp(prefix="dir_", dir=self.folder))
        self.places.append(place)
        (place / ".job.ad").write_text(f"ClusterId = 7\nProcId = 0\n{ad}\n")
        (place / ".machine.ad").write_text("Cpus = 1\nMemory = 128\nDisk = 100000\n")
        for name, data in (files or {}).items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
        prepare(place)
        own = {"_CONDOR_SCRATCH_DIR": str(place), "PATH": "/usr/bin:/bin", **(environment or {})}
        for path in (place, *place.rglob("*")):
            os.chown(path, UID, GID, follow_symlinks=False)
        variables = os.memfd_create("environment")
        os.write(variables, b"".join(os.fsencode(f"{n}={v}") + b"\0" for n, v in own.items()))
        os.fchown(variables, UID, GID)
        told = f"/proc/self/fd/{variables}"
        argv = [*self.program, told, *command]
        around = {
            "PATH": "/usr/bin:/bin",
            "HOME": "/nonexistent",
            "VMJOBS_SOCKET": str(self.socket),
        }
        if wrapped:
            stand_in = self.folder / "stand-in"
            words = " ".join(self.program)
            stand_in.write_text(f'#!/bin/sh\nVMJOBS_SOCKET={self.socket} exec {words} "$@"\n')
            stand_in.chmod(0o755)
            argv = [str(build_wrapper(self.folder / "job-wrapper", stand_in)), *command]
            around = own
        with (
            (place / "_condor_stdout").open("wb") as out,
            (place / "_condor_stderr").open("wb") as err,
            tempfile.TemporaryFile() as source,
        ):
            source.write(given or b"")
            source.seek(0)
            process = subprocess.Popen(
                argv,
                cwd=place,
                stdin=subprocess.DEVNULL if given is None else source,
                stdout=out,
                stderr=err,
                env=around,
                user=UID,
                group=GID,
                extra_groups=[],
                pass_fds=[variables],
            )
        os.close(variables)
        return Job(place, process)

    def vms(self) -> list[str]:
        return [name for name in self.driver.list() if name.startswith(self.prefix)]

    def resident(self, script: str, **wish: Any) -> Job:
        """Start a shell script, and wait until it says ``up``."""
        job = self.start("/bin/sh", "-c", script, **wish)
        wait_until(lambda: "up" in job.out, BOOT, "the job")
        return job

    def cost(self, *command: str) -> float:
        """Run a job that succeeds; the seconds of processor time that what stands for it has taken."""
        job = self.start(*command)
        _, status, used = os.wait4(job.process.pid, 0)
        job.process.returncode = os.waitstatus_to_exitcode(status)
        assert job.status == 0, job.err
        return used.ru_utime + used.ru_stime

    def end(self, job: Job) -> None:
        """End a job as a starter that waits no longer."""
        job.process.kill()
        job.process.wait(60)
        self.wait_empty()

    def wait_empty(self) -> None:
        """Wait until no machine of this node is left, besides the lasting ones."""
        wait_until(lambda: self.lasting.issuperset(self.vms()), what="the VM to be gone")

    def run(self, *command: str, **wish: Any) -> Job:
        job = self.start(*command, **wish)
        job.process.wait(300)
        return job


@dataclass
class Job:
    """A job, its directory, and the process that the starter looks at."""

    place: Path
    process: subprocess.Popen[bytes]

    @property
    def status(self) -> int:
        """The exit status, or less than 0: the signal."""
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def memory(self) -> int:
        """Bytes of memory that it shares with no other process, while it lives (proc(5))."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    @property
    def out(self) -> str:
        return (self.place / "_condor_stdout").read_text("utf-8", "replace")

    @property
    def err(self) -> str:
        return (self.place / "_condor_stderr").read_text("utf-8", "replace")


@pytest.fixture
def chirp(tmp_path: Path) -> Iterator[ChirpService]:
    with chirp_service(tmp_path) as service:
        yield service


@pytest.fixture(scope="module")
def node() -> Iterator[AgentNode]:
    with agent_node() as made:
        yield made


@contextmanager
def agent_node() -> Iterator[AgentNode]:
    """A node whose agent takes transparent jobs; nothing is left of them in the end."""
    with tempfile.TemporaryDirectory(prefix="unchanged-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        driver = UserModeLinux()
        store = ImageStore(ROOT / "build" / "images")
        journal = Journal(folder / "runs")
        parts = RunServices(store, lambda *_, **__: driver, journal, SETTINGS)
        condor_jobs = CondorJobServices(folder / "handed", 2048, store.resolve, slot_of)

        def describe(running: tuple[str, ...]) -> Node:
            return Node(name="here", cpus=1, memory=1, disk=1, running=running, updated=now())

        def never(_job: str, _token: str) -> Any:
            raise AssertionError("no job of the repository's")

        agent = Agent(JobRunner(parts, never, condor_jobs), describe)
        with listening(folder / "s", agent.serve):
            node = AgentNode(
                folder,
                folder / "s",
                agent,
                driver,
                journal.prefix,
                install_program(folder, "exec-unchanged"),
            )
            yield node
        agent.stop(60)
        assert node.vms() == []
        assert list((folder / "runs").iterdir()) == []
        # A job's files are removed by the thread that served its wrapper.
        wait_until(lambda: not list((folder / "handed").glob("*")), what="the jobs' files to be gone")
