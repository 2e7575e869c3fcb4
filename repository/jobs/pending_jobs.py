"""Pending jobs: jobs that are not submitted to HTCondor yet, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Select, select

from images.manifest import ImageManifest
from repository.db.models import JobRow, SubmissionRow
from repository.jobs.validation import narrow_kinds
from repository.jobs.views import submitted_spec
from vmjobs.model import JobState


def choose_arrays(waiting: Sequence[tuple[str, str, int]], limit: int) -> list[str]:
    """Choose the next arrays: each owner's first before any second one, small before large.

    waiting: array, owner and count of jobs, in order. limit: jobs in all; one array is always chosen.
    """
    turns: Counter[str] = Counter()
    ordered = []
    for array, owner, count in waiting:
        ordered.append((turns[owner], count, array))
        turns[owner] += 1
    chosen: list[str] = []
    total = 0
    for _, count, array in sorted(ordered):
        total += count
        if chosen and total > limit:
            break
        chosen.append(array)
    return chosen


def batch_job_fields(parent: SubmissionRow, manifest: bytes | None) -> dict[str, Any]:
    """Return spec and image properties of a submission as fields of ``BatchJob``."""
    # The digest is what runs, and nodes advertise the digests of their cached images (Rank).
    spec = submitted_spec(parent).model_copy(update={"image": parent.image_digest})
    if not manifest:
        return {"spec": spec}
    found = ImageManifest.parse(manifest, spec.image)
    return {
        "spec": spec,
        "kinds": narrow_kinds(spec, found.hypervisors),
        "architecture": found.architecture,
        "cloud_init": found.cloud_init,
    }


#: Conditions on JobRow: a job is queued and has no HTCondor id.
IS_PENDING: Final = (
    JobRow.state == JobState.QUEUED.value,
    JobRow.cluster.is_(None),
    JobRow.attempt == "",
)


def select_pending_jobs(*arrays: str) -> Select[JobRow]:
    """Select the pending jobs of these arrays, in the order in which rows are locked."""
    return select(JobRow).where(JobRow.array_id.in_(arrays), *IS_PENDING).order_by(JobRow.id)
