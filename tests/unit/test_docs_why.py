"""What people are told about `vmjobs job why`, against the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "htcondor-jobs.md").read_text("utf-8")
SOURCES = ("condor/why.py", "condor/why_pool.py", "condor/why_read.py", "vmjobs/cli/job_why_service.py")


def codes() -> set[str]:
    text = "".join((ROOT / source).read_text("utf-8") for source in SOURCES)
    found = set(re.findall(r'"([A-Z]+_[A-Z_]+|[A-Z]{4,})"', text))
    return found - {"TARGET"}


@pytest.mark.parametrize("code", sorted(codes()))
def test_every_code_is_in_the_guide(code: str) -> None:
    assert f"`{code}`" in GUIDE
