"""Which idle jobs offline VMs could run, by HTCondor's own matching."""

from __future__ import annotations

from typing import Any

import classad2
import pytest

from condor.pool.idle_jobs import ClusterAd, JobGroup, count_idle_jobs, with_full_capacity
from condor.pool.offline_ads import offline_ad, stable_attributes
from tests.kit.condor_daemons import ad
from vmjobs.cluster.pool import WorkerVmProfile

#: As condor_submit writes it for a job with file transfer.
ORDINARY = (
    '(TARGET.Arch == "X86_64") && (TARGET.OpSys == "LINUX") && (TARGET.Disk >= RequestDisk)'
    " && (TARGET.Memory >= RequestMemory) && TARGET.HasFileTransfer"
)
REQUEST = {"RequestCpus": 1, "RequestMemory": 128, "RequestDisk": 1024}


def kind(cluster: str = "sl3", **more: Any) -> WorkerVmProfile:
    values: dict[str, Any] = {"cpus": 2, "memory": 512, "disk": 100, "attributes": {}, "known": {}}
    return WorkerVmProfile(**{"cluster": cluster, "start": "true", **values, **more})


def offered(*kinds: WorkerVmProfile) -> list[ClusterAd]:
    return [ClusterAd(k.cluster, ad(offline_ad(k))) for k in kinds]


def jobs(count: int = 1, requirements: str = "true", **more: Any) -> JobGroup:
    job = classad2.ClassAd({**REQUEST, **more})
    job["Requirements"] = classad2.ExprTree(f"({requirements}) && {ORDINARY}")
    return JobGroup(job, count)


def present(cluster: str = "", **more: Any) -> Any:
    """The ad of a running VM of a cluster, or of a node if ``cluster`` is empty."""
    machine = ad(offline_ad(kind(cluster or "metal", **more)))
    del machine["Offline"]
    if not cluster:
        del machine["VMJobsCluster"]
        del machine["VirtualCluster"]
    return with_full_capacity(machine)


SL3 = 'TARGET.VirtualCluster == "sl3"'


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        # two processors each; jobs for another cluster do not count
        ([jobs(3, SL3), jobs(2, 'TARGET.VirtualCluster == "sl4"')], (3, 2)),
        ([jobs(4, SL3, RequestCpus=2)], (4, 4)),
        ([jobs(4, SL3, RequestMemory=256)], (4, 2)),
        ([jobs(4, SL3, RequestMemory=300)], (4, 4)),
        ([jobs(4, SL3, RequestDisk=60 * 1024)], (4, 4)),
        ([jobs(4, SL3, RequestCpus=0)], (4, 1)),
        ([jobs(1, SL3), jobs(1, SL3)], (2, 1)),
        # too large for any VM
        ([jobs(1, SL3, RequestCpus=3)], (0, 0)),
        ([jobs(1, SL3, RequestMemory=513)], (0, 0)),
        ([jobs(1, SL3, RequestDisk=200 * 1024)], (0, 0)),
    ],
)
def test_as_many_vms_as_the_jobs_fill(groups: list[JobGroup], found: tuple[int, int]) -> None:
    count, machines = found
    expected = {"sl3": {"jobs": count, "vms": machines}}
    assert count_idle_jobs(groups, offered(kind()), []) == expected


def test_a_job_that_another_vm_could_run_starts_none() -> None:
    assert count_idle_jobs([jobs()], offered(kind()), [present()])["sl3"]["jobs"] == 0
    assert count_idle_jobs([jobs(1, SL3)], offered(kind()), [present()])["sl3"]["jobs"] == 1
    # VMs of the cluster itself do not count as others.
    assert count_idle_jobs([jobs(2, SL3)], offered(kind()), [present("sl3")])["sl3"]["jobs"] == 2
    # It could run the job as soon as its present jobs have ended.
    full = present()
    full["Cpus"] = full["Memory"] = 0
    assert count_idle_jobs([jobs()], offered(kind()), [with_full_capacity(full)])["sl3"]["jobs"] == 0
    # It can never run the job: it is too small.
    assert count_idle_jobs([jobs()], offered(kind()), [present(memory=64)])["sl3"]["jobs"] == 1


def test_one_of_several_clusters_gets_a_job() -> None:
    both = offered(kind("a"), kind("b"))
    assert count_idle_jobs([jobs()], both, [])["a"]["jobs"] == 1
    assert count_idle_jobs([jobs()], both, [])["b"]["jobs"] == 0
    assert count_idle_jobs([jobs()], both, [present("b")])["b"]["jobs"] == 1  # it has a VM
    # A VM of a cluster of fixed size counts as another.
    assert count_idle_jobs([jobs()], both, [present("fixed")])["a"]["jobs"] == 0


def test_the_operators_expression_counts() -> None:
    picky = offered(kind(start="TARGET.Flavour =?= 3"))
    assert count_idle_jobs([jobs(1, SL3)], picky, [])["sl3"]["jobs"] == 0
    assert count_idle_jobs([jobs(1, SL3, Flavour=3)], picky, [])["sl3"]["jobs"] == 1


def test_what_vms_were_seen_to_say_counts() -> None:
    wanted = 'TARGET.OpSysAndVer == "Debian13"'
    assert count_idle_jobs([jobs(1, wanted)], offered(kind()), [])["sl3"]["jobs"] == 0
    seen = stable_attributes(
        {
            "OpSysAndVer": "Debian13",
            "HasVM": False,
            "TotalSlotMemory": 481,
            "Memory": 17,
            "Name": "slot1@sl3-0.vc",
            "VMJobsMember": "sl3-0",
            "Offline": True,
        }
    )
    assert seen == {"OpSysAndVer": "Debian13", "HasVM": False, "TotalSlotMemory": 481}
    known = offered(kind(known=seen))
    assert count_idle_jobs([jobs(1, wanted)], known, [])["sl3"]["jobs"] == 1
    # The memory that HTCondor finds in such a VM counts, not the declared memory.
    assert count_idle_jobs([jobs(1, wanted, RequestMemory=500)], known, [])["sl3"]["jobs"] == 0


def test_what_no_startd_says_is_not_believed() -> None:
    said = {f"Has{number}": True for number in range(1000)}
    odd = {"HasNaN": float("nan"), "HasVMJobs": True, "HasLine": "a\nb", "HasNul": "\0", "Has" * 999: 1}
    seen = stable_attributes({**said, **odd, "Arch": "x" * 2000})
    assert len(seen) == 300
    assert not {*odd, "Arch"} & {*seen}


@pytest.mark.parametrize("odd", [1e-320, "many", float("inf"), -1, 0.5, True])
def test_odd_requests_do_no_harm(odd: Any) -> None:
    found = count_idle_jobs([jobs(4, SL3), jobs(1, SL3, RequestCpus=odd)], offered(kind()), [])
    assert found["sl3"]["vms"] in {2, 3}


def test_an_offer_is_of_nobody_in_particular() -> None:
    made = ad(offline_ad(kind(attributes={"virtualcluster": "mine", "Flavour": 'a "b"'})))
    assert "VMJobsMember" not in made
    assert (made["Name"], made["Machine"]) == ("slot1@sl3.offline.vc", "sl3.offline.vc")
    assert (made["VirtualCluster"], made["Flavour"]) == ("mine", 'a "b"')
    assert made["Offline"] is True
    assert "StartdIpAddr" not in made
    assert made.eval("Unhibernate") is False
