"""What condor/config/schedd.conf has jobs with an image demand of nodes."""

from __future__ import annotations

import re
from pathlib import Path

import classad2
import htcondor2  # its functions on lists of words come with it
import pytest

ROOT = Path(__file__).parents[2]


def matches(offered: str, **job: object) -> bool:
    """Whether a job demands no more than a node has, whose working hypervisors are those."""
    assert htcondor2.version()
    text = (ROOT / "condor/config/schedd.conf").read_text("utf-8")
    (found,) = re.findall(r"^ *SET Requirements (.*)$", text, re.MULTILINE)
    ad = classad2.ClassAd({"VMJobOwnRequirements": True, **job})
    node = classad2.ClassAd({"HasVMJobs": True, "VMJobsHypervisors": offered})
    return classad2.ExprTree(found).eval(ad, node) is True


@pytest.mark.parametrize(
    ("offered", "job", "expected"),
    [
        ("uml", {}, True),
        ("uml", {"VMJobCheckpoint": False}, True),
        ("uml", {"VMJobCheckpoint": True}, False),
        ("uml,qemu", {"VMJobCheckpoint": True}, True),
        ("kvm", {"VMJobCheckpoint": True}, True),
        ("kvm", {"VMJobCheckpoint": True, "VMJobHypervisor": "qemu"}, False),
        ("uml", {"VMJobCheckpoint": "yes"}, True),  # the node says what is wrong with it
        ("uml", {"VMJobHypervisor": "xen"}, True),
        ("qemu", {"VMJobHypervisor": "UML"}, False),
        ("uml", {"VMJobWaits": True}, False),
        ("uml", {"VMJobOwnRequirements": False}, False),
    ],
)
def test_which_nodes_a_job_goes_to(offered: str, job: dict[str, object], *, expected: bool) -> None:
    assert matches(offered, **job) is expected
