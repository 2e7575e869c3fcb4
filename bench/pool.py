"""Times a grid's jobs from outside: through the API, and with HTCondor's own tools."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.grid import Grid
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.sandbox import bubblewrap
from vmjobs.model import ON_NODE_STATES, Job, JobState

HERE = Path(__file__).parent
#: Seconds between two looks at a job: while its VM runs, and after the VM's end.
SELDOM, OFTEN = 0.25, 0.02
#: Seconds that one job may take.
PATIENCE = 300.0


@dataclass(frozen=True)
class Timed:
    """A job that completed.

    total: seconds from its submission to its final state in the API.
    notice: seconds from the end of its VM's process to that final state; None where the process cannot
        be seen from here, because the grid is elsewhere.
    """

    job: Job
    total: float
    notice: float | None


def run_job(grid: Grid, script: str, **fields: Any) -> Timed:
    """Submit one job through the API and wait for its final state.

    Raises:
        RuntimeError: it did not complete.
    """
    began = time.monotonic()
    jobs = grid.submit(script, **fields)
    (timed,) = follow(grid, jobs, began)
    return timed


def follow(grid: Grid, jobs: list[Job], began: float) -> list[Timed]:
    """Wait for the jobs of an array that was submitted at ``began``.

    This polls a job often once its VM has ended; until then it polls the array, and seldom, so that
    polling adds no load to what is measured.
    """
    rang = threading.Event()
    watches = {job.id: _JobWatch(grid, job.id, began, rang) for job in jobs}
    with ExitStack() as stack:
        for watch in watches.values():
            stack.callback(watch.close)
        next_look = 0.0
        while left := [watch for watch in watches.values() if watch.timed is None]:
            if time.monotonic() > began + PATIENCE:
                raise RuntimeError(
                    f"not final after {PATIENCE:g} s: {[watch.job_id for watch in left]}"
                )
            if time.monotonic() >= next_look:
                for job in grid.api.jobs(array=jobs[0].array):
                    watches[job.id].see(job)
                next_look = time.monotonic() + SELDOM
            if any(watch.gone is not None for watch in left):
                time.sleep(OFTEN)
            else:
                rang.wait(SELDOM)
                rang.clear()
            for watch in left:
                watch.ask()
    return [watch.timed for watch in watches.values() if watch.timed is not None]


class _JobWatch:
    """Follows one job: its state through the API, its VM's process in this host's /proc.

    rang: set when the VM has ended.
    """

    def __init__(self, grid: Grid, job_id: str, began: float, rang: threading.Event) -> None:
        self.job_id, self.began = job_id, began
        self.handle: int | None = None
        self.gone: float | None = None
        self.timed: Timed | None = None
        self._grid, self._rang = grid, rang
        self._etag = ""

    def see(self, job: Job) -> None:
        """Record the job as the API shows it; find the VM's process once there is one."""
        if self.timed is None and job.state.final:
            now = time.monotonic()
            if job.state is not JobState.COMPLETED:
                raise RuntimeError(f"job {job.id} ended as {job.state}: {job.reason.message}")
            self.timed = Timed(job, now - self.began, None if self.gone is None else now - self.gone)
        elif self.handle is None and job.state in ON_NODE_STATES:
            attempt = self._grid.api.events(self.job_id)[-1].attempt
            with suppress(ProcessLookupError):
                self.handle = next((os.pidfd_open(pid) for pid in _leaders(attempt)), None)
            if self.handle is not None:
                # A separate thread records the right time even while other requests are under way.
                threading.Thread(target=self._await_end, args=(self.handle,), daemon=True).start()

    def _await_end(self, handle: int) -> None:
        if procs.readable([handle], PATIENCE):
            self.gone = time.monotonic()
            self._rang.set()

    def ask(self) -> None:
        """Ask the API about a job whose VM has ended."""
        if self.gone is not None and self.timed is None:
            job, self._etag = self._grid.api.job_if_changed(self.job_id, self._etag)
            if job is not None:
                self.see(job)

    def close(self) -> None:
        if self.handle is not None:
            os.close(self.handle)


def _leaders(attempt: str) -> Iterator[int]:
    """Yield the process that is an attempt's VM, under any owner."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (process := procs.read(int(entry.name))):
            named = any(
                f"-{attempt}" in word for word in process.argv if word.startswith(("umid=", "guest="))
            )
            # A sandbox's inner processes have the same arguments, and one of them has its own session.
            kernel = process.is_leader and process.program == "linux.uml"
            if named and (kernel or bubblewrap.is_leader(process) or "qemu" in process.program):
                yield process.pid


@dataclass(frozen=True)
class CondorJob:
    """A job of HTCondor's own that ended well.

    seconds: from its submission to its end. began: time of its submission, in seconds of the epoch.
    """

    seconds: float
    log: str
    began: float
    out: str


def condor_job(grid: Grid, service: str, files: dict[str, str]) -> CondorJob:
    """Run one job of HTCondor's own from a schedd's host.

    files: ``job.sub`` and the files that it names; its log must be ``job.log``.

    Raises:
        RuntimeError: it did not end well.
    """
    directory = grid.on(service, "mktemp", "-d", "/tmp/bench-XXXXXXXX", user="vmjobs").strip()  # noqa: S108
    for name, text in files.items():
        _feed(grid, service, ["tee", f"{directory}/{name}"], text)
    told = _feed(
        grid,
        service,
        ["python3", "-", directory, str(PATIENCE)],
        (HERE / "time_condor_job.py").read_text(),
    )
    found = json.loads(told)
    grid.on(service, "rm", "-rf", directory)
    return CondorJob(**found)


def _feed(grid: Grid, service: str, command: list[str], text: str) -> str:
    argv = ["docker", "exec", "-i", "-u", "vmjobs", grid.container(service), *command]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} on {service}: {done.stderr.strip()}")
    return done.stdout


def boot_by_hand(grid: Grid, node: str, job: Job) -> float:
    """Boot a job's image on the node by hand, as the agent's user, with the job's hypervisor."""
    service = node.partition(".")[0]
    container = grid.container(service)
    place = "/tmp/vmjobs-bench-raw_boot.py"  # noqa: S108
    subprocess.run(["docker", "cp", str(HERE / "raw_boot.py"), f"{container}:{place}"], check=True)
    assert job.hypervisor is not None
    arguments = [
        job.hypervisor.value,
        "/var/lib/vmjobs/agent/images",
        job.image_digest,
        job.spec.network.value,
    ]
    return float(grid.on(service, "python3", place, *arguments, user="vmjobs-agent"))
