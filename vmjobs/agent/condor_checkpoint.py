"""Transparent jobs whose VMs are saved when HTCondor vacates the job, and resumed on another node.

The repository has no record of such a job but its owner, as HTCondor names it, and what its VM was
made of (``vmjobs.model.Making``). Everything else is as in :mod:`vmjobs.agent.checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vmjobs.agent.protocol import SubmitMessage
from vmjobs.agent.starter import Starter
from vmjobs.errors import InvalidRequest, NotFound, Unavailable, VMJobsError
from vmjobs.local import LocalJob
from vmjobs.model import (
    AttemptClaim,
    Checkpoint,
    JobTicket,
    Making,
    NetworkMode,
    ReasonCode,
    Report,
)
from vmjobs.ports import CheckpointStore, ContentReceiver, ContentSource

log = logging.getLogger(__name__)


class CheckpointStores(Protocol):
    """Opens the checkpoint store of each of this node's jobs."""

    def open(self, slot: Starter) -> CheckpointStore:
        """The store for the job of a slot. slot: the process that the slot's jobs descend from.

        Raises Unavailable: HTCondor does not say now whose job that is.
        """

    def unfit(self, image: str, network: NetworkMode) -> str:
        """Why no VM of the image (a digest) can be saved, or ``""``.

        Raises NotFound: there is no such image (any more).
        """


@dataclass(frozen=True)
class StartPoint:
    """Where a transparent job starts: from nothing, or from a checkpoint.

    message: with the resources of its VM. image: digest. store: None: its VM is not saved.
    found: the checkpoint; None: it starts from nothing. remark: for the user.
    """

    message: SubmitMessage
    image: str
    store: CheckpointStore | None = None
    found: Checkpoint | None = None
    remark: str = ""

    @property
    def door(self) -> str:
        """The door token that its guest knows already; ``""``: none."""
        return self.found.making.door if self.found and self.found.making else ""

    def making(self, door: str) -> Making:
        """What its VM is made of. door: see ``Making``."""
        said = self.message
        return Making(
            named=said.image,
            image=self.image,
            door=door,
            cpus=said.cpus,
            memory=said.memory,
            disk=said.disk,
            network=said.network,
        )

    def forget(self) -> None:
        """Remove the checkpoint of a job that has ended. A failure is logged."""
        if self.store is None:
            return
        try:
            self.store.over()
        except VMJobsError as error:
            log.warning("the checkpoint of a job that has ended stays for a while: %s", error)

    def close(self) -> None:
        """Close the store."""
        if self.store is not None:
            self.store.close()


def begin(
    message: SubmitMessage,
    attempt: str,
    resolve: Callable[[str], str],
    stores: CheckpointStores,
    slot: Starter,
) -> StartPoint:
    """Where a job starts whose VM is to be saved. slot: see ``CheckpointStores``.

    Raises:
        InvalidRequest: no VM of the image can be saved. Others: as ``resolve`` and the store raise.
    """
    store = stores.open(slot)
    try:
        return _begun(message, attempt, resolve, stores, store)
    except BaseException:
        store.close()
        raise


def _begun(
    message: SubmitMessage,
    attempt: str,
    resolve: Callable[[str], str],
    stores: CheckpointStores,
    store: CheckpointStore,
) -> StartPoint:
    found = _found(store, attempt, anew=message.anew)
    why = _unfit(found.making, message, stores) if found and found.making else ""
    if found and found.making and not why:
        same = {name: getattr(found.making, name) for name in ("cpus", "memory", "disk")}
        return StartPoint(message.model_copy(update=same), found.making.image, store, found)
    image = resolve(message.image)
    if cannot := stores.unfit(image, message.network):
        raise InvalidRequest(cannot)
    return StartPoint(message, image, store, remark=f"the job begins anew: {why}" if why else "")


def _found(store: CheckpointStore, attempt: str, *, anew: bool) -> Checkpoint | None:
    """The job's checkpoint, if it has one. anew: remove it."""
    try:
        found = store.begin(attempt)
        if found is not None and anew:
            store.over()
            found = store.begin(attempt)
    except NotFound as error:  # or the job would be held for its image
        raise Unavailable("api", "the service is one that saves no jobs of HTCondor's own") from error
    return found


def _unfit(making: Making, message: SubmitMessage, stores: CheckpointStores) -> str:
    """Why a saved VM cannot be resumed, or does not fit the job now, or ``""``."""
    if (making.named, making.network) != (message.image, message.network):
        return "what was saved had another image or network than it asks for now"
    # (Not so its disk: HTCondor gives a slot somewhat more than was asked for, by the node's own disk.)
    for name, unit in (("cpus", "processors"), ("memory", "MiB of memory")):
        had, has = getattr(making, name), getattr(message, name)
        if had > has:
            return f"its machine had {had} {unit} when it was saved, and the slot has {has}"
    try:
        return stores.unfit(making.image, making.network)
    except NotFound:
        return "the image that its machine was made of when it was saved is gone"


@dataclass
class SavedJob(LocalJob):
    """A local job with checkpoints. store: for them. making: of its VM. found: to resume from."""

    store: CheckpointStore = field(kw_only=True)
    making: Making = field(kw_only=True)
    found: Checkpoint | None = field(kw_only=True)

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """It was claimed when it was asked what there is to go on from."""
        return super().claim(claim).model_copy(update={"checkpoint": self.found})

    def report(self, report: Report) -> None:
        """Pass the report on; the store hears of what lies there, if it listens."""
        if report.reason.code is ReasonCode.NOT_RESUMED:
            try:
                self.store.not_resumed()
            except VMJobsError as error:
                log.warning("job %s: it is not known that it did not go on: %s", self.job_id, error)
        super().report(report)

    def open_upload(self, size: int) -> ContentReceiver:
        """See :class:`vmjobs.ports.JobSource`."""
        return self.store.open_upload(size)

    def keep(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        """See :class:`vmjobs.ports.JobSource`."""
        self.store.keep(upload, checkpoint.model_copy(update={"making": self.making}))

    def saved(self) -> ContentSource:
        """See :class:`vmjobs.ports.JobSource`."""
        return self.store.saved()
