"""Generations of a cluster beside the present one: the last good one and a failed one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import flag_modified

from repository.clusters.history import HistoryEntry, record
from repository.clusters.tables import ClusterRow, ClusterVmRow, GenerationRow
from repository.db.views import view_of
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.wire import FailedGeneration


class GenerationStatus(StrEnum):
    """Why a generation is kept."""

    GOOD = "good"
    FAILED = "failed"


#: Generations by cluster and status.
Generations = dict[tuple[str, str], GenerationRow]


def generations(session: Session, cluster: str | None = None) -> Generations:
    """Load all stored generations; cluster: only of this one."""
    query = select(GenerationRow)
    if cluster is not None:
        query = query.where(GenerationRow.cluster == cluster)
    return {(row.cluster, row.standing): row for row in session.scalars(query)}


def keep_good(session: Session, known: Generations, row: ClusterRow, present: datetime) -> None:
    """Store the present generation, which is fully up, as the last good one."""
    _store(session, known, row, GenerationStatus.GOOD, "fully up", present)


def roll_back(
    session: Session, known: Generations, row: ClusterRow, why: str, present: datetime
) -> None:
    """Declare the last good generation again; the number of VMs stays.

    VMs of that generation stay, the others are replaced.
    """
    good = known[row.name, GenerationStatus.GOOD]
    _store(session, known, row, GenerationStatus.FAILED, why, present)
    row.spec = {**good.spec, "size": row.spec["size"]}
    row.image, row.kinds, row.generation = good.image, good.kinds, good.generation
    row.updated = present
    flag_modified(row, "spec")  # SQLAlchemy does not see a change from True to 1
    record(session, row, HistoryEntry("ROLLED_BACK", "REPLACEMENT_FAILED", why), present)


def last_declared(session: Session, row: ClusterRow) -> ClusterRow | GenerationRow:
    """Return the generation that was declared last, whether it has failed or not."""
    return generations(session, row.name).get((row.name, GenerationStatus.FAILED)) or row


def new_generation(
    session: Session, row: ClusterRow, spec: ClusterSpec, image: str, present: datetime
) -> None:
    """Begin a new generation. If image and VM settings are the same, present VMs move to it."""
    kept = generations(session, row.name)
    last = max(row.generation, *(other.generation for other in kept.values()), 0)
    good = kept.get((row.name, GenerationStatus.GOOD))
    present_spec = ClusterSpec.model_validate(row.spec)
    if row.image == image and _is_same_json(_vm_settings(present_spec), _vm_settings(spec)):
        mine = update(ClusterVmRow).where(ClusterVmRow.cluster == row.name)
        mine = mine.where(ClusterVmRow.generation == row.generation)
        session.execute(mine.values(generation=last + 1))
        if good and good.generation == row.generation:
            good.generation = last + 1
    allowed = spec.range
    row.target = min(max(row.target, allowed.min), allowed.max)
    row.spec, row.image = spec.model_dump(mode="json"), image
    flag_modified(row, "spec")  # SQLAlchemy does not see a change from True to 1
    row.generation = last + 1
    row.updated = present


def resize(session: Session, row: ClusterRow, size: int, present: datetime) -> None:
    """Change the number of VMs, also in a declared generation that has failed."""
    failed = last_declared(session, row)
    if isinstance(failed, GenerationRow):
        failed.spec = {**failed.spec, "size": size}
        flag_modified(failed, "spec")
    spec = ClusterSpec.model_validate({**row.spec, "size": size})
    new_generation(session, row, spec, row.image, present)


def is_same_spec(one: ClusterSpec, other: ClusterSpec) -> bool:
    """Whether two specs are equal. In Python 1 equals True, in HTCondor it does not."""
    return _is_same_json(one.model_dump(mode="json"), other.model_dump(mode="json"))


def _is_same_json(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _vm_settings(spec: ClusterSpec) -> dict[str, Any]:
    """Return the settings of a spec that each VM depends on."""
    return spec.model_dump(mode="json", exclude={"size", "image", "idle_seconds"})


def failed_view(row: GenerationRow | None) -> FailedGeneration | None:
    """Convert a generation that was rolled back for operators."""
    return None if row is None else view_of(FailedGeneration, row, message=row.why)


def _store(
    session: Session,
    known: Generations,
    row: ClusterRow,
    status: GenerationStatus,
    why: str,
    present: datetime,
) -> None:
    kept = known.get((row.name, status))
    if kept is None:
        kept = known[row.name, status] = GenerationRow(cluster=row.name, standing=status.value)
        session.add(kept)
    kept.generation, kept.spec, kept.image, kept.kinds = row.generation, row.spec, row.image, row.kinds
    flag_modified(kept, "spec")
    kept.why, kept.since = why, present
