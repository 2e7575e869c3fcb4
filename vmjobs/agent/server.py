"""The agent's server: serves each connection in a thread, by the client's first messages."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from vmjobs.agent import console_stream, protocol
from vmjobs.agent.active_runs import STOPPING_MESSAGE
from vmjobs.agent.checks import FaultCause
from vmjobs.agent.job_runner import JobRunner
from vmjobs.agent.lease import SocketLease
from vmjobs.errors import Unavailable, VMJobsError
from vmjobs.model import Node
from vmjobs.sockets import shutdown_socket

log = logging.getLogger(__name__)

#: Seconds that a client has to send its request.
REQUEST_SECONDS = 30.0
#: Connections of one user: each takes a thread, and threads are limited.
MAX_USER_CONNECTIONS = 1024
#: A console viewer that reads nothing for so many seconds is disconnected.
CONSOLE_SEND_SECONDS = 60.0
#: Seconds for saving VMs when the agent stops: as HTCondor gives jobs to vacate.
SAVE_SECONDS = 600.0
#: Characters of the node's reason for accepting no jobs.
MAX_FAULT_CHARACTERS = 1024


@dataclass
class Agent:
    """This node for its clients.

    describe: returns this node, with the given jobs as the running ones.
    checks: returns the node's faults, by cause.
    """

    runner: JobRunner
    describe: Callable[[tuple[str, ...]], Node]
    checks: Callable[[], Mapping[FaultCause, str]] = dict
    _subscribers: dict[SocketLease, int] = field(default_factory=dict)
    _connection_counts: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # ------------------------------------------------------------------ connections

    def serve(self, connection: socket.socket) -> None:
        """Serve one client until it disconnects."""
        peer = protocol.peer_credentials(connection)
        lease = SocketLease(connection, self.runner.services.settings.node)
        try:
            with self._count_connection(peer.uid):
                connection.settimeout(REQUEST_SECONDS)
                self._serve_requests(lease, peer)
        except VMJobsError as error:
            lease.refuse(error, retry=isinstance(error, Unavailable))
        except OSError as error:
            log.info("connection of uid %d: %s", peer.uid, error)
        finally:
            self._subscribers.pop(lease, None)
            shutdown_socket(connection)  # the client may have disconnected
            connection.close()

    def _serve_requests(self, lease: SocketLease, peer: protocol.PeerCredentials) -> None:
        messages = protocol.receive(lease.connection)
        for message in messages:
            if isinstance(message, protocol.StatusMessage):
                if self.runner.active.is_stopping:  # otherwise the node would continue to attract jobs
                    raise Unavailable("agent", STOPPING_MESSAGE)
                self._subscribers[lease] = peer.uid
                self._describe_to(lease, peer.uid)
            elif isinstance(message, protocol.RunMessage):
                lease.connection.settimeout(None)
                self.runner.run_job(message, lease, peer, messages)
                return
            elif isinstance(message, protocol.SubmitMessage):
                self.runner.run_condor_job(message, lease, peer, messages)
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

    def _open_shell(
        self,
        message: protocol.EnterMessage,
        lease: SocketLease,
        peer: protocol.PeerCredentials,
        messages: Iterator[protocol.Message],
    ) -> None:
        name, job_access = self.runner.find_access(peer)
        log.info("%s: uid %d opens a shell", name, peer.uid)
        lease.connection.settimeout(None)
        job_access.run_session(message, lease.connection, lease.send, messages)

    def _show_console(
        self, message: protocol.ConsoleMessage, lease: SocketLease, peer: protocol.PeerCredentials
    ) -> None:
        name, job_access = self.runner.find_access(peer)

        def is_over(seconds: float) -> bool:
            return self.runner.active.wait_for_end(name, job_access, seconds)

        lease.connection.settimeout(CONSOLE_SEND_SECONDS)
        with job_access.counted_session():
            console_stream.send_console(lease.connection, job_access.console, message, is_over)

    # ------------------------------------------------------------------ the node

    def notify_subscribers(self) -> None:
        """Send the node's changed state at once to all clients that have asked for it."""
        for lease, uid in list(self._subscribers.items()):
            self._describe_to(lease, uid)

    def _describe_to(self, lease: SocketLease, uid: int) -> None:
        lease.send(protocol.StatusMessage(node=self.node(uid)))

    def node(self, uid: int | None = None) -> Node:
        """Return the node's present state, with its jobs that ``uid`` may see, or all."""
        active = self.runner.active
        fault = "; ".join(self.faults().values())[:MAX_FAULT_CHARACTERS]
        known = {"lent": active.lent_memory(), "fault": fault}
        return self.describe(active.names(uid)).model_copy(update=known)

    def faults(self) -> dict[FaultCause, str]:
        """Return why the node accepts no jobs now, one sentence for each cause."""
        pause = self.runner.health.fault()
        return {**self.checks(), **({FaultCause.JOBS: pause} if pause else {})}

    def stop(self, patience: float, saving: float = SAVE_SECONDS) -> None:
        """End all runs; see :meth:`vmjobs.agent.active_runs.ActiveRuns.stop`."""
        self.runner.active.stop(patience, saving)
