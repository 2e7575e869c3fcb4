"""HTCondor in VMs of virtual clusters: its configuration, and what operators may set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import classad2
import htcondor2
import pytest

from condor import names
from condor.pool.cluster_ads import faults
from condor.worker import WorkerKit, machine_attributes, worker_config
from tests.kit.cluster_vm_orders import cluster_vm_order
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.wire import ClusterVmOrder, PoolAddress


def order(**fields: object) -> ClusterVmOrder:
    pool = PoolAddress(name="site", collector="site.grid:9618", trust_domain="grid")
    names = {"id": "5" * 32, "cluster": "sl3", "name": "sl3-0"}
    return cluster_vm_order(**{**names, "cpus": 2, "pool": pool, **fields})


class Configuration:
    """The configuration files of a cluster VM, as HTCondor reads them."""

    def __init__(self, folder: Path, made: ClusterVmOrder, monkeypatch: pytest.MonkeyPatch) -> None:
        files = WorkerKit().files(made, 3)
        text = files[names.STARTD_CONFIG] + files[names.CLUSTER_VM_CONFIG]
        self.file = folder / "condor_config"
        self.file.write_bytes(text)
        self.environment = monkeypatch

    def switch(self, line: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{line}\n")

    def __getitem__(self, name: str) -> str:
        self.environment.setenv("CONDOR_CONFIG", str(self.file))
        htcondor2.reload_config()
        return str(htcondor2.param[name])

    def start(self, job: dict[str, Any]) -> Any:
        """Evaluate START for a job."""
        ad = classad2.ClassAd()
        for name in self["STARTD_ATTRS"].split():
            ad[name] = classad2.ExprTree(self[name])
        ad["Start"] = classad2.ExprTree(self["START"])
        other = classad2.ClassAd({**job, "Requirements": True})
        # TARGET is bound only in a match.
        ad["Requirements"] = classad2.ExprTree("Start")
        return ad.symmetricMatch(other)


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    yield lambda made: Configuration(tmp_path, made, monkeypatch)
    monkeypatch.undo()
    htcondor2.reload_config()


PROBE = {
    names.PROBE: "5" * 32 + ".3",
    names.OWNER: "vmjobs",
    "Cmd": names.PROBE_PROGRAM,
    "TransferExecutable": False,
}


def test_who_comes_before_it_is_admitted_then_and_while_it_drains(configuration: Any) -> None:
    found = configuration(order(start='TARGET.Owner == "alice" || TARGET.Flag'))
    alice = {"Owner": "alice"}
    assert found.start(PROBE)  # its own probe, and no other job
    others = {
        names.PROBE: "5" * 32 + ".2",
        names.OWNER: "x",
        "Cmd": "/bin/sh",
        "TransferExecutable": True,
    }
    for job in (alice, *({**PROBE, name: value} for name, value in others.items())):
        assert not found.start(job), job
    found.switch("VMJOBS_ADMITTED = True")
    assert [found.start(job) for job in (alice, {"Owner": "bob"}, PROBE)] == [True, False, False]
    found.switch("VMJOBS_DRAINING = True")
    assert not found.start(alice)
    assert classad2.ExprTree(found["CLAIM_WORKLIFE"]).eval() == 0


def test_values_stay_what_they_are(configuration: Any) -> None:
    attributes = {"Flavour": 'a "b" $(HOME) $ENV(PATH) #c', "Level": 3, "Ratio": 1.5, "Fine": True}
    found = configuration(order(attributes=attributes, start='TARGET.Home == "$(HOME)"'))
    for name, value in attributes.items():
        assert classad2.ExprTree(found[name]).eval() == value
        assert name in found["STARTD_ATTRS"].split()
    found.switch("VMJOBS_ADMITTED = True")
    assert found.start({"Home": "$(HOME)"})


def test_what_a_vm_says_of_itself(configuration: Any) -> None:
    found = configuration(order())
    assert found[names.MEMBER] == '"sl3-0"'
    assert found[names.INCARNATION] == "3"
    assert found[names.CLUSTER] == found[names.VIRTUAL_CLUSTER] == '"sl3"'
    assert found["NETWORK_HOSTNAME"] == "sl3-0.vc"
    assert found["COLLECTOR_HOST"] == "site.grid:9618"
    assert found["STARTER_ALLOW_RUNAS_OWNER"].lower() == "false"
    assert found["UID_DOMAIN"] == "sl3-0.vc"
    assert found["SLOT1_4_USER"] == "slot1-4"


def test_an_operators_attribute_wins_over_the_default_of_that_name_only() -> None:
    said = machine_attributes(order(attributes={"virtualCLUSTER": "other", "vmjobsmember": "x"}), 1)
    assert said["virtualCLUSTER"] == "other"
    assert names.VIRTUAL_CLUSTER not in said
    assert said[names.MEMBER] == "sl3-0"
    assert list(said).index(names.MEMBER) > list(said).index("vmjobsmember")


def test_a_line_end_never_gets_into_a_configuration() -> None:
    with pytest.raises(ValueError, match="control characters"):
        worker_config(order(start="True\nSTARTER_ALLOW_RUNAS_OWNER = True"), 1)
    text = worker_config(order(attributes={"A": "x\nB = 1"}), 1)
    assert "\nB = 1" not in text


def test_the_files_are_all_that_the_script_needs() -> None:
    files = WorkerKit().files(order(), 1)
    assert files["script"].startswith(b"#!/bin/sh\n")
    assert files["host"] == b"sl3-0.vc\n"
    assert files["accounts"].split() == [b"slot1-1", b"slot1-2", b"slot1-3", b"slot1-4"]
    for name in set(files) - {"script", "host", "accounts", "probe"}:
        assert name.encode() in files["script"]


def found(**fields: Any) -> dict[str, str]:
    spec = ClusterSpec(name="a", image="x", size=1, **fields)
    return {fault.field: fault.code for fault in faults(spec)}


RESERVED = ["cpus", "Machine", "START", "VMJobsX", "hasvmjobs", "ChildCpus", "true", "Name", "OpSys"]
FREE = ["VirtualCluster", "Flavour", "IsGood", "Totally", "MyAttr", "Recently"]


@pytest.mark.parametrize("name", RESERVED + FREE)
def test_attributes_of_htcondor_and_ours_are_reserved_and_others_the_operators(name: str) -> None:
    fault = {f"attributes.{name}": "reserved"} if name in RESERVED else {}
    assert found(attributes={name: 'any "text"'}) == fault


def test_text_that_htcondor_changes_is_refused() -> None:
    fields = found(attributes={"A": "a\\b", "B": "$$(X)", "C": "$(X)"})
    assert fields == {"attributes.A": "bad_value", "attributes.B": "bad_value"}


TAKEN = [
    "True",
    'TARGET.Owner == "a)b" && regexp("^(x", TARGET.Y)',
    "a =?= b || c =!= undefined ? d <= 2 : e >= 1",
    'stringListMember("a;b", "x//y")',
]
REFUSED = ["", " ", "1 +", "a b", ") || (True", "True) || (True", "x = 1", '"', "foo(", "[a", "1, 2"]
REFUSED += ["{1}, 2", "/* x */ 1", "1 // x", "a; b", "$$(x)", "'"]


@pytest.mark.parametrize("start", TAKEN + REFUSED)
def test_expressions_are_taken_and_all_else_is_refused(start: str) -> None:
    assert found(start=start) == ({"start": "bad_expression"} if start in REFUSED else {})
