"""Pending jobs: jobs that are not submitted to HTCondor yet, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Select, select

from repository.images.access import parsed
from repository.models import JobRow, SubmissionRow
from repository.validation import narrowed
from repository.views import submitted_spec
from vmjobs.model import JobState


def in_turn(waiting: Sequence[tuple[str, str, int]], limit: int) -> list[str]:
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


def needs(parent: SubmissionRow, manifest: bytes | None) -> dict[str, Any]:
    """Return spec and image properties of a submission as fields of ``BatchJob``."""
    # The digest is what runs, and nodes advertise the digests of their cached images (Rank).
    spec = submitted_spec(parent).model_copy(update={"image": parent.image_digest})
    if not manifest:
        return {"spec": spec}
    found = parsed(manifest, spec.image)
    return {
        "spec": spec,
        "kinds": narrowed(spec, found.hypervisors),
        "architecture": found.architecture,
        "cloud_init": found.cloud_init,
    }


#: Conditions on JobRow: a job is queued and has no HTCondor id.
WAITING: Final = (
    JobRow.state == JobState.QUEUED.value,
    JobRow.cluster.is_(None),
    JobRow.attempt == "",
)


def waiting_jobs(*arrays: str) -> Select[JobRow]:
    """Select the pending jobs of these arrays, in the order in which rows are locked."""
    return select(JobRow).where(JobRow.array_id.in_(arrays), *WAITING).order_by(JobRow.id)
