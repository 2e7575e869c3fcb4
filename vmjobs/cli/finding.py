"""What `vmjobs doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a host is to unchanged jobs of HTCondor's."""

    NODE = "node"
    SCHEDD = "schedd"
    NEGOTIATOR = "negotiator"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``needed_for`` says who misses it if it does not work. role: what cannot do
    without it.
    """

    what: str
    ok: bool
    detail: str
    needed_for: str
    role: Role | None = None
