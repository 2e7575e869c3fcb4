"""References to images: jobs that have not ended, and virtual clusters."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, Select, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from repository.clusters.tables import ClusterRow, ClusterVmRow, GenerationRow
from repository.db.models import JobRow, SubmissionRow
from repository.images.permissions import LIBRARY, Viewer
from repository.images.tables import HoldingRow, ImageRow, ShareRow
from vmjobs.errors import ImageInUse
from vmjobs.model import JobState
from vmjobs.wire import Visibility

_FINAL: Final = [state.value for state in JobState if state.final]
#: Jobs or clusters that an error names.
MAX_NAMED: Final = 5


def is_needed() -> ColumnElement[bool]:
    """Condition on ImageRow: a job or a cluster needs the image."""
    jobs = _jobs(ImageRow.digest)
    clusters = select(ClusterRow.name).where(ClusterRow.image == ImageRow.digest)
    # VMs of earlier generations, until the last one has ended.
    vms = select(ClusterVmRow.id).where(ClusterVmRow.image == ImageRow.digest)
    # Generations for a rollback, or for a retry.
    kept = select(GenerationRow.cluster).where(GenerationRow.image == ImageRow.digest)
    return or_(jobs.exists(), clusters.exists(), vms.exists(), kept.exists())


def is_unheld() -> ColumnElement[bool]:
    """Condition on ImageRow: the image has no holding."""
    return ~select(HoldingRow.id).where(HoldingRow.image == ImageRow.digest).exists()


def refuse_if_needed(session: Session, holding: HoldingRow, viewer: Viewer) -> None:
    """Check that no jobs or clusters use the image through this holding.  Raises ImageInUse.

    A private holding serves its owner's jobs only; another user's job with the same image uses another
    holding, and is not revealed.
    """
    jobs, clusters = _jobs(holding.image), _clusters(holding.image)
    if not _serves_others(session, holding):
        jobs = jobs.where(JobRow.owner == holding.owner)
        clusters = clusters.where(ClusterRow.owner == holding.owner)
    if names := session.scalars(clusters.order_by(ClusterRow.name).limit(MAX_NAMED)).all():
        raise ImageInUse(
            f"the image {holding.image} is needed by virtual clusters: {', '.join(names)}",
            hint="declare them with another image, or delete them; then wait for their last VMs",
        )
    count = session.scalar(jobs.with_only_columns(func.count())) or 0
    if not count:
        return
    mine = jobs if viewer.sees_all else jobs.where(JobRow.owner == viewer.user)
    named: list[str] = list(session.scalars(mine.order_by(JobRow.id).limit(MAX_NAMED)))
    rest = count - len(named)
    words = named if not rest else [*named, f"{rest} more" if named else f"{rest} of other users"]
    raise ImageInUse(
        f"the image {holding.image} is needed by jobs that have not ended: {', '.join(words)}",
        hint="wait until they have ended, or cancel them",
    )


def _jobs(digest: str | InstrumentedAttribute[str]) -> Select[Any]:
    return (
        select(JobRow.id)
        .join(SubmissionRow, SubmissionRow.id == JobRow.array_id)
        .where(SubmissionRow.image_digest == digest, JobRow.state.not_in(_FINAL))
    )


def _clusters(digest: str) -> Select[Any]:
    of_members = select(ClusterVmRow.cluster).where(ClusterVmRow.image == digest)
    kept = select(GenerationRow.cluster).where(GenerationRow.image == digest)
    return select(ClusterRow.name).where(
        or_(
            ClusterRow.image == digest,
            ClusterRow.name.in_(of_members),
            ClusterRow.name.in_(kept),
        )
    )


def _serves_others(session: Session, holding: HoldingRow) -> bool:
    if holding.namespace == LIBRARY or holding.visibility == Visibility.PUBLIC:
        return True
    shares = select(ShareRow.holding).where(ShareRow.holding == holding.id).limit(1)
    return session.scalars(shares).one_or_none() is not None
