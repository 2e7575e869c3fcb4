"""Checkpoints of transparent jobs: saved when HTCondor vacates them, resumed elsewhere.

The repository stores of such a job only its owner, as HTCondor names it, and the specification of its
VM (``vmjobs.model.VmSpec``). Everything else is as in :mod:`vmjobs.agent.run.checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from vmjobs.agent.condor_job.starter import StarterProcess
from vmjobs.agent.job_source import CheckpointStore
from vmjobs.agent.protocol import SubmitMessage
from vmjobs.errors import InvalidRequest, NotFound, Unavailable, VMJobsError
from vmjobs.file_transfer import ContentReceiver, ContentSource
from vmjobs.local import LocalJob
from vmjobs.model import AttemptClaim, Checkpoint, JobTicket, NetworkMode, ReasonCode, Report, VmSpec

log = logging.getLogger(__name__)


class CheckpointStores(Protocol):
    """Opens the checkpoint store of each of this node's jobs."""

    def open(self, slot: StarterProcess) -> CheckpointStore:
        """Return the store for the job of a slot.

        slot: the process that the slot's jobs descend from.

        Raises Unavailable: HTCondor cannot name the job's owner now.
        """

    def save_obstacle(self, image: str, network: NetworkMode) -> str:
        """Return why no VM of the image (a digest) can be saved, or ``""``.

        Raises NotFound: the image does not exist, or was removed.
        """


@dataclass(frozen=True)
class StartPoint:
    """The start of a transparent job: a new VM, or a checkpoint.

    message: with the resources of its VM. image: digest. store: None: its VM is not saved.
    found: the checkpoint; None: a new VM. remark: for the user.
    """

    message: SubmitMessage
    image: str
    store: CheckpointStore | None = None
    found: Checkpoint | None = None
    remark: str = ""

    @property
    def relay_token(self) -> str:
        """The SSH relay's token that a resumed guest knows already; ``""``: none."""
        return self.found.making.door if self.found and self.found.making else ""

    def vm_spec(self, relay_token: str) -> VmSpec:
        """Return the specification of its VM. relay_token: see ``VmSpec.door``."""
        said = self.message
        return VmSpec(
            named=said.image,
            image=self.image,
            door=relay_token,
            cpus=said.cpus,
            memory=said.memory,
            disk=said.disk,
            network=said.network,
        )

    def remove_checkpoint(self) -> None:
        """Remove the checkpoint of a job that has ended. A failure is logged."""
        if self.store is None:
            return
        try:
            self.store.delete_checkpoints()
        except VMJobsError as error:
            log.warning("the checkpoint of an ended job is not removed yet: %s", error)

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def find_start_point(
    message: SubmitMessage,
    attempt: str,
    resolve: Callable[[str], str],
    stores: CheckpointStores,
    slot: StarterProcess,
) -> StartPoint:
    """Return the start point of a job whose VM is to be saved.

    slot: see ``CheckpointStores``.

    Raises:
        InvalidRequest: no VM of the image can be saved. Others: those of ``resolve`` and the store.
    """
    with ExitStack() as undo:
        store = stores.open(slot)
        undo.callback(store.close)
        found = _find_checkpoint(store, attempt, anew=message.anew)
        why = _resume_obstacle(found.making, message, stores) if found and found.making else ""
        if found and found.making and not why:
            same = {name: getattr(found.making, name) for name in ("cpus", "memory", "disk")}
            start = StartPoint(message.model_copy(update=same), found.making.image, store, found)
        else:
            image = resolve(message.image)
            if obstacle := stores.save_obstacle(image, message.network):
                raise InvalidRequest(obstacle)
            remark = f"the job starts again: {why}" if why else ""
            start = StartPoint(message, image, store, remark=remark)
        undo.pop_all()
        return start


def _find_checkpoint(store: CheckpointStore, attempt: str, *, anew: bool) -> Checkpoint | None:
    """Return the job's checkpoint, if it has one. anew: remove it first."""
    try:
        found = store.begin(attempt)
        if found is not None and anew:
            store.delete_checkpoints()
            found = store.begin(attempt)
    except NotFound as error:  # NotFound would hold the job because of its image
        raise Unavailable("api", "the service does not store checkpoints of HTCondor jobs") from error
    return found


def _resume_obstacle(spec: VmSpec, message: SubmitMessage, stores: CheckpointStores) -> str:
    """Return why a saved VM cannot be resumed or does not fit the job now, or ``""``."""
    if (spec.named, spec.network) != (message.image, message.network):
        return "the saved VM has another image or network than the job now requests"
    # The disk is not compared: HTCondor gives a slot somewhat more than requested, by the node's disk.
    for name, unit in (("cpus", "processors"), ("memory", "MiB of memory")):
        had, has = getattr(spec, name), getattr(message, name)
        if had > has:
            return f"the saved VM has {had} {unit}, and the slot has {has}"
    try:
        return stores.save_obstacle(spec.image, spec.network)
    except NotFound:
        return "the image of the saved VM was removed"


@dataclass
class CheckpointedJob(LocalJob):
    """A local job with checkpoints in ``store``. found: to resume from; None: none."""

    store: CheckpointStore = field(kw_only=True)
    vm_spec: VmSpec = field(kw_only=True)
    found: Checkpoint | None = field(kw_only=True)

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """Return the ticket with the checkpoint that the store found at its own claim."""
        return super().claim(claim).model_copy(update={"checkpoint": self.found})

    def report(self, report: Report) -> None:
        """Pass the report on; tell the store if the checkpoint could not be resumed."""
        if report.reason.code is ReasonCode.NOT_RESUMED:
            try:
                self.store.report_not_resumed()
            except VMJobsError as error:
                log.warning("job %s: the failed resume is not recorded: %s", self.job_id, error)
        super().report(report)

    def open_upload(self, size: int) -> ContentReceiver:
        return self.store.open_upload(size)

    def save_checkpoint(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        self.store.save_checkpoint(upload, checkpoint.model_copy(update={"making": self.vm_spec}))

    def saved(self) -> ContentSource:
        return self.store.saved()
