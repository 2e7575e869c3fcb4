"""Connects operators' SSH sessions that wait at the service with cluster VMs."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from vmjobs.agent.background import begin
from vmjobs.agent.door import Visit
from vmjobs.cluster.session import SessionAnswer, SessionCall
from vmjobs.errors import VMJobsError
from vmjobs.ports import SessionSource
from vmjobs.relay import relay

log = logging.getLogger(__name__)

#: Seconds for the guest to connect to the SSH relay; it may still be connected to an earlier agent.
KNOCK_SECONDS: Final = 15.0
#: Sessions that are remembered, so that none is answered twice: the service may repeat them after a
#: failed request.
REMEMBERED: Final = 1000

#: Opens an SSH session in a cluster VM: its id, incarnation, the key, seconds. Raises NoLogin.
Knock = Callable[[str, int, str, float], Visit]


class Callers:
    """Answers the sessions that wait for this node."""

    def __init__(self, source: SessionSource, knock: Knock) -> None:
        self._source, self._knock = source, knock
        self._lock = threading.Lock()
        self._calls: dict[str, None] = {}

    def take(self, calls: Sequence[SessionCall]) -> None:
        """Serve the sessions that wait at the service; ignore those seen before."""
        with self._lock:
            fresh = [call for call in calls if call.id not in self._calls]
            self._calls |= dict.fromkeys(call.id for call in fresh)
            for name in list(self._calls)[:-REMEMBERED]:
                del self._calls[name]
        for call in fresh:
            begin(f"session-{call.id[:8]}", self._serve, call)

    def _serve(self, call: SessionCall) -> None:
        try:
            visit = self._let_in(call)
            if visit is not None:
                self._carry(call, visit)
        except VMJobsError as error:
            log.info("session %s: %s", call.id[:8], error)

    def _let_in(self, call: SessionCall) -> Visit | None:
        try:
            visit = self._knock(call.member, call.incarnation, call.key, KNOCK_SECONDS)
        except VMJobsError as error:
            log.info("session %s: member %s: %s", call.id[:8], call.member, error)
            said = f"{error.message}; {error.hint}" if error.hint else error.message
            self._source.answer(call.id, SessionAnswer(refused=said[:1000]))
            return None
        try:
            self._source.answer(call.id, SessionAnswer(host_key=visit.host_key))
        except VMJobsError:
            visit.connection.close()
            raise
        return visit

    def _carry(self, call: SessionCall, visit: Visit) -> None:
        connection = visit.connection

        def hang_up() -> None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

        log.info("session %s: logged in to VM %d of %s", call.id[:8], call.incarnation, call.member)
        with connection, suppress(OSError):
            relay(self._source.stream(call.id), connection.fileno(), connection.fileno(), hang_up)
        log.info("session %s: over", call.id[:8])
