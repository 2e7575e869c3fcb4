"""A job that HTCondor suspends: its processes are stopped, so its machine has to stand still too."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vmjobs.agent.run import Run
from vmjobs.errors import HypervisorError

log = logging.getLogger(__name__)

#: How often a job's process is looked at, in seconds: nothing tells when one that is not ours stops.
TICK = 0.5


def is_stopped(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether a process is stopped by a signal (proc(5), ``state``) or its cgroup (v2) is frozen.

    HTCondor does the one or the other, by how it keeps track of a job's processes.
    """
    try:
        stat = (proc / str(pid) / "stat").read_text("utf-8", "replace")
        if stat[stat.rindex(")") + 2 :].startswith("T"):
            return True
        for line in (proc / str(pid) / "cgroup").read_text("utf-8", "replace").splitlines():
            if line.startswith("0::/"):
                events = cgroups / line[4:] / "cgroup.events"
                return "frozen 1" in events.read_text("ascii").splitlines()
    except OSError:  # it is gone, or there are no such cgroups
        return False
    return False


@contextmanager
def pausing(run: Run, pid: int) -> Iterator[None]:
    """Pause the run's machine while the process is stopped, for as long as the context lasts.

    Only while the job itself runs: booting and collecting have deadlines, and are short.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(run, pid, over), name="pausing", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10 * TICK)


def _watch(run: Run, pid: int, over: threading.Event) -> None:
    suspension = _Suspension(run, pid)
    while not over.wait(TICK):
        try:
            suspension.look()
        except HypervisorError as error:  # it ends right now, for one
            log.warning("job %s: %s", run.job_id, error)


@dataclass
class _Suspension:
    """told: the machine was told to stand still. Whatever its driver said, it may do so by now. stands:
    it does.
    """

    run: Run
    pid: int
    told: bool = False
    stands: bool = False

    def look(self) -> None:
        """Have the machine do as the process does."""
        run, stopped = self.run, is_stopped(self.pid)
        if self.told:
            run.link.heard = time.monotonic()  # a guest that stands still cannot be heard of
        if stopped and not self.stands and run.pausable:
            self.told = True
            run.driver.pause(run.machine)
            self.stands, run.standing_since = True, time.monotonic()
            log.info("job %s is suspended", run.job_id)
        elif self.told and not stopped:
            run.driver.resume(run.machine)
            if self.stands:
                run.stood += time.monotonic() - run.standing_since  # counted twice for a moment
                run.standing_since = math.inf
            self.told = self.stands = False
            log.info("job %s goes on", run.job_id)
