"""What all models share: their bases, the faults of their validation, and the time."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from vmjobs.errors import Fault

MIB: Final = 1024 * 1024
#: The context in which clients validate replies.
REPLY: Final = "reply"


class LenientModel(BaseModel):
    """A value object, immutable; ignores unknown fields, because a later release may send it."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class FrozenModel(LenientModel):
    """A value object that is strict about unknown fields, except in a reply."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _ignore_unknown(cls, data: Any, info: ValidationInfo) -> Any:
        if info.context != REPLY or not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name in cls.model_fields}


def now() -> datetime:
    return datetime.now(UTC)


#: Limit on listed faults. Megabytes of hostile JSON may have millions, of hundreds of bytes each.
MAX_FAULTS: Final = 1000
#: Replaces messages of pydantic that show a regular expression, or mention fields and inputs.
_MESSAGES: Final = {
    "string_pattern_mismatch": "has an invalid format",
    "missing": "is missing",
    "extra_forbidden": "is an unknown field",
}
_IMAGE_NAME_MESSAGE: Final = "must be like muons:2026 or mygroup/muons:2026, in lower case"
_SHOULD_PREFIX: Final = re.compile(r"^[A-Z][a-z]+ should ")


def faults_of(error: ValidationError, prefix: str = "") -> list[Fault]:
    """Convert pydantic's errors, one fault each; above MAX_FAULTS, only their number."""
    if (count := error.error_count()) > MAX_FAULTS:
        where = prefix.removesuffix(".")
        return [Fault(where, "too_many_faults", f"there are {count} faults, too many to list")]
    found = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"])
        is_name = where == "image" and item["type"] == "string_pattern_mismatch"
        sentence = _IMAGE_NAME_MESSAGE if is_name else _sentence(item["type"], item["msg"])
        found.append(Fault(f"{prefix}{where}", item["type"], sentence))
    return found


def _sentence(kind: str, message: str) -> str:
    """Rephrase a message of pydantic without types and regular expressions."""
    if kind in _MESSAGES:
        return _MESSAGES[kind]
    return _SHOULD_PREFIX.sub("must ", message.removeprefix("Value error, "), count=1)
