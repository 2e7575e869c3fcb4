"""The rules of access to images, as conditions of queries.

A viewer may read an image who may read one of its holdings. For all others it does not exist.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, false, or_, select, true
from sqlalchemy.orm import Session

from repository.images.permissions import LIBRARY, Viewer
from repository.images.tables import (
    CheckpointContentRow,
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
from vmjobs.errors import NotFound
from vmjobs.model import now as utc_now
from vmjobs.wire import Visibility


def may_read(viewer: Viewer) -> ColumnElement[bool]:
    """Condition: holdings that a viewer may see, expired or not."""
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
    """Condition: segments that a viewer may use in contents without sending them.

    These are segments of the viewer's running uploads, and of images and checkpoints that the viewer
    may read. A digest alone gives no right: others than those who have the bytes may know it.
    """
    brought = (
        select(UploadSegmentRow.segment)
        .join(UploadRow, UploadRow.id == UploadSegmentRow.upload)
        .where(UploadSegmentRow.segment == SegmentRow.id, *is_own_upload(viewer))
    )
    of_content = ContentSegmentRow.content
    part = select(of_content).where(ContentSegmentRow.segment == SegmentRow.id)
    readable = part.join(ImageContentRow, ImageContentRow.content == of_content)
    saved = part.join(CheckpointContentRow, CheckpointContentRow.content == of_content)
    return _any_of(viewer, brought, readable, saved)


def may_use_content(viewer: Viewer) -> ColumnElement[bool]:
    """Condition: contents that a viewer may use in images, see :func:`may_use_segment`."""
    brought = (
        select(UploadContentRow.content)
        .join(UploadRow, UploadRow.id == UploadContentRow.upload)
        .where(UploadContentRow.content == ContentRow.id, *is_own_upload(viewer))
    )
    readable = select(ImageContentRow.image).where(ImageContentRow.content == ContentRow.id)
    saved = select(CheckpointContentRow.job_id).where(CheckpointContentRow.content == ContentRow.id)
    return _any_of(viewer, brought, readable, saved)


def is_own_upload(viewer: Viewer) -> tuple[ColumnElement[bool], ...]:
    """Conditions: uploads of the viewer."""
    return UploadRow.owner == viewer.user, UploadRow.job_id == viewer.job


def _any_of(
    viewer: Viewer, brought: Select[Any], readable: Select[Any], saved: Select[Any]
) -> ColumnElement[bool]:
    ways = [brought.exists(), readable.where(_readable_image(viewer)).exists()]
    if viewer.job:
        ways.append(saved.where(CheckpointContentRow.job_id == viewer.job).exists())
    return or_(*ways)


def _readable_image(viewer: Viewer) -> ColumnElement[bool]:
    """Condition on ImageContentRow: the viewer may read the image."""
    if viewer.image is not None:
        return ImageContentRow.image == viewer.image
    if viewer.sees_all:
        return true()
    held = select(HoldingRow.id).where(HoldingRow.image == ImageContentRow.image)
    return held.where(may_read(viewer), is_unexpired(utc_now())).exists()


def is_unexpired(present: datetime | ColumnElement[datetime]) -> ColumnElement[bool]:
    """Condition: holdings that have not expired."""
    return or_(HoldingRow.expires.is_(None), HoldingRow.expires > present)


def may_write(viewer: Viewer) -> ColumnElement[bool]:
    """Condition: holdings that the viewer may change; administrators may change the library."""
    if viewer.image is not None or viewer.node:
        return false()
    own = and_(HoldingRow.owner == viewer.user, HoldingRow.namespace != LIBRARY)
    return or_(own, HoldingRow.namespace == LIBRARY) if viewer.admin else own


def holding_of(session: Session, viewer: Viewer, digest: str) -> HoldingRow | None:
    """Return the holding through which the viewer may read an image.

    The viewer's own comes before the library's and others'. ``None`` if no holding is needed: for a
    node, a job whose image it is, an administrator.
    Raises NotFound; the error says so if the image has expired.
    """
    query = (
        select(HoldingRow)
        .where(HoldingRow.image == digest, may_read(viewer))
        .order_by(HoldingRow.owner != viewer.user, HoldingRow.namespace != LIBRARY, HoldingRow.id)
    )
    found = session.scalars(query).all()
    present = utc_now()
    for holding in found:
        if not is_expired(holding, present):
            return holding
    if (viewer.sees_all or viewer.image == digest) and session.get(ImageRow, digest) is not None:
        return found[0] if found else None
    raise expired_error(found[0], digest) if found else image_not_found(digest)


def is_expired(holding: HoldingRow, present: datetime) -> bool:
    return holding.expires is not None and holding.expires <= present


def image_not_found(ref: str) -> NotFound:
    """Return the error for an image that does not exist, or that the viewer may not see."""
    return NotFound(f"there is no image {ref[:200]}")


def expired_error(holding: HoldingRow, ref: str) -> NotFound:
    """Return the error for an expired image that the viewer was allowed to see."""
    when = holding.expires.strftime("%Y-%m-%d %H:%M") if holding.expires else ""
    return NotFound(
        f"the image {ref[:200]} expired at {when} UTC", hint="push it again, or use a newer one"
    )


def manifest_of(session: Session, digest: str) -> bytes:
    """Return an image's manifest as it is stored; empty if there is no such image."""
    query = select(ImageRow.manifest).where(ImageRow.digest == digest)
    return session.scalars(query).one_or_none() or b""
