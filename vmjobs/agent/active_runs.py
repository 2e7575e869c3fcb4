"""The runs of this agent, each from its start until its VM is gone."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vmjobs.agent import protocol
from vmjobs.agent.background import start_thread
from vmjobs.agent.condor_job.job_access import JobAccess
from vmjobs.agent.framing import DataMessage
from vmjobs.agent.lease import SocketLease
from vmjobs.agent.run.state import Run
from vmjobs.agent.vm.events import EventQueue, LeaseLost, SaveRequested, SignalSent
from vmjobs.errors import Forbidden, InvalidRequest, Unavailable, VMJobsError
from vmjobs.model import JobState

log = logging.getLogger(__name__)

#: Seconds to wait for the removal of the earlier VM of a job that starts again.
REMOVAL_SECONDS = 60.0
STOPPING_MESSAGE = "this agent is stopping"


@dataclass(eq=False)
class ActiveRun:
    """A run of this agent.

    name: of the job on this node. uid: user id of its client. run: None until it begins.
    condor_id: HTCondor's id of a transparent job. job_access: to the VM of one, until the VM is gone.
    disconnected: the client has. has_received: the client has confirmed receipt of the results.
    """

    name: str
    uid: int
    lease: SocketLease
    condor_id: str = ""
    job_access: JobAccess | None = None
    run: Run | None = None
    event_queue: EventQueue = field(default_factory=EventQueue)
    disconnected: threading.Event = field(default_factory=threading.Event)
    has_received: bool = False

    def watch_client(
        self,
        messages: Iterator[protocol.Message],
        take: Callable[[DataMessage], object] | None = None,
    ) -> None:
        """Turn the client's messages and its disconnecting into events. take: receives ``data``."""
        start_thread("lease", self._read_messages, messages, take)

    def wait_received(self) -> bool:
        """Wait until the client disconnects; return whether it confirmed receipt of the results."""
        self.disconnected.wait()
        return self.has_received

    def _read_messages(
        self,
        messages: Iterator[protocol.Message],
        take: Callable[[DataMessage], object] | None,
    ) -> None:
        try:
            for message in messages:
                if isinstance(message, protocol.SignalMessage):
                    self.event_queue.put(SignalSent(message.number))
                elif isinstance(message, DataMessage) and take is not None:
                    take(message)
                elif isinstance(message, protocol.ResultsReceivedMessage):
                    self.has_received = True
        except (OSError, ValueError, VMJobsError) as error:
            log.info("lease: %s", error)
        finally:
            self.event_queue.put(LeaseLost())
            self.disconnected.set()


class ActiveRuns:
    """All runs of this agent, by name, and the memory reserved for transparent jobs. Thread-safe."""

    def __init__(self) -> None:
        self._runs: dict[str, ActiveRun] = {}
        self._reserved: dict[str, int] = {}
        self.is_stopping = False
        self._changed = threading.Condition()

    # ------------------------------------------------------------------ admission

    @contextmanager
    def reserve_memory(self, name: str, memory: int, limit: int) -> Iterator[None]:
        """Reserve memory (MiB) for a slot's only VM, within the limit for all slots of the node.

        Raises:
            InvalidRequest: the node never has so much. Unavailable: it has less now.
        """
        with self._changed:
            if name in self._reserved:
                raise Unavailable("agent", "an earlier VM of this slot is still being removed")
            if memory > limit:
                raise InvalidRequest(f"the job asks for {memory} MiB of memory, this node has {limit}")
            if memory + sum(self._reserved.values()) > limit:
                raise Unavailable("agent", f"other VMs of this node use its {limit} MiB of memory")
            self._reserved[name] = memory
        try:
            yield
        finally:
            with self._changed:
                del self._reserved[name]

    def await_removal(self, condor_id: str, uid: int) -> None:
        """Wait until a job's earlier VM is gone: if a starter dies, its job restarts at once.

        A job of another schedd may have the same id; while its lease is held, it is not waited for.

        Raises:
            Unavailable: the VM is not gone in time.
        """

        def is_removed() -> bool:
            same = [run for run in self._runs.values() if (run.condor_id, run.uid) == (condor_id, uid)]
            return not any(run.disconnected.is_set() for run in same)

        with self._changed:
            if not self._changed.wait_for(is_removed, REMOVAL_SECONDS):
                raise Unavailable("agent", f"an earlier run of job {condor_id} is still being removed")

    @contextmanager
    def register(self, active: ActiveRun) -> Iterator[None]:
        """Have a run among the active ones while the context lasts.

        Raises:
            Unavailable: the agent is stopping, or the job's earlier run is active.
        """
        with self._changed:
            if self.is_stopping:
                raise Unavailable("agent", STOPPING_MESSAGE)
            if active.name in self._runs:
                raise Unavailable(
                    "agent", f"an earlier run of job {active.name} is still being removed"
                )
            self._runs[active.name] = active
        try:
            yield
        finally:
            with self._changed:
                del self._runs[active.name]
                self._changed.notify_all()

    # ------------------------------------------------------------------ state

    def names(self, uid: int | None = None) -> tuple[str, ...]:
        """Return the names of the jobs: of all, or of those that ``uid`` may see."""
        everything = uid is None or uid in (0, os.getuid())
        with self._changed:
            return tuple(run.name for run in self._runs.values() if everything or run.uid == uid)

    def states(self) -> Counter[JobState | None]:
        """Return the number of jobs by state as last reported; None: those without any report."""
        with self._changed:
            last = [run.lease.last for run in self._runs.values()]
        return Counter(report.state if report else None for report in last)

    def lent_memory(self) -> int:
        """Return the MiB of memory of all VMs; of a transparent job: while it is reserved."""
        with self._changed:
            runs = [(active.name, active.run) for active in self._runs.values()]
            used = {name: run.spec.memory for name, run in runs if run and run.claimed}
            return sum((used | self._reserved).values())

    # ------------------------------------------------------------------ access to a job's VM

    def access(self, name: str, uid: int) -> JobAccess:
        """Return the access to the VM of a user's job.

        Raises:
            Forbidden: the job has no VM, or is another user's.
        """
        with self._changed:
            active = self._runs.get(name)
            if active is None or active.job_access is None or active.uid != uid:
                raise Forbidden("this job has no running VM on this node now")
            return active.job_access

    def end_access(self, active: ActiveRun) -> None:
        """End the access to a job's VM, which is gone."""
        with self._changed:
            active.job_access = None
            self._changed.notify_all()

    def wait_for_end(self, name: str, job_access: JobAccess, seconds: float) -> bool:
        """Wait for the end of an access for at most so many seconds; return whether it has ended."""

        def is_over() -> bool:
            active = self._runs.get(name)
            return active is None or active.job_access is not job_access

        with self._changed:
            return self._changed.wait_for(is_over, seconds)

    # ------------------------------------------------------------------ stop

    def stop(self, patience: float, saving: float) -> None:
        """End all runs; their VMs are gone on return, unless the time limits were exceeded.

        patience: seconds for VMs that are only stopped. saving: for those that can be saved.
        """
        with self._changed:
            self.is_stopping = True
            saved = [
                active
                for active in self._runs.values()
                if active.run and active.run.control.checkpointable
            ]
            for active in saved:
                active.event_queue.put(SaveRequested())
            self._changed.wait_for(
                lambda: not any(active.name in self._runs for active in saved), saving
            )
            for active in self._runs.values():
                active.event_queue.put(LeaseLost())
            self._changed.wait_for(lambda: not self._runs, patience)
