"""Explains a job, as its schedd and the daemons of its pool know it."""

from __future__ import annotations

from unittest.mock import patch

from condor.diagnose.explainer import JobExplanation, explain_job
from condor.diagnose.findings import JobLocation
from tests.kit.condor_daemons import Daemons

HERE = JobLocation("", "", 3, 0)


def explain(said: Daemons, place: JobLocation = HERE) -> JobExplanation:
    with patch("condor.diagnose.explainer.call", said):
        return explain_job(place)


def codes(found: JobExplanation) -> list[str]:
    return [finding.code for finding in found.findings]


def rejected(why: str, at: str = "1795228180") -> dict[str, str]:
    """Attributes of a job that the negotiator rejected after its last match, or before."""
    return {"LastRejMatchTime": at, "LastMatchTime": "1795228100", "LastRejMatchReason": why}
