"""``vmjobs exec``: the unprivileged executable that HTCondor's starter runs.

It asks the agent to run a job, forwards signals, reports progress, and exits with the script's
status. Its connection is the lease. If the agent dies, it waits for the next agent and asks again;
a new agent removes the remains of interrupted runs before it listens.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path

from vmjobs.agent import protocol
from vmjobs.errors import InvalidRequest, VMJobsError
from vmjobs.lease import Signals, insist
from vmjobs.model import GIVEN_BACK, JobState, ReasonCode

log = logging.getLogger(__name__)


class Refused(VMJobsError):
    """The agent or the repository refuses to run this job, here and elsewhere."""

    code = "REFUSED"
    exit_code = 125


class Failed(VMJobsError):
    """The node failed to run the job; another node may run it."""

    code = ReasonCode.NODE_FAILED.value


def run_job(
    path: Path,
    job: str,
    token: str,
    on_progress: Callable[[protocol.ProgressMessage | protocol.EndMessage], None],
    patience: float = 120.0,
    on_leave: Callable[[], object] = lambda: None,
) -> int:
    """Have the agent at ``path`` run ``job``; returns the exit status of this process.

    on_stop: called before this returns, if a signal stopped the job.
    patience: seconds to wait for an agent that is absent or cannot run the job now.

    Raises:
        Unavailable: no agent ran the job within that time; HTCondor should run it elsewhere.
        NodeFailure: the node could not run the job; HTCondor should run it elsewhere.
        JobRefused: the job was refused, and other nodes would refuse it too.
    """
    with Signals() as signals:
        ended = insist(
            str(path),
            lambda connection, heard: _converse(connection, job, token, on_progress, heard, signals),
            signals,
            patience,
            log.warning,
        )
        if signals.stopping:
            on_leave()
        return 128 + signals.stopping if ended is None else ended


def _converse(
    connection: socket.socket,
    job: str,
    token: str,
    on_progress: Callable[[protocol.ProgressMessage | protocol.EndMessage], None],
    heard: Callable[[], None],
    signals: Signals,
) -> int | None:
    """Run the job over one connection; returns its exit status, or None to ask again."""
    protocol.send(connection, protocol.RunMessage(job=job, token=token))

    def forward(number: int) -> None:
        protocol.send(connection, protocol.SignalMessage(number=number))

    with signals.forwarded_to(forward):
        try:
            for message in protocol.receive(connection):
                if isinstance(message, protocol.ProgressMessage | protocol.EndMessage):
                    heard()
                if isinstance(message, protocol.ProgressMessage):
                    on_progress(message)
                elif isinstance(message, protocol.EndMessage):
                    on_progress(message)
                    given_back = message.report.state is JobState.PREEMPTED and not signals.stopping
                    if given_back and message.report.reason.code in GIVEN_BACK:
                        raise Failed(message.report.reason.message)
                    return None if given_back else message.exit_code
                elif isinstance(message, protocol.ErrorMessage):
                    if message.retry:
                        log.warning("%s", message.message)
                        return None
                    raise (Failed if message.code in GIVEN_BACK else Refused)(message.message)
        except (ConnectionError, InvalidRequest) as error:
            log.warning("%s", error)
    return None
