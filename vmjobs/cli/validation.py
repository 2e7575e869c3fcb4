"""Findings of `vmjobs doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class HostRole(StrEnum):
    """The role of a host for transparent jobs."""

    NODE = "node"
    SCHEDD = "schedd"
    NEGOTIATOR = "negotiator"


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check.

    needed_for: what does not work without it. role: the role that requires it; None: optional.
    """

    what: str
    ok: bool
    detail: str
    needed_for: str
    role: HostRole | None = None
