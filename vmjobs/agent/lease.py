"""The client's end of a connection, and the messages that it gets there."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass, field

from vmjobs.agent import protocol
from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.errors import VMJobsError
from vmjobs.model import ReasonCode, RejectedEntry, Report

log = logging.getLogger(__name__)


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

    def refuse(self, error: VMJobsError, *, retry: bool) -> None:
        """Send the reason why a job is not run, with the errors in its request."""
        faults = {fault.field: fault.message for fault in error.faults} or None
        self.send(
            protocol.ErrorMessage(code=error.code, message=error.message, retry=retry, faults=faults)
        )

    def report_node_fault(self, why: str) -> None:
        """Send why this node does not run the job; another node may."""
        code = ReasonCode.NODE_FAILED.value
        self.send(protocol.ErrorMessage(code=code, message=why, retry=False))

    def send(self, message: protocol.Message) -> None:
        """Send a message; ignore a client that has disconnected."""
        try:
            with self._sending:  # different threads send the job's output and its progress
                protocol.send(self.connection, message)
        except OSError as error:
            log.info("the client has disconnected: %s", error)
