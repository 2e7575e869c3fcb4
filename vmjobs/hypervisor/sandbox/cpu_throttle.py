"""Throttles a VM to a share of the processors without a cgroup: stops it at times.

It runs as a process of its own, without agent or packages; a VM that loses it is killed. ::

    python -m vmjobs.hypervisor.sandbox.cpu_throttle --machine NAME --pid PID --processors SHARE

Signals stop and continue the VM's main process. A UML kernel runs its guest's programs as child
processes that it traces, or that wait for it (``seccomp=on``). SIGSTOP must not stop those: the kernel
takes a signal that it did not send for a fault of its own. But it sends them SIGALRM when a program's
time slice is over. So a child that gets SIGALRM while its kernel is stopped waits for it, and the
kernel then continues with another child, or the same.
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

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs

#: Seconds that a VM rests at a time, or longer while it is in debt; also the interval of checks.
PERIOD = 0.1
#: Capacity of the bucket, in seconds' worth: more than one rest, as a busy node reacts late.
BURST_SECONDS = 0.5
#: Least seconds that a VM runs at a time: stopping it takes up to one tick of its clock.
SHORTEST_RUN = 0.005
#: Seconds in which a process must stop.
HALT_SECONDS = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ThrottleStep:
    """Whether the VM is to run, and the seconds until the next check."""

    runs: bool
    seconds: float


class CpuAllowance:
    """Decides when a VM may run, from its usage, by a token bucket. Pure but for the clock.

    A VM may overdraw its bucket: it pays the debt before it runs again.

    share: processors that it may use on average.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        #: Processor seconds in the bucket; negative: a debt.
        self._level, self._updated = share * BURST_SECONDS, clock()
        self._used: float | None = None

    def next_step(self, used: float) -> ThrottleStep:
        """Return the next step. used: processor seconds; the first call's are free."""
        before = used if self._used is None else self._used
        self._used = max(used, before)
        now = self._clock()
        filled = self._level + (now - self._updated) * self._share
        self._level = min(filled, self._share * BURST_SECONDS) - (self._used - before)
        self._updated = now
        if self._level <= 0:
            return ThrottleStep(runs=False, seconds=PERIOD - self._level / self._share)
        return ThrottleStep(runs=True, seconds=max(SHORTEST_RUN, min(PERIOD, self._level)))


class ThrottledProcess:
    """A VM's main process. Raises ``OSError`` or ``HypervisorError`` on failure."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.handle = os.pidfd_open(pid)

    def stop(self) -> None:
        """Stop it, and its guest's programs."""
        deadline = time.monotonic() + HALT_SECONDS
        while True:
            # Repeatedly: others may pause and resume it while it is stopped here.
            signal.pidfd_send_signal(self.handle, signal.SIGSTOP)
            process = procs.read(self.pid)
            if process is None or process.stopped:
                break
            if time.monotonic() > deadline:
                raise HypervisorError(f"process {self.pid} does not stop")
            os.sched_yield()
        tracer = 0 if process is not None and "seccomp=on" in process.argv else self.pid
        for child in procs.children(self.pid):
            if _runs_guest_code(child, tracer):
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGALRM)

    def resume(self) -> None:
        signal.pidfd_send_signal(self.handle, signal.SIGCONT)

    def has_ended(self, timeout: float) -> bool:
        """Whether it has ended; wait up to ``timeout`` seconds for that."""
        return procs.readable([self.handle], timeout) != []


def _runs_guest_code(pid: int, tracer: int) -> bool:
    """Whether a process runs the guest's code, instead of reporting to its kernel.

    tracer: the tracing process; 0: it is not traced, and sleeps while it waits for the kernel.
    """
    try:
        status = procs.status_fields(pid)
    except OSError:
        return False
    return status["TracerPid"] == str(tracer) and status["State"][0] in ("RSD" if tracer else "R")


def throttle(pid: int, share: float) -> None:
    """Throttle process ``pid`` and its children to ``share`` processors until it ends.

    Raises:
        OSError, HypervisorError: it cannot be stopped or continued.
    """
    throttled, allowance, runs = ThrottledProcess(pid), CpuAllowance(share), True
    while True:
        next_step = allowance.next_step(processor_seconds(pid) + time.process_time())
        try:
            if not next_step.runs:
                throttled.stop()  # even if stopped: others may have resumed it meanwhile
            elif not runs:
                throttled.resume()
        except (OSError, HypervisorError):
            if not throttled.has_ended(0.0):
                raise
        runs = next_step.runs
        if throttled.has_ended(next_step.seconds):
            return


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process, its children, and its reaped children."""
    return (
        _own_seconds(pid)
        + sum(_own_seconds(child) for child in procs.children(pid))
        + _reaped_seconds(pid)
    )


def _own_seconds(pid: int) -> float:
    with suppress(OSError):  # it has ended
        return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) computes it
    return 0.0


def _reaped_seconds(pid: int) -> float:
    with suppress(OSError):
        return sum(map(int, procs.stat_fields(pid)[13:15])) / _TICKS
    return 0.0


# --------------------------------------------------------------------------- the process


def main() -> None:
    parser = argparse.ArgumentParser(description="Throttles a VM to a share of the processors.")
    parser.add_argument("--machine", required=True, help="name of the VM")
    parser.add_argument("--pid", type=int, required=True, help="process of the VM")
    parser.add_argument("--processors", type=float, required=True, help="average that it may use")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    throttle(options.pid, options.processors)


if __name__ == "__main__":
    main()
