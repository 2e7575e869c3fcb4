"""What all parts of the image repository share: collaborators, and who may read what.

An image may be read by whoever may read one of its holdings. To everybody else it does not exist.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, false, func, or_, select, true
from sqlalchemy.orm import Session

from images.manifest import ImageManifest
from repository.database import Database
from repository.images.sql import alone
from repository.images.tables import (
    CheckpointContentRow,
    CheckpointRow,
    ContentRow,
    ContentSegmentRow,
    HoldingRow,
    ImageContentRow,
    ImageRow,
    SegmentRow,
    ShareRow,
    UploadContentRow,
    UploadRow,
    UploadSegmentRow,
)
from repository.images.viewer import LIBRARY, Viewer
from repository.models import BlobOwnerRow
from repository.objects import ObjectStore
from vmjobs.config import Config
from vmjobs.errors import NotFound, QuotaExceeded
from vmjobs.model import MIB
from vmjobs.model import now as utc_now
from vmjobs.wire import Visibility

#: Objects that no row names are removed when they are this old (seconds). Whoever stores one has
#: half of the time to say so in the database.
ORPHAN_SECONDS: Final = 3600.0


class ImageCore:
    """Holds the collaborators. Nothing is opened here; safe to share between threads."""

    def __init__(
        self,
        database: Database,
        objects: ObjectStore,
        config: Config,
        *,
        orphan_seconds: float = ORPHAN_SECONDS,
    ) -> None:
        self.database = database
        self.objects = objects
        self.config = config
        self.orphan_seconds = orphan_seconds

    @property
    def patience(self) -> timedelta:
        """How long what nothing refers to is kept."""
        return timedelta(seconds=self.config.upload_seconds)

    def check_quota(self, session: Session, owner: str, more: int = 0) -> None:
        """Refuse to keep ``more`` bytes beyond what the owner has; no other upload gets between.

        Raises QuotaExceeded.
        """
        if not self.config.image_quota:
            return
        alone(session, f"image quota of {owner}")
        used, limit = stored_for(session, owner) + more, self.config.image_quota * MIB
        if used > limit:
            raise QuotaExceeded(
                f"the images and uploads of {owner} would occupy {used} bytes ({used / MIB:.1f} MiB); "
                f"the quota is {limit} bytes ({self.config.image_quota} MiB)",
                hint="remove images that are not needed any more, or drop an upload",
            )


def stored_for(session: Session, owner: str) -> int:
    """Bytes that count against an owner's quota: of images, running uploads, files that no job has
    used, and saved machines.
    """
    images = (
        select(func.coalesce(func.sum(ImageRow.stored), 0))
        .join(HoldingRow, HoldingRow.image == ImageRow.digest)
        .where(HoldingRow.owner == owner, HoldingRow.namespace != LIBRARY)
    )
    uploads = select(func.coalesce(func.sum(UploadRow.received), 0)).where(UploadRow.owner == owner)
    saved = select(func.coalesce(func.sum(CheckpointRow.stored), 0)).where(CheckpointRow.owner == owner)
    unused = (BlobOwnerRow.owner == owner, BlobOwnerRow.used.is_(False))
    files = select(func.coalesce(func.sum(BlobOwnerRow.size), 0)).where(*unused)
    return sum(int(session.scalar(query) or 0) for query in (images, uploads, files, saved))


def may_read(viewer: Viewer) -> ColumnElement[bool]:
    """Of which holdings a viewer may know, were they not over."""
    if viewer.image is not None:
        return HoldingRow.image == viewer.image
    if viewer.sees_all:
        return true()
    shared = [and_(ShareRow.kind == "user", ShareRow.name == viewer.user)]
    if viewer.groups:
        shared.append(and_(ShareRow.kind == "group", ShareRow.name.in_(sorted(viewer.groups))))
    return or_(
        HoldingRow.owner == viewer.user,
        HoldingRow.visibility == Visibility.PUBLIC.value,
        select(ShareRow.holding).where(ShareRow.holding == HoldingRow.id, or_(*shared)).exists(),
    )


def may_use_segment(viewer: Viewer) -> ColumnElement[bool]:
    """Which segments a viewer may make contents of without sending them.

    Those that came with an own upload that still runs, and those of what the viewer may read. A
    digest alone gives no right: it may be known to others than those who have the bytes.
    """
    brought = (
        select(UploadSegmentRow.segment)
        .join(UploadRow, UploadRow.id == UploadSegmentRow.upload)
        .where(UploadSegmentRow.segment == SegmentRow.id, *_own_upload(viewer))
    )
    of_content = ContentSegmentRow.content
    part = select(of_content).where(ContentSegmentRow.segment == SegmentRow.id)
    readable = part.join(ImageContentRow, ImageContentRow.content == of_content)
    saved = part.join(CheckpointContentRow, CheckpointContentRow.content == of_content)
    return _any_of(viewer, brought, readable, saved)


def may_use_content(viewer: Viewer) -> ColumnElement[bool]:
    """Which contents a viewer may make images of: see :func:`may_use_segment`."""
    brought = (
        select(UploadContentRow.content)
        .join(UploadRow, UploadRow.id == UploadContentRow.upload)
        .where(UploadContentRow.content == ContentRow.id, *_own_upload(viewer))
    )
    readable = select(ImageContentRow.image).where(ImageContentRow.content == ContentRow.id)
    saved = select(CheckpointContentRow.job_id).where(CheckpointContentRow.content == ContentRow.id)
    return _any_of(viewer, brought, readable, saved)


def _own_upload(viewer: Viewer) -> tuple[ColumnElement[bool], ...]:
    return UploadRow.owner == viewer.user, UploadRow.job_id == viewer.job


def _any_of(
    viewer: Viewer, brought: Select[Any], readable: Select[Any], saved: Select[Any]
) -> ColumnElement[bool]:
    ways = [brought.exists(), readable.where(_readable_image(viewer)).exists()]
    if viewer.job:
        ways.append(saved.where(CheckpointContentRow.job_id == viewer.job).exists())
    return or_(*ways)


def _readable_image(viewer: Viewer) -> ColumnElement[bool]:
    """Of which rows of images' contents: those of images that the viewer may read."""
    if viewer.image is not None:
        return ImageContentRow.image == viewer.image
    if viewer.sees_all:
        return true()
    held = select(HoldingRow.id).where(HoldingRow.image == ImageContentRow.image)
    return held.where(may_read(viewer), alive(utc_now())).exists()


def alive(present: datetime | ColumnElement[datetime]) -> ColumnElement[bool]:
    """Holdings whose time is not over."""
    return or_(HoldingRow.expires.is_(None), HoldingRow.expires > present)


def may_write(viewer: Viewer) -> ColumnElement[bool]:
    """Holdings that are the viewer's to change: his own, and the library's for administrators."""
    if viewer.image is not None or viewer.node:
        return false()
    own = and_(HoldingRow.owner == viewer.user, HoldingRow.namespace != LIBRARY)
    return or_(own, HoldingRow.namespace == LIBRARY) if viewer.admin else own


def holding_of(session: Session, viewer: Viewer, digest: str) -> HoldingRow | None:
    """The holding by which the viewer may read an image: his own before the library's and others'.

    ``None`` where he may because of what he is: a node, a job whose image it is, an administrator.
    Raises NotFound; it says so if the image's time is over.
    """
    query = (
        select(HoldingRow)
        .where(HoldingRow.image == digest, may_read(viewer))
        .order_by(HoldingRow.owner != viewer.user, HoldingRow.namespace != LIBRARY, HoldingRow.id)
    )
    found = session.scalars(query).all()
    present = utc_now()
    for holding in found:
        if not over(holding, present):
            return holding
    if (viewer.sees_all or viewer.image == digest) and session.get(ImageRow, digest) is not None:
        return found[0] if found else None
    raise expired(found[0], digest) if found else missing(digest)


def over(holding: HoldingRow, present: datetime) -> bool:
    """Whether a holding's time is over."""
    return holding.expires is not None and holding.expires <= present


def missing(ref: str) -> NotFound:
    """The error for an image that is not there, or not the viewer's to see."""
    return NotFound(f"there is no image {ref[:200]}")


def expired(holding: HoldingRow, ref: str) -> NotFound:
    """The error for an image that was the viewer's to see until its time was over."""
    when = holding.expires.strftime("%Y-%m-%d %H:%M") if holding.expires else ""
    return NotFound(
        f"the image {ref[:200]} expired at {when} UTC", hint="push it again, or use a newer one"
    )


def manifest_of(session: Session, digest: str) -> bytes:
    """An image's manifest as it is stored; empty where there is no such image."""
    query = select(ImageRow.manifest).where(ImageRow.digest == digest)
    return session.scalars(query).one_or_none() or b""


def parsed(data: bytes, digest: str) -> ImageManifest:
    """A stored manifest.  Raises DigestMismatch: the database is damaged."""
    return ImageManifest.parse(data, digest)
