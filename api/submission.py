"""Collects all faults of a submission in one answer.

The model checks types and ranges, the repository images and uploaded inputs. A client should not have
to fix the one kind of fault before it learns of the other.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from repository.images import Viewer
from repository.jobs.submissions import Submissions
from vmjobs.errors import Fault, InvalidSpec
from vmjobs.model import JobSpec

PREFIX = "spec."
#: Replace required fields that are missing or invalid; their faults are not reported twice.
_PLACEHOLDERS = {"image": "sha256:" + "0" * 64, "script": "true"}


def prefix_faults(faults: tuple[Fault, ...]) -> list[Fault]:
    """Return faults of a spec as faults of the body that contains it."""
    return [Fault((PREFIX + f.field).rstrip("."), f.code, f.message) for f in faults]


def repository_faults(
    body: bytes, known: tuple[Fault, ...], submissions: Submissions, viewer: Viewer
) -> list[Fault]:
    """Return the repository's faults in the fields that are valid for the model.

    body: well-formed JSON. known: the model's faults. viewer: the submitter.
    """
    spec = _object(_object(json.loads(body)).get("spec"))
    bad = {f.field.removeprefix(PREFIX).split(".")[0] for f in known if f.field.startswith(PREFIX)}
    good = {name: value for name, value in spec.items() if name not in bad}
    stand_ins = {n: v for n, v in _PLACEHOLDERS.items() if n not in good}
    try:
        candidate = JobSpec.model_validate_json(json.dumps({**good, **stand_ins}))
        submissions.validate(candidate, viewer)
    except ValidationError:
        return []  # a fault of several fields together, known already
    except InvalidSpec as error:
        names = {*bad, *stand_ins}
        return prefix_faults(tuple(f for f in error.faults if f.field.split(".")[0] not in names))
    return []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
