"""Holds a machine to a share of the processors where no cgroup does: halts it, and lets it go on.

It is a process of its own, which needs no agent, and no packages; a machine that loses it is ended. ::

    python -m vmjobs.hypervisor.regulator --machine NAME --pid PID --processors SHARE

The process is stopped and continued by signals. A UML kernel runs its guest's programs as processes
that it traces, or that have been told to wait for it (``seccomp=on``). Those must not be stopped like
that: the kernel takes a signal that it did not send for a fault of its own. But it sends them SIGALRM
when a program's time is over, and so one that got this while its kernel is stopped waits for it; the
kernel goes on with another, or with the same.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.bucket import Bucket

#: Seconds that a machine rests at a time, or longer while it is in debt; it is looked at as often.
PERIOD = 0.1
#: What it may save up, in seconds' worth: more than a rest's, as a busy node does nothing at once.
BURST_SECONDS = 0.5
#: A machine runs for at least so many seconds at a time: halting one takes up to a tick of its clock.
SHORTEST_RUN = 0.005
#: Seconds in which a process must stop.
HALT_SECONDS = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Turn:
    """What the machine is to do, and for how many seconds until it is looked at again."""

    runs: bool
    seconds: float


class Allowance:
    """When a machine is to run, by what it has used. Pure but for the clock.

    share: processors that it may use on average.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bucket = Bucket(share, BURST_SECONDS, clock)
        self._used: float | None = None

    def turn(self, used: float) -> Turn:
        """What to do now. used: processor seconds, of all its life; what it begins with is free."""
        before = used if self._used is None else self._used
        self._used = max(used, before)
        self._bucket.take(self._used - before)
        level = self._bucket.level
        if level <= 0:
            return Turn(runs=False, seconds=PERIOD + self._bucket.wait())
        return Turn(runs=True, seconds=max(SHORTEST_RUN, min(PERIOD, level)))


class Machine:
    """A machine's main process. Raises ``OSError`` or ``HypervisorError`` where it cannot be held."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.handle = os.pidfd_open(pid)

    def halt(self) -> None:
        """Have it use no processor from now on."""
        deadline = time.monotonic() + HALT_SECONDS
        while True:
            # Time and again: it may be paused and resumed by others while this process is stopped here.
            signal.pidfd_send_signal(self.handle, signal.SIGSTOP)
            process = procs.read(self.pid)
            if process is None or process.stopped:
                break
            if time.monotonic() > deadline:
                raise HypervisorError(f"process {self.pid} does not stop")
            os.sched_yield()
        tracer = 0 if process is not None and "seccomp=on" in process.argv else self.pid
        for child in procs.children(self.pid):
            if _runs_for(child, tracer):
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGALRM)

    def go(self) -> None:
        """Let it go on."""
        signal.pidfd_send_signal(self.handle, signal.SIGCONT)

    def gone(self, timeout: float) -> bool:
        """Whether it has ended; waits for that so many seconds."""
        return procs.readable([self.handle], timeout) != []


def _runs_for(pid: int, tracer: int) -> bool:
    """Whether a program of the guest's runs, and has not stopped to tell its kernel something.

    tracer: 0: it is not traced, and sleeps while it waits for the kernel.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    except OSError:
        return False
    said = dict(line.partition(":")[::2] for line in status.splitlines())
    runs = "RSD" if tracer else "R"
    return said.get("TracerPid", "").strip() == str(tracer) and said["State"].strip()[0] in runs


def regulate(pid: int, share: float) -> None:
    """Hold process ``pid`` and its children to ``share`` processors until it is gone.

    Raises:
        OSError, HypervisorError: it could not be halted, or not be made to go on.
    """
    machine, allowance, runs = Machine(pid), Allowance(share), True
    while True:
        turn = allowance.turn(processor_seconds(pid) + time.process_time())
        try:
            if not turn.runs:
                machine.halt()  # again, if need be: it may have been paused and resumed meanwhile
            elif not runs:
                machine.go()
        except (OSError, HypervisorError):
            if not machine.gone(0.0):
                raise
        runs = turn.runs
        if machine.gone(turn.seconds):
            return


def processor_seconds(pid: int) -> float:
    """What a process, its children and those that it has outlived have used."""
    return _own(pid) + sum(_own(child) for child in procs.children(pid)) + _outlived(pid)


def _own(pid: int) -> float:
    with suppress(OSError):  # it has ended
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3) makes it the same way
    return 0.0


def _outlived(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / _TICKS


# --------------------------------------------------------------------------- the process


def main() -> None:
    """Hold one machine to its share until it is gone."""
    parser = argparse.ArgumentParser(description="Holds a machine to a share of the processors.")
    parser.add_argument("--machine", required=True, help="its name")
    parser.add_argument("--pid", type=int, required=True, help="its process")
    parser.add_argument("--processors", type=float, required=True, help="that it may use on average")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    regulate(options.pid, options.processors)


if __name__ == "__main__":
    main()
