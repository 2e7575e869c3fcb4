"""This node's services for transparent jobs, and the slots from which such jobs come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vmjobs.agent.condor_job import checkpoints
from vmjobs.agent.condor_job.checkpoints import CheckpointStores, StartPoint
from vmjobs.agent.condor_job.starter import StarterProcess, effective_uid, read_starter
from vmjobs.agent.protocol import PeerCredentials, SubmitMessage
from vmjobs.errors import Forbidden


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

    def find_slot(self, peer: PeerCredentials) -> StarterProcess:
        """Return the starter that a client descends from.

        Raises:
            Forbidden: there is none, or the client has exited. Unavailable: it cannot be found now.
        """
        if effective_uid(peer.pid) != peer.uid:  # the process has ended, and its id may be reused
            raise Forbidden("the peer process has exited")
        return read_starter(self.slot_of(peer.pid))

    def begin(self, message: SubmitMessage, attempt: str, slot: StarterProcess) -> StartPoint:
        """Return where a transparent job starts. slot: its starter.

        Raises:
            Forbidden: this node stores no checkpoints. Others: as ``find_start_point``.
        """
        if not message.checkpoint:
            return StartPoint(message, self.resolve(message.image))
        if self.stores is None:
            raise Forbidden("this node has no repository to save VMs to")
        return checkpoints.find_start_point(message, attempt, self.resolve, self.stores, slot)


def slot_job_name(slot: StarterProcess) -> str:
    """Return the agent's name for a slot's job; a ``run`` message cannot contain it."""
    return f"condor.{slot.pid}"
