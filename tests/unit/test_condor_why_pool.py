"""Explanations of why an HTCondor job has no node, from the ads of its pool."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.condor_daemons import ad, daemons, node, queued
from tests.kit.condor_why import codes, explain, rejected

#: The codes, the message, and the attributes of job and node that cause them.
NO_NODE: list[tuple[list[str], str, *tuple[dict[str, str], ...]]] = [
    (
        ["WAITING"],
        "1 node could take it now (node1.grid); the last known negotiation cycle ended 10 s ago",
        {},
    ),
    (
        ["WAITING"],
        "the negotiator's last answer was 'no match found', 20 s ago",
        rejected('"no match found "'),
    ),
    (
        ["LIMIT", "WAITING"],
        "submitter limit exceeded, 20 s ago",
        rejected('"submitter limit exceeded"'),
    ),
    (
        ["PRIORITY", "BUSY"],
        "other jobs go first: insufficient priority",
        rejected('"insufficient priority"'),
        {"Cpus": "0"},
    ),
    # The match is newer than the rejection.
    (["WAITING"], "", rejected('"quota"', at="5")),
    (["BUSY"], "taken by other jobs (1 node: node1.grid)", {}, {"Cpus": "0"}),
    (["ASLEEP"], "switched off (node1.grid)", {}, {"Offline": "true"}),
    (["DRAINING"], "are being drained (node1.grid)", {}, {"Draining": "true"}),
    (["NO_POLICY"], "its schedd had no policy for jobs with VMJobImage", {"VMJobPolicy": ""}),
    (["NO_POLICY"], "it asks for a container", {"VMJobPolicy": "", "WantContainer": "true"}),
    (
        ["TOO_LARGE"],
        "it asks for 8192 MiB of memory, and no node has more than 4096 (node1.grid)",
        {"RequestMemory": "8192"},
    ),
    (
        ["TOO_LARGE"],
        "it asks for 8192 MiB of memory",
        {"RequestMemory": "ifThenElse(false, 1, 8000 + 192)"},
    ),
    (["TOO_LARGE"], "9 processors, and no node has more than 4 (", {"RequestCpus": "9"}),
    (
        ["TOO_LARGE"],
        "102400 MiB of disk, and no node has more than 77716",
        {"RequestDisk": "104857600"},
    ),
    (["TOO_LARGE"], "1 GPUs, and no node has more than 0", {"RequestGPUs": "1"}),
    (["TOO_LARGE", "TOO_LARGE"], "9 processors", {"RequestCpus": "9", "RequestMemory": "8192"}),
    (
        ["NO_AGENT"],
        "vmjobs works on no node: on node1.grid the agent does not answer",
        {},
        {"HasVMJobs": "false", "VMJobsHypervisors": '""'},
    ),
    (
        ["NO_AGENT"],
        "vmjobs works on no node: on node1.grid no hypervisor booted the agent's probe",
        {},
        {"HasVMJobs": "false", "VMJobsVersion": '"0.1.0"'},
    ),
    (
        ["NO_AGENT"],
        "vmjobs works on no node: on node1.grid several jobs in a row failed because of the node",
        {},
        {"HasVMJobs": "false", "VMJobsVersion": '"0.1.0"', "VMJobsFault": '"3 jobs failed"'},
    ),
    (["NO_AGENT"], "no node of its pool has vmjobs (1 node: node1.grid)", {}, {"HasVMJobs": ""}),
    (
        ["REQUIREMENTS"],
        "no node meets its requirement TARGET.Site == Wish (the job's Wish is y; the nodes' Site is x)",
        {"Requirements": "TARGET.HasVMJobs && TARGET.Site == Wish", "Wish": '"y"'},
        {"Site": '"x"'},
    ),
    (
        ["REQUIREMENTS"],
        "no node meets its requirement TARGET.HasVMJobs",
        {"VMJobImage": "", "Requirements": "TARGET.HasVMJobs"},
        {"HasVMJobs": "false"},
    ),
    (
        ["REFUSED"],
        "every node refuses it: TARGET.Owner == Lord is not true (the job's Owner is undefined; "
        "the nodes' Lord is bob)",
        {},
        {"Start": "TARGET.Owner == Lord", "Lord": '"bob"'},
    ),
]


@pytest.mark.parametrize("case", NO_NODE, ids=lambda case: "-".join(case[0]))
def test_why_a_job_has_no_node(case: tuple[list[str], str, *tuple[dict[str, str], ...]]) -> None:
    answer, message, wish, *slots = case
    found = explain(daemons(queued(**wish), nodes=[node(**(slots[0] if slots else {}))]))
    assert codes(found) == answer
    assert message in found.findings[0].message
    assert all(finding.remedy for finding in found.findings)
    assert found.pool and bool(found.pool.clauses) == (answer[0] not in OF_FREE_NODES)


OF_FREE_NODES = {"WAITING", "LIMIT", "PRIORITY", "BUSY", "ASLEEP", "DRAINING"}


@pytest.mark.parametrize(
    ("wish", "others", "code", "message"),
    [
        (
            {"NumJobStarts": "2", "ChirpVMOutcome": '"again"', "ChirpVMReason": '"BOOT_FAILED: no"'}
            | {"VMJobMaxStarts": "5", "ChirpVMNode": '"n7"'},
            [],
            "TRIED",
            "it was started 2 times of 5, the last time on n7: BOOT_FAILED: no",
        ),
        ({}, [node("n2", HasVMJobs="false")], "AGENT_FAILS", "on n2 the agent does not answer"),
        ({"ShouldTransferFiles": '"NO"'}, [], "NO_TRANSFER", "sees no file system"),
    ],
)
def test_what_adds_to_the_answer(
    wish: dict[str, str], others: list[Any], code: str, message: str
) -> None:
    found = explain(daemons(queued(**wish), nodes=[node(), *others]))
    assert codes(found) == ["WAITING", code]
    assert message in found.findings[1].message


def test_a_hypervisor_that_works_nowhere() -> None:
    found = explain(daemons(queued(VMJobHypervisor='"KVM"'), nodes=[node(), node("n2")]))
    assert codes(found) == ["NO_HYPERVISOR"]
    said = found.findings[0]
    assert "the hypervisor kvm, which works on no node: nodes have qemu, uml" in said.message
    assert codes(explain(daemons(queued(VMJobHypervisor='"QEMU"'), nodes=[node()]))) == ["WAITING"]


@pytest.mark.parametrize(
    ("image", "demand", "message"),
    [
        (
            {"ChirpVMImageKinds": '"kvm,xen"'},
            "stringListsIntersect(ChirpVMImageKinds, TARGET.VMJobsHypervisors) =!= false",
            "no hypervisor that boots its image works on any node "
            "(the job's ChirpVMImageKinds is kvm,xen; the nodes' VMJobsHypervisors is uml,qemu)",
        ),
        (
            {"ChirpVMImageKinds": '"qemu"', "ChirpVMImageArch": '"aarch64"'},
            "(ChirpVMImageArch == TARGET.Arch) =!= false",
            "its image is for a CPU architecture that no node has or emulates "
            "(the job's ChirpVMImageArch is aarch64; the nodes' Arch is X86_64)",
        ),
    ],
)
def test_an_image_that_nothing_boots(image: dict[str, str], demand: str, message: str) -> None:
    asked = {"VMJobImage": '"disk:1"', "ChirpVMImageNamed": '"disk:1"', **image}
    nodes = [node(Arch='"X86_64"')]
    found = explain(daemons(queued(**asked, Requirements=f"({demand})"), nodes=nodes))
    assert codes(found) == ["NO_HYPERVISOR"]
    assert found.findings[0].message == message
    assert "condor_qedit 3.0 VMJobImage" in found.findings[0].remedy


def test_what_is_no_node_is_not_counted() -> None:
    revoked = ad({"MyType": '"StartD"', "Name": '"revoked.offline.vc"', "VMJobsRevoked": '"5:x"'})
    divided = node("n2", DynamicSlot="true", Name='"slot1_1@n2"')
    found = explain(daemons(queued(), nodes=[revoked, divided]))
    assert codes(found) == ["NO_NODES"]


def test_each_node_fails_something_else() -> None:
    nodes = [node("n1", OpSys='"X"'), node("n2", Arch='"Y"')]
    found = explain(daemons(queued(), nodes=nodes))
    assert codes(found) == ["NO_NODE"]
    assert found.pool and len(found.pool.clauses) == 2


GROUP = {"Name": '"hep"', "IsAccountingGroup": "true", "WeightedResourcesUsed": "4"}


@pytest.mark.parametrize(
    ("ads", "answer", "message"),
    [
        ({"Startd": []}, ["NO_NODES"], "no node is in its pool now"),
        ({"Negotiator": []}, ["NO_NEGOTIATOR"], "the collector knows no negotiator"),
        (
            {"Accounting": [ad({**GROUP, "EffectiveQuota": "4.0"})]},
            ["QUOTA", "WAITING"],
            "its accounting group hep may use 4, and uses 4",
        ),
        ({"Accounting": [ad({**GROUP, "EffectiveQuota": "9.0"})]}, ["WAITING"], ""),
        (
            {"Schedd": [ad({"Name": '"site.grid"', "MaxJobsRunning": "10", "TotalRunningJobs": "10"})]},
            ["SCHEDD_FULL", "WAITING"],
            "its schedd runs 10 jobs, and may run 10",
        ),
    ],
)
def test_what_the_pool_says_beside_its_nodes(
    ads: dict[str, Any], answer: list[str], message: str
) -> None:
    wish = queued(AcctGroup='"hep"')
    found = explain(daemons(wish, **{"Startd": [node()], **ads}))
    assert codes(found) == answer
    assert message in found.findings[0].message


def test_what_could_not_be_read_of_a_pool_is_said() -> None:
    said = daemons(queued(), nodes=[node()])
    said.collectors[""].silent = frozenset({"Negotiator"})
    found = explain(said)
    assert codes(found) == ["WAITING", "UNREAD"]
    assert "negotiator: no right to read" in found.findings[1].message
