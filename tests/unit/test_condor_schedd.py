"""What condor/config/schedd.conf makes jobs with an image require of nodes."""

from __future__ import annotations

import re
import time

import classad2
import htcondor2  # registers its functions on string lists
import pytest

from condor.node.scratch import MIN_DISK
from condor.submit import description
from tests.kit import ROOT

#: What a node has just found out about an image that it cannot boot.
FOUND = {
    "ChirpVMImageNamed": "disk:1",
    "ChirpVMImageKinds": "kvm,qemu",
    "ChirpVMImageArch": "",
    "ChirpVMTried": time.time(),
}


def policy(name: str) -> classad2.ExprTree:
    """The expression that the schedd sets in a job under that name."""
    assert htcondor2.version()
    text = (ROOT / "condor/config/schedd.conf").read_text("utf-8")
    (found,) = re.findall(rf"^ *SET {name} (.*)$", text, re.MULTILINE)
    return classad2.ExprTree(found)


def matches(offered: str, **job: object) -> bool:
    """Whether a job's requirements match a node with these working hypervisors."""
    ad = classad2.ClassAd({"VMJobOwnRequirements": True, **job})
    ad["VMJobImageKnown"] = policy("VMJobImageKnown")
    node = classad2.ClassAd(
        {
            "Arch": "X86_64",
            "HasVMJobs": True,
            "VMJobsHypervisors": offered,
            "VMJobsMemory": 4096,
            "VMJobsDisk": 10 * 1024,
        }
    )
    return policy("Requirements").eval(ad, node) is True


@pytest.mark.parametrize(
    ("offered", "job", "expected"),
    [
        ("uml", {}, True),
        ("uml", {"VMJobCheckpoint": False}, True),
        ("uml", {"VMJobCheckpoint": True}, False),
        ("uml,qemu", {"VMJobCheckpoint": True}, True),
        ("uml", {"RequestCpus": 1}, True),
        ("uml", {"RequestCpus": 2}, False),
        ("uml,qemu", {"RequestCpus": 2}, True),
        ("uml,qemu", {"RequestCpus": 2, "VMJobHypervisor": "uml"}, False),
        ("uml,qemu", {"RequestCpus": 2, "VMJobHypervisor": "qemu"}, True),
        ("kvm", {"VMJobCheckpoint": True}, True),
        ("kvm", {"VMJobCheckpoint": True, "VMJobHypervisor": "qemu"}, False),
        ("uml", {"VMJobCheckpoint": "yes"}, True),  # the node reports the fault
        ("uml", {"VMJobHypervisor": "xen"}, True),
        ("qemu", {"VMJobHypervisor": "UML"}, False),
        ("uml", {"VMJobWaits": True}, False),
        ("uml", {"VMJobOwnRequirements": False}, False),
        ("uml", {"RequestMemory": 4096, "RequestDisk": 10 * 1024 * 1024}, True),
        ("uml", {"RequestMemory": 4097}, False),
        ("uml", {"RequestDisk": 10 * 1024 * 1024 + 1}, False),
        ("uml", {**FOUND, "VMJobImage": "disk:1"}, False),
        ("uml,qemu", {**FOUND, "VMJobImage": "disk:1"}, True),
        ("uml", {**FOUND, "VMJobImage": "hep:1"}, True),
        ("uml", {**FOUND, "VMJobImage": "disk:1", "ChirpVMTried": time.time() - 3601}, True),
        ("uml", {"VMJobImage": "hep:1"}, True),
        ("qemu", {**FOUND, "ChirpVMImageArch": "x86_64", "VMJobImage": "disk:1"}, True),
        ("qemu", {**FOUND, "ChirpVMImageArch": "aarch64", "VMJobImage": "disk:1"}, False),
    ],
)
def test_which_nodes_a_job_goes_to(offered: str, job: dict[str, object], *, expected: bool) -> None:
    assert matches(offered, **job) is expected


@pytest.mark.parametrize(
    ("image", "node", "last", "expected"),
    [
        ("hep:1", {"VMJobsImageNames": "worker,hep:1"}, "", 1.0),
        ("hep:1", {"VMJobsImageNames": "worker,hep"}, "", 0.0),
        ("hep:1", {}, "", 0.0),
        ("sha256:ab", {"VMJobsImageDigests": "sha256:ab", "VMJobsImageNames": ""}, "", 1.0),
        ("hep:1", {"VMJobsImageNames": "hep:1"}, "slot1_1@n1.grid", -99.0),
        ("hep:1", {"VMJobsImageNames": "hep:1"}, "slot1_1@n2.grid", 1.0),
        ("hep:1", {"VMJobsMemoryFree": 511}, "", -10.0),
        ("hep:1", {"VMJobsMemoryFree": 512, "VMJobsImageNames": "hep:1"}, "", 1.0),
    ],
)
def test_which_nodes_a_job_prefers(
    image: str, node: dict[str, object], last: str, expected: float
) -> None:
    asked = {"VMJobImage": image, "RequestMemory": 512}
    job = classad2.ClassAd({**asked, **({"LastRemoteHost": last} if last else {})})
    slot = classad2.ClassAd({"Name": "slot1@n1.grid", **node})
    assert policy("VMJobRank").eval(job, slot) == expected


def test_what_keeps_a_job_from_a_node_is_the_same_for_the_jobs_of_the_service() -> None:
    """The node of its last run, and nodes whose memory other VMs use."""
    text = str(policy("VMJobRank"))
    elsewhere = str(classad2.ExprTree(description.rank("hep:1")))
    assert text.endswith(f" + {elsewhere}")
    cached = str(classad2.ExprTree(description.rank(f"sha256:{'a' * 64}")))
    assert cached.endswith(f" + {elsewhere}")


@pytest.mark.parametrize(
    ("asked", "gets"),
    [("DiskUsage", 1048576), ("1024", 1048576), ("4194304", 4194304), ("undefined", 1048576)],
)
def test_a_job_asks_for_the_disk_that_its_machine_needs(asked: str, gets: int) -> None:
    job = classad2.ClassAd({"DiskUsage": 12, "VMJobOwnRequestDisk": classad2.ExprTree(asked)})
    job["RequestDisk"] = policy("RequestDisk")
    assert job.eval("RequestDisk") == gets
    assert gets >= MIN_DISK * 1024
