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

from vmjobs.agent import condor_checkpoint, consoles, protocol
from vmjobs.agent.background import begin
from vmjobs.agent.checks import LEAST_ROOM, Cause
from vmjobs.agent.condor_checkpoint import CheckpointStores, StartPoint
from vmjobs.agent.condor_job import receive_job
from vmjobs.agent.entrance import Entrance
from vmjobs.agent.framing import DataMessage
from vmjobs.agent.inbox import Inbox, LeaseLost, SaveWanted, SignalSent
from vmjobs.agent.journal import Leftover
from vmjobs.agent.node_health import LIMIT, NodeHealth
from vmjobs.agent.run import Parts, Run, Untold
from vmjobs.agent.starter import Starter, as_it_is, owner_of
from vmjobs.agent.suspend import suspending
from vmjobs.agent.verdict import Verdict
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
from vmjobs.model import GIVEN_BACK, MIB, JobState, Node, ReasonCode, RejectedEntry, Report
from vmjobs.ports import JobSource

log = logging.getLogger(__name__)

BACKLOG = 128
#: Seconds that a client has to send its request.
FIRST_WORD_SECONDS = 30.0
#: Connections of one user: each takes a thread, and threads are limited.
MOST_OF_A_USER = 1024
#: A console viewer that reads nothing for so many seconds is disconnected.
STILL_SECONDS = 60.0
_STOPS = "this agent is stopping"
#: Seconds for saving VMs when the agent stops: as HTCondor gives jobs to vacate.
SAVE_SECONDS = 600.0
#: Seconds to wait for the removal of the earlier VM of a job that starts again.
CLEARING_SECONDS = 60.0
#: Characters of the node's reason for accepting no jobs.
MAX_FAULT = 1024
#: Longest path that fits into ``sun_path`` (unix(7)).
MAX_SOCKET_PATH = 107


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
        verdict: Verdict,
        ended: str = "",
        needs: protocol.ImageNeeds | None = None,
        rejected: tuple[RejectedEntry, ...] = (),
    ) -> None:
        """Send the end of the job.

        ended, needs: as in ``EndMessage``. rejected: outputs that a transparent job does not get back.
        """
        if self.last is not None:
            report, code = self.last.model_copy(update={"rejected": rejected}), verdict.exit_code
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

    def begin(self, message: protocol.SubmitMessage, attempt: str, slot: Starter) -> StartPoint:
        """Return where a transparent job starts. slot: its starter.

        Raises:
            Forbidden: this node stores no checkpoints. Others: as ``condor_checkpoint.begin``.
        """
        if not message.checkpoint:
            return StartPoint(message, self.resolve(message.image))
        if self.stores is None:
            raise Forbidden("this node has no repository to save VMs to")
        return condor_checkpoint.begin(message, attempt, self.resolve, self.stores, slot)


@dataclass
class Agent:
    """All runs of this node.

    open_job: returns the repository's view of one job, from job id and job token.
    describe: returns this node, with the given jobs as the running ones.
    condor_jobs: for transparent jobs; None: this node runs none.
    health: of this node, from its recent jobs. checks: returns its faults, by cause.
    """

    parts: Parts
    open_job: Callable[[str, str], JobSource]
    describe: Callable[[tuple[str, ...]], Node]
    condor_jobs: CondorJobServices | None = None
    health: NodeHealth = field(default_factory=NodeHealth)
    checks: Callable[[], Mapping[Cause, str]] = dict
    running: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, Leftover] = field(default_factory=dict)
    _inboxes: dict[str, Inbox] = field(default_factory=dict)
    _runs: dict[str, Run] = field(default_factory=dict)
    _memory: dict[str, int] = field(default_factory=dict)
    _leases: dict[str, SocketLease] = field(default_factory=dict)
    _entrances: dict[str, Entrance] = field(default_factory=dict)
    #: Of transparent jobs: HTCondor's id and the user id of each, and its client.
    _handed: dict[str, tuple[tuple[str, int], OtherEnd]] = field(default_factory=dict)
    _followers: dict[SocketLease, int] = field(default_factory=dict)
    _guests: Counter[int] = field(default_factory=Counter)
    _stopping: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Condition = field(init=False)

    def __post_init__(self) -> None:
        self._ended = threading.Condition(self._lock)

    def remember(self, leftovers: list[Leftover]) -> None:
        """Keep outcomes of an earlier agent's runs, which may not have been reported."""
        self.verdicts = {left.record.job: left for left in leftovers if left.verdict}

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
        peer = protocol.peer(connection)
        lease = SocketLease(connection, self.parts.settings.node)
        try:
            with self._among_the_guests(peer.uid):
                connection.settimeout(FIRST_WORD_SECONDS)
                self._converse(connection, lease, peer)
        except VMJobsError as error:
            refuse(lease, error, retry=isinstance(error, Unavailable))
        except OSError as error:
            log.info("connection of uid %d: %s", peer.uid, error)
        finally:
            self._followers.pop(lease, None)
            with suppress(OSError):  # the client may have disconnected
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _converse(self, connection: socket.socket, lease: SocketLease, peer: protocol.Peer) -> None:
        messages = protocol.receive(connection)
        for message in messages:
            if isinstance(message, protocol.StatusMessage):
                if self._stopping:  # otherwise the node would continue to attract jobs
                    raise Unavailable("agent", _STOPS)
                self._followers[lease] = peer.uid
                self._describe_to(lease, peer.uid)
            elif isinstance(message, protocol.RunMessage):
                connection.settimeout(None)
                self._run(message, lease, peer, messages)
                return
            elif isinstance(message, protocol.SubmitMessage):
                self._hand(message, lease, peer, messages)
                return
            elif isinstance(message, protocol.EnterMessage):
                self._enter(message, lease, peer, messages)
                return
            elif isinstance(message, protocol.ConsoleMessage):
                self._console(message, lease, peer)
                return

    @contextmanager
    def _among_the_guests(self, uid: int) -> Iterator[None]:
        """Count a user's connection; reject it if the user has too many."""
        with self._lock:
            if self._guests[uid] >= MOST_OF_A_USER:
                raise Unavailable("agent", f"uid {uid} has {MOST_OF_A_USER} connections already")
            self._guests[uid] += 1
        try:
            yield
        finally:
            with self._lock:
                self._guests[uid] -= 1
                self._guests += Counter()  # removes users without connections

    def announce(self) -> None:
        """Send the node's changed state at once to all clients that have asked for it."""
        for lease, uid in list(self._followers.items()):
            self._describe_to(lease, uid)

    def _describe_to(self, lease: SocketLease, uid: int) -> None:
        lease.send(protocol.StatusMessage(node=self.node(uid)))

    def node(self, uid: int | None = None) -> Node:
        """Return the node's present state, with its jobs that ``uid`` may see, or all."""
        with self._lock:
            runs = {job: run.ticket.spec.memory for job, run in self._runs.items() if run.claimed}
            lent = sum((runs | self._memory).values())  # of a transparent job: while it is reserved
        known = {"lent": lent, "fault": "; ".join(self.faults().values())[:MAX_FAULT]}
        return self.describe(self.jobs(uid)).model_copy(update=known)

    def faults(self) -> dict[Cause, str]:
        """Return why the node accepts no jobs now, one sentence for each cause."""
        rests = self.health.fault()
        return {**self.checks(), **({Cause.JOBS: rests} if rests else {})}

    def stop(self, patience: float, saving: float = SAVE_SECONDS) -> None:
        """End all runs; their VMs are gone on return, unless the time limits were exceeded.

        patience: seconds for VMs that are only stopped. saving: for those that can be saved.
        """
        with self._ended:
            self._stopping = True
            saved = [job for job, run in self._runs.items() if run.savable]
            for job in saved:
                self._inboxes[job].put(SaveWanted())
            self._ended.wait_for(lambda: not any(job in self.running for job in saved), saving)
            for inbox in self._inboxes.values():
                inbox.put(LeaseLost())
            self._ended.wait_for(lambda: not self.running, patience)

    def _run(
        self,
        message: protocol.RunMessage,
        lease: SocketLease,
        peer: protocol.Peer,
        messages: Iterator[protocol.Message],
    ) -> None:
        with self._answering(message.job, lease):
            if why := self._belongs_to_no_starter(peer):
                code = ReasonCode.NODE_FAILED.value  # perhaps the settings: another node may run it
                lease.send(protocol.ErrorMessage(code=code, message=why, retry=False))
                return
            source = self.open_job(message.job, message.token)
            with suppress(Conflict):  # not ended yet; the answer itself proves that the token is valid
                source.end()
            with self._registered(message.job, peer.uid, lease) as inbox:
                verdict = self._told_before(message.job, source, lease)
                if verdict is None:
                    _listen(messages, inbox)
                    run = Run(source, lease, self.parts, message.job, uuid.uuid4().hex, inbox)
                    run.on_usage = lease.progress
                    with self._lock:
                        self._runs[message.job] = run
                    try:
                        with suspending(run, peer.pid):
                            verdict = run.execute()
                    except JobFinal:
                        verdict = self._ended_before(message.job, source, lease)
                    else:
                        self._judge_node(run, verdict)
            lease.end(verdict)

    def _hand(
        self,
        message: protocol.SubmitMessage,
        lease: SocketLease,
        peer: protocol.Peer,
        messages: Iterator[protocol.Message],
    ) -> None:
        with self._answering(message.job, lease):
            condor_jobs, slot = self._slot(peer)
            name = _name_of(slot)
            with (
                self._lent(name, message.memory, condor_jobs.memory),
                receive_job(message, name, peer, condor_jobs.spool, messages) as job,
                ExitStack() as stack,
            ):
                lease.connection.settimeout(None)  # a client may stall only after the submission
                attempt = uuid.uuid4().hex
                try:
                    start_point = condor_jobs.begin(message, attempt, slot)
                except Unauthenticated:  # the node's own token is invalid: other jobs fail, too
                    self.health.failed()
                    raise
                stack.callback(start_point.close)
                entrance = Entrance(message, lease.send, start_point.door)
                called = message.job, peer.uid
                self._await_cleared(called)
                with self._registered(name, peer.uid, lease, entrance) as inbox:
                    log.info("%s is job %s of uid %d", name, message.job, peer.uid)
                    other_end = _listen(messages, inbox, entrance.take)
                    self._handed[name] = called, other_end
                    source = job.source(start_point, lease.send, entrance)
                    max_log = source.spec.disk * MIB
                    settings = replace(self.parts.settings, max_log=max_log, patient=True)
                    parts = replace(self.parts, settings=settings)
                    run = Run(source, lease, parts, name, attempt, inbox, entrance.doors)
                    run.on_usage, run.remark = lease.progress, start_point.remark
                    run.shut, entrance.console = entrance.shut, run.console
                    with self._lock:
                        self._runs[name] = run
                    with suspending(run, peer.pid):
                        verdict = run.execute()
                    self._nobody_enters(name)
                    self._judge_node(run, verdict)
                    # A stopping agent waits for this, too.
                    job.send_back(lease.send)
                    lease.end(verdict, job.ended(), _needs(run, message.image), job.rejected())
                    if message.checkpoint and other_end.has_taken():
                        start_point.forget()

    def _enter(
        self,
        message: protocol.EnterMessage,
        lease: SocketLease,
        peer: protocol.Peer,
        messages: Iterator[protocol.Message],
    ) -> None:
        name, entrance = self._own(peer)
        log.info("%s: uid %d opens a shell", name, peer.uid)
        lease.connection.settimeout(None)
        entrance.enter(message, lease.connection, lease.send, messages)

    def _console(
        self, message: protocol.ConsoleMessage, lease: SocketLease, peer: protocol.Peer
    ) -> None:
        name, entrance = self._own(peer)

        def over(seconds: float) -> bool:
            with self._ended:
                return self._ended.wait_for(lambda: self._entrances.get(name) is not entrance, seconds)

        lease.connection.settimeout(STILL_SECONDS)
        with entrance.visited():
            consoles.show(lease.connection, entrance.console, message, over)

    def _judge_node(self, run: Run, verdict: Verdict) -> None:
        """Update the node's health; after several failed boots in a row, probe the hypervisor."""
        if verdict.reason.code is ReasonCode.NODE_FAILED and not verdict.unfit:
            self._note_lack_of_room()
        if self.health.note(verdict) and self.parts.recheck is not None:
            kind = run.driver.kind
            log.warning("%s VMs in a row did not boot: probing %s", LIMIT, kind)
            begin("recheck", self.parts.recheck, kind)

    def _note_lack_of_room(self) -> None:
        """Count a node failure if the disk is too full for any job, not just for a large one."""
        if self.condor_jobs is not None and disk_usage(self.condor_jobs.spool.parent).free < LEAST_ROOM:
            self.health.failed()

    def _nobody_enters(self, name: str) -> None:
        """End the access to a job's VM, which is gone."""
        with self._ended:
            self._entrances.pop(name, None)
            self._ended.notify_all()

    def _own(self, peer: protocol.Peer) -> tuple[str, Entrance]:
        """Return the name of the job that the client belongs to, and the access to its VM."""
        name = _name_of(self._slot(peer)[1])
        with self._lock:
            entrance = self._entrances.get(name)
            if entrance is None or self.running.get(name) != peer.uid:
                raise Forbidden("this job has no running VM on this node now")
        return name, entrance

    def _belongs_to_no_starter(self, peer: protocol.Peer) -> str:
        """Return why a client may not start jobs; empty: it may, as root and the agent's user."""
        if self.condor_jobs is None or peer.uid in (0, os.getuid()):
            return ""
        try:
            self._slot(peer)
        except Forbidden as error:
            return f"{error.message}; starters run as root or as the user of the setting condor_user"
        return ""

    def _slot(self, peer: protocol.Peer) -> tuple[CondorJobServices, Starter]:
        """Return the services for transparent jobs, and the starter that the client descends from."""
        if self.condor_jobs is None:
            raise Forbidden("this node accepts only jobs of the repository")
        if owner_of(peer.pid) != peer.uid:  # the process has ended, and its id may be reused
            raise Forbidden("the peer process has exited")
        return self.condor_jobs, as_it_is(self.condor_jobs.slot_of(peer.pid))

    @contextmanager
    def _lent(self, name: str, memory: int, limit: int) -> Iterator[None]:
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
    def _answering(self, job: str, lease: SocketLease) -> Iterator[None]:
        """Report errors of the context to the client that asked for the job."""
        try:
            yield
        except Untold as untold:
            log.error("job %s: %s; the job's next run delivers it", job, untold)
            self.verdicts[job] = untold.left
            refuse(lease, untold, retry=True)
        except VMJobsError as error:
            log.warning("job %s: %s", job, error)
            if isinstance(error, StorageFull):
                self._note_lack_of_room()
            refuse(lease, error, retry=isinstance(error, Unavailable))
        except OSError as error:
            log.exception("job %s failed on this node", job)
            self._note_lack_of_room()
            lease.send(_node_failed(error))
        except Exception as error:
            log.exception("job %s", job)
            fault = VMJobsError(f"the agent failed: {type(error).__name__}")
            refuse(lease, fault, retry=False)

    def _told_before(self, job: str, source: JobSource, lease: SocketLease) -> Verdict | None:
        """Report the outcome of an earlier run, which may be undelivered; None: run the job anew."""
        left = self.verdicts.get(job)
        if left is None:
            return None
        report = Report.model_validate_json(left.verdict)
        # A stopped job runs again here; one that this node failed is requeued.
        anew = report.state is JobState.PREEMPTED and report.reason.code not in GIVEN_BACK
        if not anew:
            try:
                source.resume(left.record.attempt)
                source.report(report)
            except JobFinal:
                self.verdicts.pop(job, None)
                return self._ended_before(job, source, lease)
            except AttemptSuperseded:
                log.info("job %s: a later attempt has superseded the earlier run", job)
                anew = True
            except Conflict:
                log.info("job %s: its final report was delivered before", job)
        self.verdicts.pop(job, None)
        if anew:
            return None
        lease.progress(report)
        return Verdict(report.state, report.reason, report.exit)

    def _ended_before(self, job: str, source: JobSource, lease: SocketLease) -> Verdict:
        """Return the outcome of an ended job whose scheduler missed the end, and starts it again."""
        report = source.end()
        log.info("job %s has ended before: it is %s", job, report.state)
        if report.state is JobState.CANCELED:  # the scheduler shall remove it, not see it end
            raise Unavailable("agent", f"job {job} is canceled and will be removed")
        lease.progress(report)
        return Verdict(report.state, report.reason, report.exit)

    @contextmanager
    def _registered(
        self, job: str, uid: int, lease: SocketLease, entrance: Entrance | None = None
    ) -> Iterator[Inbox]:
        inbox = Inbox()
        with self._lock:
            if self._stopping:
                raise Unavailable("agent", _STOPS)
            if job in self.running:
                raise Unavailable("agent", f"an earlier run of job {job} is still being removed")
            self.running[job], self._inboxes[job], self._leases[job] = uid, inbox, lease
            if entrance is not None:
                self._entrances[job] = entrance
        try:
            yield inbox
        finally:
            with self._ended:
                del self.running[job], self._inboxes[job], self._leases[job]
                self._entrances.pop(job, None)
                self._runs.pop(job, None)
                self._handed.pop(job, None)
                self._ended.notify_all()

    def _await_cleared(self, called: tuple[str, int]) -> None:
        """Wait until a job's earlier VM is gone: if a starter dies, its job restarts at once.

        A job of another schedd may have the same id; while its lease is held, it is not waited for.
        """

        def cleared() -> bool:
            handed = self._handed.values()
            return not any(of == called and other_end.gone.is_set() for of, other_end in handed)

        with self._ended:
            if not self._ended.wait_for(cleared, CLEARING_SECONDS):
                raise Unavailable("agent", f"an earlier run of job {called[0]} is still being removed")


def _name_of(slot: Starter) -> str:
    """Return the agent's name for a slot's job; a ``run`` message cannot contain it."""
    return f"condor.{slot.pid}"


def refuse(lease: SocketLease, error: VMJobsError, *, retry: bool) -> None:
    """Send the reason why a job is not run, with the errors in its request."""
    faults = {fault.field: fault.message for fault in error.faults} or None
    lease.send(
        protocol.ErrorMessage(code=error.code, message=error.message, retry=retry, faults=faults)
    )


def _needs(run: Run, named: str) -> protocol.ImageNeeds | None:
    """Return the image's requirements if no hypervisor here boots it. named: as the job does.

    None, too, if the job excludes all hypervisors that boot the image: only its user can correct that.
    """
    image = run.unbootable
    if image is None:
        return None
    able = [kind for kind in image.kinds if kind in run.ticket.spec.kinds]
    if not able:
        return None
    return protocol.ImageNeeds(named=named, kinds=tuple(able), architecture=image.architecture)


def _node_failed(error: OSError) -> protocol.ErrorMessage:
    code = ReasonCode.NODE_FAILED.value
    return protocol.ErrorMessage(code=code, message=f"the node failed: {reason_of(error)}", retry=False)


@dataclass
class OtherEnd:
    """The client that started a run."""

    taken: bool = False
    gone: threading.Event = field(default_factory=threading.Event)

    def has_taken(self) -> bool:
        """Wait until the client disconnects; return whether it confirmed receipt of the results."""
        self.gone.wait()
        return self.taken


def _listen(
    messages: Iterator[protocol.Message],
    inbox: Inbox,
    take: Callable[[DataMessage], object] | None = None,
) -> OtherEnd:
    """Turn the client's messages and its disconnecting into events. take: receives ``data``."""
    other_end = OtherEnd()

    def work() -> None:
        try:
            for message in messages:
                if isinstance(message, protocol.SignalMessage):
                    inbox.put(SignalSent(message.number))
                elif isinstance(message, DataMessage) and take is not None:
                    take(message)
                elif isinstance(message, protocol.TakenMessage):
                    other_end.taken = True
        except (OSError, ValueError, VMJobsError) as error:
            log.info("lease: %s", error)
        finally:
            inbox.put(LeaseLost())
            other_end.gone.set()

    threading.Thread(target=work, name="lease", daemon=True).start()
    return other_end


@contextmanager
def listening(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """Accept connections at ``path``, each in a separate thread, while the context lasts.

    Raises:
        ConfigError: the path is too long for a socket, or another agent listens there.
    """
    if len(str(path).encode()) > MAX_SOCKET_PATH:
        raise ConfigError(f"socket: {path} is longer than {MAX_SOCKET_PATH} bytes")
    _clear_stale(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o666)  # the peer's credentials and its token decide what a client may do
        listener.listen(BACKLOG)
        threading.Thread(target=_accept, args=(listener, serve), name="accept", daemon=True).start()
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
            threading.Thread(target=serve, args=(connection,), name="run", daemon=True).start()
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
