"""Everything that is wrong with a submission, in one answer.

Types and ranges are the model's to check, images and uploaded inputs the repository's. A client
should not have to mend the one kind of fault before it is told of the other.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from repository.images import Viewer
from repository.service import Repository
from repository.validation import check
from vmjobs.errors import Fault, InvalidSpec
from vmjobs.model import JobSpec

PREFIX = "spec."
#: Stand in for required fields that are missing or bad; no fault of theirs is reported twice.
_PLACEHOLDERS = {"image": "sha256:" + "0" * 64, "script": "true"}


def with_prefix(faults: tuple[Fault, ...]) -> list[Fault]:
    """Faults of a spec as faults of the body that holds it."""
    return [Fault((PREFIX + f.field).rstrip("."), f.code, f.message) for f in faults]


def remaining_faults(
    body: bytes, known: tuple[Fault, ...], repository: Repository, viewer: Viewer
) -> list[Fault]:
    """What the repository would say of the fields in which the model found no fault.

    body: well-formed JSON. known: what the model found. viewer: who submits.
    """
    spec = _object(_object(json.loads(body)).get("spec"))
    bad = {f.field.removeprefix(PREFIX).split(".")[0] for f in known if f.field.startswith(PREFIX)}
    good = {name: value for name, value in spec.items() if name not in bad}
    stand_ins = {n: v for n, v in _PLACEHOLDERS.items() if n not in good}
    try:
        candidate = JobSpec.model_validate_json(json.dumps({**good, **stand_ins}))
        nodes = repository.live_nodes()
        check(candidate, repository.config, nodes, repository.images, viewer, repository.blob_size)
    except ValidationError:
        return []  # the fault is of several fields together, and known already
    except InvalidSpec as error:
        names = {*bad, *stand_ins}
        return with_prefix(tuple(f for f in error.faults if f.field.split(".")[0] not in names))
    return []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
