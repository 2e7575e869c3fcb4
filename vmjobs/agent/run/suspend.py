"""Suspends the VM of a job whose processes HTCondor has stopped, and resumes it with them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmjobs.agent.guest.guest_loop import guest_loop, in_loop
from vmjobs.agent.run.state import Run
from vmjobs.errors import HypervisorError

log = logging.getLogger(__name__)

#: Seconds between two checks of the jobs' processes: no event reports that another's child stopped.
CHECK_SECONDS: Final = 0.5


class ClientProcess:
    """The process that started a run. Its files stay open, so that a check costs little."""

    def __init__(
        self, pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._handles: list[int] = []
        self._stat = self._open(proc / str(pid) / "stat")
        self._events = None
        with suppress(OSError):
            for line in (proc / str(pid) / "cgroup").read_text("utf-8", "replace").splitlines():
                if line.startswith("0::/"):
                    self._events = self._open(cgroups / line[4:] / "cgroup.events")

    def _open(self, path: Path) -> int | None:
        with suppress(OSError):  # it is gone, or there are no such cgroups
            self._handles.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            return self._handles[-1]
        return None

    def stopped(self) -> bool:
        """Whether a signal has stopped it (proc(5), ``state``) or its cgroup (v2) is frozen.

        HTCondor does either, depending on how it tracks a job's processes.
        """
        _, _, state = _content(self._stat).rpartition(b") ")
        return state.startswith(b"T") or b"frozen 1" in _content(self._events).splitlines()

    def close(self) -> None:
        for handle in self._handles:
            os.close(handle)


def _content(handle: int | None) -> bytes:
    if handle is not None:
        with suppress(OSError):  # the process is gone
            return os.pread(handle, 4096, 0)
    return b""


@contextmanager
def suspending(run: Run, pid: int) -> Iterator[None]:
    """Within the context, suspend the run's VM while the process is stopped.

    Only while the job itself runs: booting and collecting are short and have deadlines.
    """
    suspension = _Suspension(run, ClientProcess(pid))
    in_loop(_ALL.add(suspension))
    try:
        yield
    finally:
        in_loop(_ALL.remove(suspension))
        suspension.client.close()


@dataclass
class _Suspension:
    """One run's suspension.

    suspend_requested: it may have happened even if the driver reported a failure. is_suspended: the VM
    is. request: the one that is under way.
    """

    run: Run
    client: ClientProcess
    suspend_requested: bool = False
    is_suspended: bool = False
    request: asyncio.Future[None] | None = None

    def update(self) -> None:
        """Suspend or resume the VM with the process; in another thread, because it may take long."""
        if self.suspend_requested:
            self.run.vm.guest_session.heard = time.monotonic()  # a suspended guest sends no heartbeat
        if self.request is not None and not self.request.done():
            return
        stopped = self.client.stopped()
        if stopped and not self.is_suspended and self.run.control.suspendable:
            self.request = guest_loop().run_in_executor(None, self._run_action, self._pause)
        elif self.suspend_requested and not stopped:
            self.request = guest_loop().run_in_executor(None, self._run_action, self._resume)

    def _run_action(self, action: Callable[[], None]) -> None:
        try:
            action()
        except HypervisorError as error:  # for example, it is ending
            log.warning("job %s: %s", self.run.request.job_id, error)

    def _pause(self) -> None:
        run, vm = self.run, self.run.vm
        self.suspend_requested = True
        vm.driver.pause(vm.name)
        self.is_suspended = True
        run.clock.suspend()
        log.info("job %s is suspended", run.request.job_id)

    def _resume(self) -> None:
        run, vm = self.run, self.run.vm
        vm.driver.resume(vm.name)
        if self.is_suspended:
            run.clock.resume()
        self.suspend_requested = self.is_suspended = False
        log.info("job %s goes on", run.request.job_id)


class _Suspensions:
    """The suspensions of all runs, checked in the guests' event loop."""

    def __init__(self) -> None:
        self._all: list[_Suspension] = []
        self._checking: asyncio.Task[None] | None = None

    async def add(self, suspension: _Suspension) -> None:
        self._all.append(suspension)
        if self._checking is None:
            self._checking = guest_loop().create_task(self._check_all())

    async def remove(self, suspension: _Suspension) -> None:
        """Stop checking it, after the request that is under way."""
        self._all.remove(suspension)
        if suspension.request is not None:
            await asyncio.wait([suspension.request], timeout=10 * CHECK_SECONDS)

    async def _check_all(self) -> None:
        while self._all:
            await asyncio.sleep(CHECK_SECONDS)
            for suspension in self._all:
                suspension.update()
        self._checking = None


_ALL: Final = _Suspensions()
