"""Jobs that no scheduler has yet: which they are, whose turn it is, and what they need there."""

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
    """Which arrays are next: every owner's first before any owner's second, small ones before large.

    waiting: array, owner and count of jobs, in order. limit: jobs in all; the first goes in any case.
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
    """What jobs of a submission run, and what may run it, as fields of ``BatchJob``."""
    # What runs is the digest; it is also what nodes say they have (Rank).
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


#: A job that is queued and has no place at the scheduler.
WAITING: Final = (
    JobRow.state == JobState.QUEUED.value,
    JobRow.cluster.is_(None),
    JobRow.attempt == "",
)


def waiting_jobs(*arrays: str) -> Select[JobRow]:
    """Jobs of these arrays that no scheduler has yet, in the order of all locks."""
    return select(JobRow).where(JobRow.array_id.in_(arrays), *WAITING).order_by(JobRow.id)
