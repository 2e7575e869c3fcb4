"""What condor/config/negotiator.conf adds to NEGOTIATOR_PRE_JOB_RANK."""

from __future__ import annotations

import re

import classad2
import pytest

from tests.kit import ROOT

#: HTCondor's default NEGOTIATOR_PRE_JOB_RANK.
DEFAULT = "(10000000 * My.Rank) + (1000000 * (RemoteOwner =?= UNDEFINED)) - (100000 * Cpus) - Memory"


def preferred(machine: dict[str, object], **job: object) -> float:
    """The negotiator's rank of a node for a job, before the job's own Rank."""
    text = (ROOT / "condor/config/negotiator.conf").read_text("utf-8")
    macros = dict(re.findall(r"^(\w+) = (.*)$", text, re.MULTILINE))
    own = macros["NEGOTIATOR_PRE_JOB_RANK"].replace("$(NEGOTIATOR_PRE_JOB_RANK)", DEFAULT)
    expression = classad2.ExprTree(own.replace("$(VMJOBS_RANK)", macros["VMJOBS_RANK"]))
    ad = {"Rank": 0.0, "Cpus": 4, "Memory": 4096, **machine}
    found = expression.eval(classad2.ClassAd(ad), classad2.ClassAd(job))
    assert isinstance(found, int | float), found
    return float(found)


TAKEN = {"RemoteOwner": "somebody@grid"}
FULLER = {"Memory": 128}


@pytest.mark.parametrize("job", [{}, {"VMJobRank": "much"}, {"VMJobRank": 1e30}, {"VMJobRank": -1e30}])
def test_other_jobs_notice_nothing(job: dict[str, object]) -> None:
    """A VMJobRank that is out of range changes nothing either."""
    assert preferred({}, **job) == 1000000 - 400000 - 4096
    assert preferred(FULLER, **job) > preferred({}, **job)


def test_a_job_goes_where_its_image_is_and_last_to_where_it_was() -> None:
    has, lacks, lent, was = ({"VMJobRank": rank} for rank in (1.0, 0.0, -10.0, -110.0))
    order = preferred({}, **has), preferred(FULLER, **lacks), preferred({}, **lent)
    assert order[0] > order[1] > order[2] > preferred(FULLER, **was)


def test_nobody_has_to_leave_for_it() -> None:
    assert preferred(TAKEN, VMJobRank=1.0) < preferred({}, VMJobRank=-110.0)


def test_machines_that_are_off_come_last() -> None:
    """condor/config/site-clusters.conf subtracts 1.0e12 from their rank."""
    for rank in (1.0, -110.0):
        assert abs(preferred(TAKEN, VMJobRank=rank)) < 0.5e12
