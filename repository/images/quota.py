"""The quota of an owner: bytes of images, uploads, unused files and checkpoints."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from repository.db.models import BlobOwnerRow
from repository.db.sql import take_transaction_lock
from repository.images.permissions import LIBRARY
from repository.images.tables import (
    CheckpointRow,
    ContentSegmentRow,
    HoldingRow,
    ImageRow,
    SegmentRow,
    UploadRow,
)
from vmjobs.config import Config
from vmjobs.errors import QuotaExceeded
from vmjobs.model import MIB


def check_quota(session: Session, config: Config, owner: str, more: int = 0) -> None:
    """Check that ``more`` bytes fit the owner's quota; concurrent checks are serialized.

    Raises QuotaExceeded.
    """
    if not config.image_quota:
        return
    take_transaction_lock(session, f"image quota of {owner}")
    used, limit = stored_for(session, owner) + more, config.image_quota * MIB
    if used > limit:
        raise QuotaExceeded(
            f"the images and uploads of {owner} would occupy {used} bytes ({used / MIB:.1f} MiB); "
            f"the quota is {limit} bytes ({config.image_quota} MiB)",
            hint="remove images that are not needed any more, or drop an upload",
        )


def stored_for(session: Session, owner: str) -> int:
    """Return the bytes that count against an owner's quota.

    These are images, running uploads, files that no job has used, and checkpoints.
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


def stored_size(session: Session, contents: Collection[int]) -> int:
    """Return the bytes that the segments of these contents occupy."""
    needs = select(ContentSegmentRow.segment).where(ContentSegmentRow.content.in_(contents))
    stored = select(func.coalesce(func.sum(SegmentRow.stored), 0)).where(SegmentRow.id.in_(needs))
    return int(session.scalar(stored) or 0)
