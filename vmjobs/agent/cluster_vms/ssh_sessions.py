"""Connects operators' SSH sessions that wait at the service with cluster VMs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from vmjobs.agent.background import start_thread
from vmjobs.agent.guest.ssh_relay import SshSession
from vmjobs.cluster.ssh_session import PendingSession, SessionAnswer
from vmjobs.errors import VMJobsError
from vmjobs.relay import ByteStream, relay
from vmjobs.sockets import shutdown_socket

log = logging.getLogger(__name__)

#: Seconds for the guest to connect to the SSH relay; it may still be connected to an earlier agent.
OPEN_SECONDS: Final = 15.0
#: Sessions that are remembered, so that none is answered twice: the service may repeat them after a
#: failed request.
MAX_REMEMBERED: Final = 1000

#: Opens an SSH session in a cluster VM: its id, incarnation, the key, seconds. Raises LoginUnavailable.
SshSessionOpener = Callable[[str, int, str, float], SshSession]


class SessionSource(Protocol):
    """The service's API about login sessions of a node's cluster VMs."""

    def answer(self, session: str, answer: SessionAnswer) -> None:
        """Accept or refuse a session.

        Raises:
            SessionEnded: the client no longer waits for the answer.
            Unavailable: the service is unreachable.
        """

    def stream(self, session: str) -> ByteStream:
        """The VM's side of an accepted session."""


class SshSessionHandler:
    """Answers the sessions that wait for this node."""

    def __init__(self, source: SessionSource, open_session: SshSessionOpener) -> None:
        self._source, self._open_session = source, open_session
        self._lock = threading.Lock()
        self._calls: dict[str, None] = {}

    def accept(self, calls: Sequence[PendingSession]) -> None:
        """Serve the sessions that wait at the service; ignore those seen before."""
        with self._lock:
            new_calls = [call for call in calls if call.id not in self._calls]
            self._calls |= dict.fromkeys(call.id for call in new_calls)
            for name in list(self._calls)[:-MAX_REMEMBERED]:
                del self._calls[name]
        for call in new_calls:
            start_thread(f"session-{call.id[:8]}", self._serve, call)

    def _serve(self, call: PendingSession) -> None:
        try:
            ssh_session = self._answer(call)
            if ssh_session is not None:
                self._relay(call, ssh_session)
        except VMJobsError as error:
            log.info("session %s: %s", call.id[:8], error)

    def _answer(self, call: PendingSession) -> SshSession | None:
        try:
            ssh_session = self._open_session(call.member, call.incarnation, call.key, OPEN_SECONDS)
        except VMJobsError as error:
            log.info("session %s: member %s: %s", call.id[:8], call.member, error)
            message = f"{error.message}; {error.hint}" if error.hint else error.message
            self._source.answer(call.id, SessionAnswer(refused=message[:1000]))
            return None
        try:
            self._source.answer(call.id, SessionAnswer(host_key=ssh_session.host_key))
        except VMJobsError:
            ssh_session.connection.close()
            raise
        return ssh_session

    def _relay(self, call: PendingSession, ssh_session: SshSession) -> None:
        connection, handle = ssh_session.connection, ssh_session.connection.fileno()
        log.info("session %s: logged in to VM %d of %s", call.id[:8], call.incarnation, call.member)
        with connection, suppress(OSError):
            relay(self._source.stream(call.id), handle, handle, partial(shutdown_socket, connection))
        log.info("session %s: over", call.id[:8])
