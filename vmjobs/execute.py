"""``vmjobs exec``: the unprivileged executable that HTCondor's starter runs.

It asks the agent to run a job, forwards signals, reports progress, and exits with the script's
status. Its connection is the lease. If the agent dies, it waits for the next agent and asks again;
a new agent removes the remains of interrupted runs before it listens.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vmjobs.agent import protocol
from vmjobs.errors import InvalidRequest, VMJobsError
from vmjobs.lease import SignalForwarder, retry_until
from vmjobs.model import REQUEUE_REASONS, JobState, ReasonCode

log = logging.getLogger(__name__)


class JobRefused(VMJobsError):
    """The agent or the repository refuses to run this job, here and elsewhere."""

    code = "REFUSED"
    exit_code = 125


class NodeFailure(VMJobsError):
    """The node failed to run the job; another node may run it."""

    code = ReasonCode.NODE_FAILED.value


def run_job(
    path: Path,
    job: str,
    token: str,
    on_progress: Callable[[protocol.ProgressMessage | protocol.EndMessage], None],
    patience: float = 120.0,
    on_stop: Callable[[], object] = lambda: None,
) -> int:
    """Have the agent at ``path`` run ``job``; returns the exit status of this process.

    on_stop: called before this returns, if a signal stopped the job.
    patience: seconds to wait for an agent that is absent or cannot run the job now.

    Raises:
        Unavailable: no agent ran the job within that time; HTCondor should run it elsewhere.
        NodeFailure: the node could not run the job; HTCondor should run it elsewhere.
        JobRefused: the job was refused, and other nodes would refuse it too.
    """
    with SignalForwarder() as signals:
        exchange = partial(_exchange, job=job, token=token, on_progress=on_progress, signals=signals)
        ended = retry_until(str(path), exchange, signals, patience, log.warning)
        if signals.stopping:
            on_stop()
        return 128 + signals.stopping if ended is None else ended


def _exchange(
    connection: socket.socket,
    on_activity: Callable[[], None],
    job: str,
    token: str,
    on_progress: Callable[[protocol.ProgressMessage | protocol.EndMessage], None],
    signals: SignalForwarder,
) -> int | None:
    """Run the job over one connection; returns its exit status, or None to ask again."""
    protocol.send(connection, protocol.RunMessage(job=job, token=token))

    def forward(number: int) -> None:
        protocol.send(connection, protocol.SignalMessage(number=number))

    with signals.forwarded_to(forward):
        try:
            for message in protocol.receive(connection):
                if isinstance(message, protocol.ProgressMessage | protocol.EndMessage):
                    on_activity()
                    on_progress(message)
                if isinstance(message, protocol.EndMessage):
                    is_requeued = message.report.state is JobState.PREEMPTED and not signals.stopping
                    if is_requeued and message.report.reason.code in REQUEUE_REASONS:
                        raise NodeFailure(message.report.reason.message)
                    return None if is_requeued else message.exit_code
                if isinstance(message, protocol.ErrorMessage):
                    if message.retry:
                        log.warning("%s", message.message)
                        return None
                    raise (NodeFailure if message.code in REQUEUE_REASONS else JobRefused)(
                        message.message
                    )
        except (ConnectionError, InvalidRequest) as error:
            log.warning("%s", error)
    return None
