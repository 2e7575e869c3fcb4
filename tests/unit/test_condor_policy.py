"""What condor/config makes of jobs with an image: their policy, their nodes and their order."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import classad2
import htcondor2  # registers its functions on string lists
import pytest

from condor import names
from condor.events import outcomes
from condor.node.chirp import ClassAdExpression
from condor.node.scratch import MIN_DISK
from condor.submit import description
from tests.kit import ROOT

if TYPE_CHECKING:
    from condor.node.chirp import AttributeValue


def config(name: str) -> str:
    return (ROOT / f"condor/config/{name}.conf").read_text("utf-8")


def policy(name: str) -> classad2.ExprTree:
    """The expression that the schedd sets in a job under that name."""
    assert htcondor2.version()
    (found,) = re.findall(rf"^ *SET {name} (.*)$", config("schedd"), re.MULTILINE)
    return classad2.ExprTree(found)


def test_the_schedds_policy_uses_the_same_words() -> None:
    text = config("schedd")
    for word in (names.VM_STATE, names.VM_SUBCODE, names.VM_REASON, names.WANTED_IMAGE):
        assert word in text
    lost = outcomes.OUTCOMES[outcomes.EXEC_LOST]
    assert f'ChirpVMSubCode =?= {lost.subcode}, strcat("{outcomes.EXEC_LOST}: {lost.why}; ' in text
    assert f"SET ChirpVMSubCode {lost.subcode}\n" in text
    assert outcomes.start_attributes(0.0)[names.VM_SUBCODE] == lost.subcode
    assert f"   SET {names.WAITS} {outcomes.wait_expression('VMJobTries')}\n" in text, (
        "as for the service's jobs"
    )
    assert f"SET {names.POLICY} {names.POLICY_VERSION}\n" in text
    assert f"TARGET.{names.POLICY} =?= {names.POLICY_VERSION})" in config("node"), (
        "schedds and nodes have one"
    )


def decided(name: str, **job: object) -> bool:
    """Whether an attribute that the schedd's policy sets is true for this job."""
    ad = classad2.ClassAd({"VMJobImage": "x", "VMJobMaxStarts": 5, names.VM_VACATED: 0, **job})
    if job.get("VMJobImage", "") is None:
        del ad["VMJobImage"]
    for needed in ("VMJobTries", "VMJobWanted", "VMJobOver", "VMJobAgain"):
        ad[needed] = policy(needed)
    return policy(name).eval(ad) is True


#: Values of VMJobImage in the job's ad, and whether each requests a VM. A word without quotes is the
#: name of an attribute that does not exist.
IMAGES = [('"generic"', True), ("generic", True), ("5", True), ("undefined", False), (None, False)]


@pytest.mark.parametrize(("written", "wanted"), IMAGES)
@pytest.mark.parametrize("name", ["schedd", "submit", "submit-router"])
def test_a_job_with_an_image_has_the_policy_however_it_was_written(
    name: str, written: str | None, *, wanted: bool
) -> None:
    (demand,) = re.findall(r"^   REQUIREMENTS (.*VMJobImage.*)$", config(name), re.MULTILINE)
    grid = {"JobUniverse": 9, "GridResource": "condor site.grid site.grid"}
    ad = classad2.ClassAd(grid if name == "submit" else {"JobUniverse": 5})
    if written is not None:
        ad["VMJobImage"] = classad2.ExprTree(written)
    assert (classad2.ExprTree(demand).eval(ad) is True) is wanted


@pytest.mark.parametrize(("written", "wanted"), IMAGES)
def test_a_job_is_held_however_its_image_was_written(written: str | None, *, wanted: bool) -> None:
    image = None if written is None else classad2.ExprTree(written)
    told = {"VMJobImage": image, "NumJobStarts": 1}
    assert decided("VMJobAgain", **told) is wanted
    told |= {names.VM_OUTCOME: outcomes.HOLD, names.VM_STATE: "FAILED"}
    assert decided("VMJobHold", **told) is wanted


@pytest.mark.parametrize(
    ("state", "outcome", "again", "held"),
    [
        (None, "again", True, False),  # no report
        ("COMPLETED", "again", False, False),  # the attributes sent with that state may be lost
        ("FAILED", "again", False, False),
        ("FAILED", "own", False, False),
        ("FAILED", "hold", False, True),
        ("PREEMPTED", "again", True, False),
        (outcomes.progress_attributes("RUNNING", "it runs")[names.VM_STATE], "again", True, False),
        (outcomes.start_attributes(0.0)[names.VM_STATE], "hold", True, False),  # of an earlier attempt
    ],
)
def test_the_jobs_own_end_is_by_its_state(
    state: AttributeValue | None, outcome: str, *, again: bool, held: bool
) -> None:
    """Only the state is sent at once: an attribute sent at once is an event in the job's log."""
    told: dict[str, object] = {names.VM_OUTCOME: outcome, "NumJobStarts": 1, "JobStatus": 2}
    if state is not None:
        expression = isinstance(state, ClassAdExpression)
        told[names.VM_STATE] = classad2.ExprTree(state.text) if expression else state
    assert decided("VMJobAgain", **told) is again
    assert decided("VMJobHold", **told) is held


def waits(tried: float | None, starts: int, outcome: str = outcomes.AGAIN) -> bool:
    """Whether the policy makes a job wait whose last attempt was ``tried`` seconds ago."""
    job: dict[str, object] = {names.VM_OUTCOME: outcome, "NumJobStarts": starts}
    if tried is not None:
        job[names.VM_TRIED] = int(time.time() - tried)
    return decided("VMJobWaits", **job)


@pytest.mark.parametrize(
    ("starts", "vacated", "held"), [(4, 0, False), (5, 0, True), (9, 5, False), (10, 5, True)]
)
def test_to_be_vacated_is_no_failure(starts: int, vacated: int, *, held: bool) -> None:
    """A job with many evictions is not held when a node fails for the first time."""
    assert outcomes.eviction_attributes(vacated) == {names.VM_VACATED: vacated + 1}
    told = {"NumJobStarts": starts, names.VM_VACATED: vacated, names.VM_OUTCOME: outcomes.AGAIN}
    assert decided("VMJobHold", **told) is held
    late = outcomes.retry_delay_seconds(starts - vacated) + 1
    assert not decided("VMJobWaits", **told, **{names.VM_TRIED: int(time.time() - late)})


@pytest.mark.parametrize("starts", [1, 2, 7, 8, 50])
def test_what_failed_waits_longer_each_time(starts: int) -> None:
    pause = outcomes.retry_delay_seconds(starts)
    assert waits(0, starts)
    assert waits(pause - 2, starts)
    assert not waits(pause + 1, starts)
    assert not waits(0, starts, outcomes.HOLD)


def test_nobody_else_waits() -> None:
    assert not waits(None, 0)
    assert not waits(None, 3)
    assert not waits(-62, 1), "the node's clock is wrong"
    assert waits(-50, 1)


#: What a node has just found out about an image that it cannot boot.
FOUND = {
    "ChirpVMImageNamed": "disk:1",
    "ChirpVMImageKinds": "kvm,qemu",
    "ChirpVMImageArch": "",
    "ChirpVMTried": time.time(),
}


def matches(offered: str, **job: object) -> bool:
    """Whether a job's requirements match a node with these working hypervisors."""
    ad = classad2.ClassAd({"VMJobOwnRequirements": True, **job})
    ad["VMJobImageKnown"] = policy("VMJobImageKnown")
    node = classad2.ClassAd(
        {
            "Arch": "X86_64",
            "VMJobsArchitectures": "s390x",
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
        ("uml", {"VMJobCheckpoint": True}, False),
        ("uml,qemu", {"VMJobCheckpoint": True}, True),
        ("uml", {"RequestCpus": 2}, False),
        ("uml,qemu", {"RequestCpus": 2}, True),
        ("uml,qemu", {"RequestCpus": 2, "VMJobHypervisor": "uml"}, False),
        ("kvm", {"VMJobCheckpoint": True}, True),
        ("kvm", {"VMJobCheckpoint": True, "VMJobHypervisor": "qemu"}, False),
        ("uml", {"VMJobCheckpoint": "yes"}, True),  # the node reports the fault
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
        ("qemu", {**FOUND, "ChirpVMImageArch": "x86_64", "VMJobImage": "disk:1"}, True),
        ("qemu", {**FOUND, "ChirpVMImageArch": "aarch64", "VMJobImage": "disk:1"}, False),
        ("qemu", {**FOUND, "ChirpVMImageArch": "s390x", "VMJobImage": "disk:1"}, True),
        (
            "uml,qemu",
            {**FOUND, "ChirpVMImageArch": "s390x", "VMJobImage": "disk:1", "VMJobHypervisor": "uml"},
            False,
        ),
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
def test_a_job_asks_for_the_disk_that_its_vm_needs(asked: str, gets: int) -> None:
    job = classad2.ClassAd({"DiskUsage": 12, "VMJobOwnRequestDisk": classad2.ExprTree(asked)})
    job["RequestDisk"] = policy("RequestDisk")
    assert job.eval("RequestDisk") == gets
    assert gets >= MIN_DISK * 1024


#: HTCondor's default NEGOTIATOR_PRE_JOB_RANK.
DEFAULT = "(10000000 * My.Rank) + (1000000 * (RemoteOwner =?= UNDEFINED)) - (100000 * Cpus) - Memory"


def preferred(machine: dict[str, object], **job: object) -> float:
    """The negotiator's rank of a node for a job, before the job's own Rank."""
    macros = dict(re.findall(r"^(\w+) = (.*)$", config("negotiator"), re.MULTILINE))
    own = macros["NEGOTIATOR_PRE_JOB_RANK"].replace("$(NEGOTIATOR_PRE_JOB_RANK)", DEFAULT)
    expression = classad2.ExprTree(own.replace("$(VMJOBS_RANK)", macros["VMJOBS_RANK"]))
    ad = {"Rank": 0.0, "Cpus": 4, "Memory": 4096, **machine}
    found = expression.eval(classad2.ClassAd(ad), classad2.ClassAd(job))
    assert isinstance(found, int | float), found
    return float(found)


TAKEN = {"RemoteOwner": "other@grid"}
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


def test_vms_that_are_off_come_last() -> None:
    """condor/config/site-clusters.conf subtracts 1.0e12 from their rank."""
    for rank in (1.0, -110.0):
        assert abs(preferred(TAKEN, VMJobRank=rank)) < 0.5e12
