"""Unchanged jobs whose machines are saved where HTCondor vacates them, and go on elsewhere.

No repository knows such a job: what is said of it there is whose it is, by HTCondor's word, and what
its machine was made of (``vmjobs.model.Making``). Otherwise :mod:`vmjobs.agent.checkpoint` holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vmjobs.agent.protocol import HandMessage
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
from vmjobs.ports import ContentReceiver, ContentSource, Shelf

log = logging.getLogger(__name__)


class Shelves(Protocol):
    """Where machines of this node's jobs are kept."""

    def open(self, slot: Starter) -> Shelf:
        """The place for the job of a slot, by the process that its jobs descend from.

        Raises Unavailable: HTCondor does not say now whose job that is.
        """

    def unfit(self, image: str, network: NetworkMode) -> str:
        """Why no machine of the image, by its digest, can be saved, or ``""``.

        Raises NotFound: there is no such image (any more).
        """


@dataclass(frozen=True)
class Beginning:
    """How a job begins that was handed over.

    message: with what its machine has, or had. image: digest. shelf: None: its machine is not saved.
    found: what it goes on from; None: it begins at the beginning. remark: what to say of that.
    """

    message: HandMessage
    image: str
    shelf: Shelf | None = None
    found: Checkpoint | None = None
    remark: str = ""

    @property
    def door(self) -> str:
        """The secret of the door that its guest knows already; ``""``: none."""
        return self.found.making.door if self.found and self.found.making else ""

    def making(self, door: str) -> Making:
        """What its machine is made of. door: see ``Making``."""
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
        """Have what was saved forgotten: the job is over. Failing to is logged."""
        if self.shelf is None:
            return
        try:
            self.shelf.over()
        except VMJobsError as error:
            log.warning("what was saved of a job that is over stays for a while: %s", error)

    def close(self) -> None:
        """Nothing of the shelf is needed any more."""
        if self.shelf is not None:
            self.shelf.close()


def begin(
    message: HandMessage, attempt: str, resolve: Callable[[str], str], shelves: Shelves, slot: Starter
) -> Beginning:
    """How a job begins whose machine is to be saved. slot: see ``Shelves``.

    Raises:
        InvalidRequest: no machine of the image can be saved. Others: as ``resolve`` and ``Shelf`` do.
    """
    shelf = shelves.open(slot)
    try:
        return _begun(message, attempt, resolve, shelves, shelf)
    except BaseException:
        shelf.close()
        raise


def _begun(
    message: HandMessage, attempt: str, resolve: Callable[[str], str], shelves: Shelves, shelf: Shelf
) -> Beginning:
    found = _found(shelf, attempt, anew=message.anew)
    why = _unfit(found.making, message, shelves) if found and found.making else ""
    if found and found.making and not why:
        same = {name: getattr(found.making, name) for name in ("cpus", "memory", "disk")}
        return Beginning(message.model_copy(update=same), found.making.image, shelf, found)
    image = resolve(message.image)
    if cannot := shelves.unfit(image, message.network):
        raise InvalidRequest(cannot)
    return Beginning(message, image, shelf, remark=f"the job begins anew: {why}" if why else "")


def _found(shelf: Shelf, attempt: str, *, anew: bool) -> Checkpoint | None:
    """What there is to go on from. anew: nothing of it is to be left."""
    try:
        found = shelf.begin(attempt)
        if found is not None and anew:
            shelf.over()
            found = shelf.begin(attempt)
    except NotFound as error:  # or the job would be held for its image
        raise Unavailable("api", "the service is one that saves no jobs of HTCondor's own") from error
    return found


def _unfit(making: Making, message: HandMessage, shelves: Shelves) -> str:
    """Why a machine that was saved does not go on, or is not what its job is to have now, or ``""``."""
    if (making.named, making.network) != (message.image, message.network):
        return "what was saved had another image or network than it asks for now"
    # (Not so its disk: HTCondor gives a slot somewhat more than was asked for, by the node's own disk.)
    for name, unit in (("cpus", "processors"), ("memory", "MiB of memory")):
        had, has = getattr(making, name), getattr(message, name)
        if had > has:
            return f"its machine had {had} {unit} when it was saved, and the slot has {has}"
    try:
        return shelves.unfit(making.image, making.network)
    except NotFound:
        return "the image that its machine was made of when it was saved is gone"


@dataclass
class KeptJob(LocalJob):
    """A local job that is saved.  shelf: where. making: of its machine. found: what it goes on from."""

    shelf: Shelf = field(kw_only=True)
    making: Making = field(kw_only=True)
    found: Checkpoint | None = field(kw_only=True)

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """It was claimed when it was asked what there is to go on from."""
        return super().claim(claim).model_copy(update={"checkpoint": self.found})

    def report(self, report: Report) -> None:
        """Pass the report on; the shelf hears of what lies there, if it listens."""
        if report.reason.code is ReasonCode.NOT_RESUMED:
            try:
                self.shelf.not_resumed()
            except VMJobsError as error:
                log.warning("job %s: it is not known that it did not go on: %s", self.job_id, error)
        super().report(report)

    def open_upload(self, size: int) -> ContentReceiver:
        """See :class:`vmjobs.ports.JobSource`."""
        return self.shelf.open_upload(size)

    def keep(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        """See :class:`vmjobs.ports.JobSource`."""
        self.shelf.keep(upload, checkpoint.model_copy(update={"making": self.making}))

    def saved(self) -> ContentSource:
        """See :class:`vmjobs.ports.JobSource`."""
        return self.shelf.saved()
