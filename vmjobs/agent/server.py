"""The agent: accepts jobs over its socket and runs each in a VM.

Each connection has a thread, and is the lease of the run that it started.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import disk_usage

from vmjobs.agent import console_stream, protocol
from vmjobs.agent.background import start_thread
from vmjobs.agent.checks import MIN_FREE_BYTES, FaultCause
from vmjobs.agent.condor_job import checkpoints
from vmjobs.agent.condor_job.checkpoints import CheckpointStores, StartPoint
from vmjobs.agent.condor_job.condor_job import receive_job
from vmjobs.agent.condor_job.job_access import JobAccess
from vmjobs.agent.condor_job.starter import StarterProcess, effective_uid, read_starter
from vmjobs.agent.framing import DataMessage
from vmjobs.agent.journal import InterruptedRun
from vmjobs.agent.node_health import FAILURE_LIMIT, NodeHealth
from vmjobs.agent.run.events import EventQueue, LeaseLost, SaveRequested, SignalSent
from vmjobs.agent.run.job_run import ReportUndelivered, Run, RunServices
from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.agent.run.suspend import suspending
from vmjobs.errors import (
    AttemptSuperseded,
    ConfigError,
    Conflict,
    Forbidden,
    InvalidRequest,
    JobFinal,
    StorageFull,
    Unauthenticated,
    Unavailable,
    VMJobsError,
    reason_of,
)
from vmjobs.model import MIB, REQUEUE_REASONS, JobState, Node, ReasonCode, RejectedEntry, Report
from vmjobs.ports import JobSource

log = logging.getLogger(__name__)

BACKLOG = 128
#: Seconds that a client has to send its request.
REQUEST_SECONDS = 30.0
#: Connections of one user: each takes a thread, and threads are limited.
MAX_USER_CONNECTIONS = 1024
#: A console viewer that reads nothing for so many seconds is disconnected.
CONSOLE_SEND_SECONDS = 60.0
_STOPPING_MESSAGE = "this agent is stopping"
#: Seconds for saving VMs when the agent stops: as HTCondor gives jobs to vacate.
SAVE_SECONDS = 600.0
#: Seconds to wait for the removal of the earlier VM of a job that starts again.
REMOVAL_SECONDS = 60.0
#: Characters of the node's reason for accepting no jobs.
MAX_FAULT_CHARACTERS = 1024
#: Longest path that fits into ``sun_path`` (unix(7)).
MAX_SOCKET_PATH_BYTES = 107


@dataclass(eq=False)
class SocketLease:
    """The client's end of a connection. After the client disconnects nothing more is sent."""

    connection: socket.socket
    node: str
    last: Report | None = None
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def progress(self, report: Report) -> None:
        """Forward a report, without its rejected outputs: a long list, only for the repository."""
        self.last = report.model_copy(update={"rejected": ()})
        self.send(protocol.ProgressMessage(node=self.node, report=self.last))

    def end(
        self,
        outcome: RunOutcome,
        ended: str = "",
        needs: protocol.ImageRequirements | None = None,
        rejected: tuple[RejectedEntry, ...] = (),
    ) -> None:
        """Send the end of the job.

        ended, needs: as in ``EndMessage``. rejected: outputs that a transparent job does not get back.
        """
        if self.last is not None:
            report, code = self.last.model_copy(update={"rejected": rejected}), outcome.exit_code
            self.send(
                protocol.EndMessage(
                    node=self.node, exit_code=code, report=report, ended=ended, needs=needs
                )
            )

    def send(self, message: protocol.Message) -> None:
        """Send a message; ignore a client that has disconnected."""
        try:
            with self._sending:  # different threads send the job's output and its progress
                protocol.send(self.connection, message)
        except OSError as error:
            log.info("the client has disconnected: %s", error)


@dataclass(frozen=True)
class CondorJobServices:
    """This node's services for transparent jobs.

    spool: directory for their files. memory: of all of them together, in MiB.
    resolve: returns the digest of a public image, from its name.
    slot_of: returns the id of a process's starter, from the process's id.
    stores: for checkpoints; None: no VM is saved.
    """

    spool: Path
    memory: int
    resolve: Callable[[str], str]
    slot_of: Callable[[int], int]
    stores: CheckpointStores | None = None

    def begin(self, message: protocol.SubmitMessage, attempt: str, slot: StarterProcess) -> StartPoint:
        """Return where a transparent job starts. slot: its starter.

        Raises:
            Forbidden: this node stores no checkpoints. Others: as ``find_start_point``.
        """
        if not message.checkpoint:
            return StartPoint(message, self.resolve(message.image))
        if self.stores is None:
            raise Forbidden("this node has no repository to save VMs to")
        return checkpoints.find_start_point(message, attempt, self.resolve, self.stores, slot)


@dataclass
class Agent:
    """All runs of this node.

    open_job: returns the repository's view of one job, from job id and job token.
    describe: returns this node, with the given jobs as the running ones.
    condor_jobs: for transparent jobs; None: this node runs none.
    health: of this node, from its recent jobs. checks: returns its faults, by cause.
    """

    services: RunServices
    open_job: Callable[[str, str], JobSource]
    describe: Callable[[tuple[str, ...]], Node]
    condor_jobs: CondorJobServices | None = None
    health: NodeHealth = field(default_factory=NodeHealth)
    checks: Callable[[], Mapping[FaultCause, str]] = dict
    running: dict[str, int] = field(default_factory=dict)
    interrupted_runs: dict[str, InterruptedRun] = field(default_factory=dict)
    _event_queues: dict[str, EventQueue] = field(default_factory=dict)
    _runs: dict[str, Run] = field(default_factory=dict)
    _memory: dict[str, int] = field(default_factory=dict)
    _leases: dict[str, SocketLease] = field(default_factory=dict)
    _job_accesses: dict[str, JobAccess] = field(default_factory=dict)
    #: Of transparent jobs: HTCondor's id and the user id of each, and its client.
    _condor_clients: dict[str, tuple[tuple[str, int], RunClient]] = field(default_factory=dict)
    _subscribers: dict[SocketLease, int] = field(default_factory=dict)
    _connection_counts: Counter[int] = field(default_factory=Counter)
    _stopping: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self._ended = threading.Condition(self._lock)

    def keep_interrupted_runs(self, leftovers: list[InterruptedRun]) -> None:
        """Keep outcomes of an earlier agent's runs, which may not have been reported."""
        self.interrupted_runs = {left.record.job: left for left in leftovers if left.outcome}

    def jobs(self, uid: int | None = None) -> tuple[str, ...]:
        """Return the running jobs: all, or those that ``uid`` may see."""
        everything = uid is None or uid in (0, os.getuid())
        with self._lock:
            return tuple(job for job, owner in self.running.items() if everything or owner == uid)

    def states(self) -> Counter[JobState | None]:
        """Return the number of jobs by state as last reported; None: those without any report."""
        with self._lock:
            last = [lease.last for lease in self._leases.values()]
        return Counter(report.state if report else None for report in last)

    def serve(self, connection: socket.socket) -> None:
        """Serve one client until it disconnects."""
        peer = protocol.peer_credentials(connection)
        lease = SocketLease(connection, self.services.settings.node)
        try:
            with self._count_connection(peer.uid):
                connection.settimeout(REQUEST_SECONDS)
                self._serve_requests(lease, peer)
        except VMJobsError as error:
            send_error(lease, error, retry=isinstance(error, Unavailable))
        except OSError as error:
            log.info("connection of uid %d: %s", peer.uid, error)
        finally:
            self._subscribers.pop(lease, None)
            with suppress(OSError):  # the client may have disconnected
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _serve_requests(self, lease: SocketLease, peer: protocol.PeerCredentials) -> None:
        messages = protocol.receive(lease.connection)
        for message in messages:
            if isinstance(message, protocol.StatusMessage):
                if self._stopping:  # otherwise the node would continue to attract jobs
                    raise Unavailable("agent", _STOPPING_MESSAGE)
                self._subscribers[lease] = peer.uid
                self._describe_to(lease, peer.uid)
            elif isinstance(message, protocol.RunMessage):
                lease.connection.settimeout(None)
                self._run(message, lease, peer, messages)
                return
            elif isinstance(message, protocol.SubmitMessage):
                self._run_condor_job(message, lease, peer, messages)
                return
            elif isinstance(message, protocol.EnterMessage):
                self._open_shell(message, lease, peer, messages)
                return
            elif isinstance(message, protocol.ConsoleMessage):
                self._show_console(message, lease, peer)
                return

    @contextmanager
    def _count_connection(self, uid: int) -> Iterator[None]:
        """Count a user's connection; reject it if the user has too many."""
        with self._lock:
            if self._connection_counts[uid] >= MAX_USER_CONNECTIONS:
                raise Unavailable("agent", f"uid {uid} has {MAX_USER_CONNECTIONS} connections already")
            self._connection_counts[uid] += 1
        try:
            yield
        finally:
            with self._lock:
                self._connection_counts[uid] -= 1
                self._connection_counts += Counter()  # removes users without connections

    def notify_subscribers(self) -> None:
        """Send the node's changed state at once to all clients that have asked for it."""
        for lease, uid in list(self._subscribers.items()):
            self._describe_to(lease, uid)

    def _describe_to(self, lease: SocketLease, uid: int) -> None:
        lease.send(protocol.StatusMessage(node=self.node(uid)))

    def node(self, uid: int | None = None) -> Node:
        """Return the node's present state, with its jobs that ``uid`` may see, or all."""
        with self._lock:
            runs = {job: run.ticket.spec.memory for job, run in self._runs.items() if run.claimed}
            lent = sum((runs | self._memory).values())  # of a transparent job: while it is reserved
        known = {"lent": lent, "fault": "; ".join(self.faults().values())[:MAX_FAULT_CHARACTERS]}
        return self.describe(self.jobs(uid)).model_copy(update=known)

    def faults(self) -> dict[FaultCause, str]:
        """Return why the node accepts no jobs now, one sentence for each cause."""
        pause = self.health.fault()
        return {**self.checks(), **({FaultCause.JOBS: pause} if pause else {})}

    def stop(self, patience: float, saving: float = SAVE_SECONDS) -> None:
        """End all runs; their VMs are gone on return, unless the time limits were exceeded.

        patience: seconds for VMs that are only stopped. saving: for those that can be saved.
        """
        with self._ended:
            self._stopping = True
            saved = [job for job, run in self._runs.items() if run.checkpointable]
            for job in saved:
                self._event_queues[job].put(SaveRequested())
            self._ended.wait_for(lambda: not any(job in self.running for job in saved), saving)
            for event_queue in self._event_queues.values():
                event_queue.put(LeaseLost())
            self._ended.wait_for(lambda: not self.running, patience)

    def _run(
        self,
        message: protocol.RunMessage,
        lease: SocketLease,
        peer: protocol.PeerCredentials,
        messages: Iterator[protocol.Message],
    ) -> None:
        with self._report_errors(message.job, lease):
            if why := self._why_not_allowed(peer):
                code = ReasonCode.NODE_FAILED.value  # perhaps the settings: another node may run it
                lease.send(protocol.ErrorMessage(code=code, message=why, retry=False))
                return
            source = self.open_job(message.job, message.token)
            with suppress(Conflict):  # not ended yet; the answer itself proves that the token is valid
                source.end()
            with self._register_run(message.job, peer.uid, lease) as event_queue:
                outcome = self._earlier_outcome(message.job, source, lease)
                if outcome is None:
                    _watch_client(messages, event_queue)
                    run = Run(source, lease, self.services, message.job, uuid.uuid4().hex, event_queue)
                    run.on_usage = lease.progress
                    with self._lock:
                        self._runs[message.job] = run
                    try:
                        with suspending(run, peer.pid):
                            outcome = run.execute()
                    except JobFinal:
                        outcome = self._outcome_at_repository(message.job, source, lease)
                    else:
                        self._update_node_health(run, outcome)
            lease.end(outcome)

    def _run_condor_job(
        self,
        message: protocol.SubmitMessage,
        lease: SocketLease,
        peer: protocol.PeerCredentials,
        messages: Iterator[protocol.Message],
    ) -> None:
        with self._report_errors(message.job, lease):
            condor_jobs, slot = self._find_slot(peer)
            name = _job_name(slot)
            with (
                self._reserve_memory(name, message.memory, condor_jobs.memory),
                receive_job(message, name, peer, condor_jobs.spool, messages) as job,
                ExitStack() as stack,
            ):
                lease.connection.settimeout(None)  # a client may stall only after the submission
                attempt = uuid.uuid4().hex
                try:
                    start_point = condor_jobs.begin(message, attempt, slot)
                except Unauthenticated:  # the node's own token is invalid: other jobs fail, too
                    self.health.count_failure()
                    raise
                stack.callback(start_point.close)
                job_access = JobAccess(message, lease.send, start_point.door)
                called = message.job, peer.uid
                self._await_removal(called)
                with self._register_run(name, peer.uid, lease, job_access) as event_queue:
                    log.info("%s is job %s of uid %d", name, message.job, peer.uid)
                    client = _watch_client(messages, event_queue, job_access.take)
                    self._condor_clients[name] = called, client
                    source = job.source(start_point, lease.send, job_access)
                    max_log = source.spec.disk * MIB
                    settings = replace(
                        self.services.settings, max_log=max_log, script_handles_stop=True
                    )
                    services = replace(self.services, settings=settings)
                    run = Run(
                        source, lease, services, name, attempt, event_queue, job_access.port_handlers
                    )
                    run.on_usage, run.remark = lease.progress, start_point.remark
                    run.shut, job_access.console = job_access.shut, run.console
                    with self._lock:
                        self._runs[name] = run
                    with suspending(run, peer.pid):
                        outcome = run.execute()
                    self._end_access(name)
                    self._update_node_health(run, outcome)
                    # A stopping agent waits for this, too.
                    job.send_outputs(lease.send)
                    lease.end(
                        outcome, job.ended(), _image_requirements(run, message.image), job.rejected()
                    )
                    if message.checkpoint and client.wait_received():
                        start_point.remove_checkpoint()

    def _open_shell(
        self,
        message: protocol.EnterMessage,
        lease: SocketLease,
        peer: protocol.PeerCredentials,
        messages: Iterator[protocol.Message],
    ) -> None:
        name, job_access = self._job_of(peer)
        log.info("%s: uid %d opens a shell", name, peer.uid)
        lease.connection.settimeout(None)
        job_access.run_session(message, lease.connection, lease.send, messages)

    def _show_console(
        self, message: protocol.ConsoleMessage, lease: SocketLease, peer: protocol.PeerCredentials
    ) -> None:
        name, job_access = self._job_of(peer)

        def over(seconds: float) -> bool:
            with self._ended:
                return self._ended.wait_for(
                    lambda: self._job_accesses.get(name) is not job_access, seconds
                )

        lease.connection.settimeout(CONSOLE_SEND_SECONDS)
        with job_access.counted_session():
            console_stream.send_console(lease.connection, job_access.console, message, over)

    def _update_node_health(self, run: Run, outcome: RunOutcome) -> None:
        """Update the node's health; after several failed boots in a row, probe the hypervisor."""
        if outcome.reason.code is ReasonCode.NODE_FAILED and not outcome.node_at_fault:
            self._note_full_disk()
        if self.health.count_run(outcome) and self.services.reprobe is not None:
            kind = run.driver.kind
            log.warning("%s VMs in a row did not boot: probing %s", FAILURE_LIMIT, kind)
            start_thread("recheck", self.services.reprobe, kind)

    def _note_full_disk(self) -> None:
        """Count a node failure if the disk is too full for any job, not just for a large one."""
        if (
            self.condor_jobs is not None
            and disk_usage(self.condor_jobs.spool.parent).free < MIN_FREE_BYTES
        ):
            self.health.count_failure()

    def _end_access(self, name: str) -> None:
        """End the access to a job's VM, which is gone."""
        with self._ended:
            self._job_accesses.pop(name, None)
            self._ended.notify_all()

    def _job_of(self, peer: protocol.PeerCredentials) -> tuple[str, JobAccess]:
        """Return the name of the job that the client belongs to, and the access to its VM."""
        name = _job_name(self._find_slot(peer)[1])
        with self._lock:
            job_access = self._job_accesses.get(name)
            if job_access is None or self.running.get(name) != peer.uid:
                raise Forbidden("this job has no running VM on this node now")
        return name, job_access

    def _why_not_allowed(self, peer: protocol.PeerCredentials) -> str:
        """Return why a client may not start jobs; empty: it may, as root and the agent's user."""
        if self.condor_jobs is None or peer.uid in (0, os.getuid()):
            return ""
        try:
            self._find_slot(peer)
        except Forbidden as error:
            return f"{error.message}; starters run as root or as the user of the setting condor_user"
        return ""

    def _find_slot(self, peer: protocol.PeerCredentials) -> tuple[CondorJobServices, StarterProcess]:
        """Return the services for transparent jobs, and the starter that the client descends from."""
        if self.condor_jobs is None:
            raise Forbidden("this node accepts only jobs of the repository")
        if effective_uid(peer.pid) != peer.uid:  # the process has ended, and its id may be reused
            raise Forbidden("the peer process has exited")
        return self.condor_jobs, read_starter(self.condor_jobs.slot_of(peer.pid))

    @contextmanager
    def _reserve_memory(self, name: str, memory: int, limit: int) -> Iterator[None]:
        """Reserve memory for a slot's only VM, within the limit for all slots of the node."""
        with self._lock:
            if name in self._memory:
                raise Unavailable("agent", "an earlier VM of this slot is still being removed")
            if memory > limit:
                raise InvalidRequest(f"the job asks for {memory} MiB of memory, this node has {limit}")
            if memory + sum(self._memory.values()) > limit:
                raise Unavailable("agent", f"other VMs of this node use its {limit} MiB of memory")
            self._memory[name] = memory
        try:
            yield
        finally:
            with self._lock:
                del self._memory[name]

    @contextmanager
    def _report_errors(self, job: str, lease: SocketLease) -> Iterator[None]:
        """Report errors of the context to the client that asked for the job."""
        try:
            yield
        except ReportUndelivered as undelivered:
            log.error("job %s: %s; the job's next run delivers it", job, undelivered)
            self.interrupted_runs[job] = undelivered.left
            send_error(lease, undelivered, retry=True)
        except VMJobsError as error:
            log.warning("job %s: %s", job, error)
            if isinstance(error, StorageFull):
                self._note_full_disk()
            send_error(lease, error, retry=isinstance(error, Unavailable))
        except OSError as error:
            log.exception("job %s failed on this node", job)
            self._note_full_disk()
            lease.send(_node_error(error))
        except Exception as error:
            log.exception("job %s", job)
            fault = VMJobsError(f"the agent failed: {type(error).__name__}")
            send_error(lease, fault, retry=False)

    def _earlier_outcome(self, job: str, source: JobSource, lease: SocketLease) -> RunOutcome | None:
        """Report the outcome of an earlier run, which may be undelivered; None: run the job anew."""
        left = self.interrupted_runs.get(job)
        if left is None:
            return None
        report = Report.model_validate_json(left.outcome)
        # A stopped job runs again here; one that this node failed is requeued.
        anew = report.state is JobState.PREEMPTED and report.reason.code not in REQUEUE_REASONS
        if not anew:
            try:
                source.resume(left.record.attempt)
                source.report(report)
            except JobFinal:
                self.interrupted_runs.pop(job, None)
                return self._outcome_at_repository(job, source, lease)
            except AttemptSuperseded:
                log.info("job %s: a later attempt has superseded the earlier run", job)
                anew = True
            except Conflict:
                log.info("job %s: its final report was delivered before", job)
        self.interrupted_runs.pop(job, None)
        if anew:
            return None
        lease.progress(report)
        return RunOutcome(report.state, report.reason, report.exit)

    def _outcome_at_repository(self, job: str, source: JobSource, lease: SocketLease) -> RunOutcome:
        """Return the outcome of an ended job whose scheduler missed the end, and starts it again."""
        report = source.end()
        log.info("job %s has ended before: it is %s", job, report.state)
        if report.state is JobState.CANCELED:  # the scheduler shall remove it, not see it end
            raise Unavailable("agent", f"job {job} is canceled and will be removed")
        lease.progress(report)
        return RunOutcome(report.state, report.reason, report.exit)

    @contextmanager
    def _register_run(
        self, job: str, uid: int, lease: SocketLease, job_access: JobAccess | None = None
    ) -> Iterator[EventQueue]:
        event_queue = EventQueue()
        with self._lock:
            if self._stopping:
                raise Unavailable("agent", _STOPPING_MESSAGE)
            if job in self.running:
                raise Unavailable("agent", f"an earlier run of job {job} is still being removed")
            self.running[job], self._event_queues[job], self._leases[job] = uid, event_queue, lease
            if job_access is not None:
                self._job_accesses[job] = job_access
        try:
            yield event_queue
        finally:
            with self._ended:
                del self.running[job], self._event_queues[job], self._leases[job]
                self._job_accesses.pop(job, None)
                self._runs.pop(job, None)
                self._condor_clients.pop(job, None)
                self._ended.notify_all()

    def _await_removal(self, called: tuple[str, int]) -> None:
        """Wait until a job's earlier VM is gone: if a starter dies, its job restarts at once.

        A job of another schedd may have the same id; while its lease is held, it is not waited for.
        """

        def is_removed() -> bool:
            clients = self._condor_clients.values()
            return not any(of == called and client.disconnected.is_set() for of, client in clients)

        with self._ended:
            if not self._ended.wait_for(is_removed, REMOVAL_SECONDS):
                raise Unavailable("agent", f"an earlier run of job {called[0]} is still being removed")


def _job_name(slot: StarterProcess) -> str:
    """Return the agent's name for a slot's job; a ``run`` message cannot contain it."""
    return f"condor.{slot.pid}"


def send_error(lease: SocketLease, error: VMJobsError, *, retry: bool) -> None:
    """Send the reason why a job is not run, with the errors in its request."""
    faults = {fault.field: fault.message for fault in error.faults} or None
    lease.send(
        protocol.ErrorMessage(code=error.code, message=error.message, retry=retry, faults=faults)
    )


def _image_requirements(run: Run, named: str) -> protocol.ImageRequirements | None:
    """Return the image's requirements if no hypervisor here boots it. named: as the job does.

    None, too, if the job excludes all hypervisors that boot the image: only its user can correct that.
    """
    image = run.unbootable
    if image is None:
        return None
    able = [kind for kind in image.kinds if kind in run.ticket.spec.kinds]
    if not able:
        return None
    return protocol.ImageRequirements(named=named, kinds=tuple(able), architecture=image.architecture)


def _node_error(error: OSError) -> protocol.ErrorMessage:
    code = ReasonCode.NODE_FAILED.value
    return protocol.ErrorMessage(code=code, message=f"the node failed: {reason_of(error)}", retry=False)


@dataclass
class RunClient:
    """The client that started a run."""

    has_received: bool = False
    disconnected: threading.Event = field(default_factory=threading.Event)

    def wait_received(self) -> bool:
        """Wait until the client disconnects; return whether it confirmed receipt of the results."""
        self.disconnected.wait()
        return self.has_received


def _watch_client(
    messages: Iterator[protocol.Message],
    event_queue: EventQueue,
    take: Callable[[DataMessage], object] | None = None,
) -> RunClient:
    """Turn the client's messages and its disconnecting into events. take: receives ``data``."""
    client = RunClient()

    def work() -> None:
        try:
            for message in messages:
                if isinstance(message, protocol.SignalMessage):
                    event_queue.put(SignalSent(message.number))
                elif isinstance(message, DataMessage) and take is not None:
                    take(message)
                elif isinstance(message, protocol.ResultsReceivedMessage):
                    client.has_received = True
        except (OSError, ValueError, VMJobsError) as error:
            log.info("lease: %s", error)
        finally:
            event_queue.put(LeaseLost())
            client.disconnected.set()

    start_thread("lease", work)
    return client


@contextmanager
def listening(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """Accept connections at ``path``, each in a separate thread, while the context lasts.

    Raises:
        ConfigError: the path is too long for a socket, or another agent listens there.
    """
    if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"socket: {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes")
    _clear_stale(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o666)  # the peer's credentials and its token decide what a client may do
        listener.listen(BACKLOG)
        start_thread("accept", _accept, listener, serve)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _accept(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if listener.fileno() == -1:
                return
            log.error("cannot accept a connection: %s", error)
            time.sleep(0.1)  # for example too many open files; no event signals the end of that
            continue
        try:
            start_thread("run", serve, connection)
        except RuntimeError as error:
            log.error("cannot serve a connection: %s", error)
            connection.close()
            time.sleep(0.1)  # too many threads: the same


def _clear_stale(path: Path) -> None:
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"socket: another agent listens at {path}")
