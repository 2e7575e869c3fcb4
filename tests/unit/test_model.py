"""The job specification and the states of a job."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from vmjobs.errors import Conflict, Fault, InvalidSpec
from vmjobs.model import (
    MAX_SCRIPT_BYTES,
    TRANSITIONS,
    HypervisorKind,
    JobState,
    Node,
    ReasonCode,
    advance,
    faults_of,
    kinds_with_cpus,
    now,
    parse_spec,
)
from vmjobs.model.base import MAX_FAULTS
from vmjobs.states import actor_for

ALL_BUT_UML = tuple(kind for kind in HypervisorKind if kind is not HypervisorKind.UML)


def spec(**fields: Any) -> dict[str, Any]:
    return {"image": "hep", "script": "#!/bin/sh\ntrue\n", **fields}


INPUT: dict[str, Any] = {"name": "a", "digest": "sha256:" + "0" * 64, "size": 1}
BAD: dict[str, list[Any]] = {
    "cpus": [0, -1, "2", True, 1.5, 10**30],
    "memory": [0, -512],
    "disk": [0],
    "run_seconds": [0, -5],
    "boot_seconds": [0],
    "script": ["", "  \n", "x" * (MAX_SCRIPT_BYTES + 1), "a\0b", 7],
    "image": ["no spaces please", "sha256:123", "../up", 5],
    "arguments": [[1], ["a\0"]],
    "inputs": [[INPUT | {"name": "../a"}], [INPUT | {"digest": "md5:1"}], [INPUT | {"size": -1}]],
    "outputs": [["../x"], ["/etc/*"], ["a/../../b"], "hist.csv"],
    "environment": [{"1A": "x"}, {"A": "x\0"}],
    "hypervisor": ["vmware"],
    "route": ["no/where"],
    "network": ["bridge"],
    "strategy": ["magic"],
    "labels": [{"a b": "c"}],
    "surprise": [1],
}


@pytest.mark.parametrize(("field", "value"), [(field, bad) for field in BAD for bad in BAD[field]])
def test_a_bad_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec(spec(**{field: value}))
    assert any(fault.field.split(".")[0] == field for fault in refused.value.faults)


def test_a_value_that_got_into_a_name_is_not_told() -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec(spec(environment={"PASSWORD=hunter2": ""}))
    (fault,) = refused.value.faults
    assert "'PASSWORD'" in fault.message
    assert "hunter2" not in repr(refused.value.faults) + str(refused.value)


def test_all_faults_come_in_one_answer() -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec({"cpus": 0, "memory": -1, "script": "", "outputs": ["/x"]})
    fields = {fault.field.split(".")[0] for fault in refused.value.faults}
    assert fields == {"image", "cpus", "memory", "script", "outputs"}


@pytest.mark.parametrize(
    "fields",
    [
        {"hypervisor": "uml"},
        {"strategy": "image", "script": ""},
        {"strategy": "image", "exit": "poweroff"},
    ],
)
def test_what_cannot_be_saved_is_not_to_be(fields: dict[str, Any]) -> None:
    values = spec(checkpoint=True, **fields)
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(values)
    assert any("checkpoint is for" in fault.message for fault in caught.value.faults)
    assert not parse_spec({**values, "checkpoint": False}).checkpoint


def test_a_job_gets_no_vm_with_fewer_processors_than_it_asks_for() -> None:
    assert HypervisorKind.UML in parse_spec(spec()).kinds
    assert parse_spec(spec(cpus=65)).kinds == ALL_BUT_UML
    assert parse_spec(spec(cpus=65, hypervisor="uml")).kinds == ()
    assert kinds_with_cpus(2) == tuple(HypervisorKind)
    assert kinds_with_cpus(2, shared=True) == ALL_BUT_UML


def test_a_job_that_is_to_be_saved_goes_where_it_can_be() -> None:
    assert parse_spec(spec(checkpoint=True)).kinds == ALL_BUT_UML
    assert parse_spec(spec(checkpoint=True, hypervisor="qemu")).kinds == (HypervisorKind.QEMU,)


def test_input_names_must_differ() -> None:
    with pytest.raises(InvalidSpec, match="faults"):
        parse_spec(spec(inputs=[INPUT, INPUT]))


def test_what_a_later_release_tells_besides_is_left_out() -> None:
    node = Node(name="n1", cpus=1, memory=1, disk=1, updated=now())
    assert Node.model_validate({**node.model_dump(mode="json"), "colour": "red"}) == node


def test_a_spec_survives_its_json() -> None:
    first = parse_spec(spec(environment={"A": "b"}, outputs=["*.csv"], labels={"run": "3"}))
    assert parse_spec(first.model_dump(mode="json")) == first


def test_the_table_knows_every_state_and_leads_to_an_end() -> None:
    assert set(TRANSITIONS) == set(JobState)
    ends = {s for s in JobState if s.final}
    assert ends == {JobState.COMPLETED, JobState.FAILED, JobState.CANCELED}
    for state in JobState:
        reached, frontier = {state}, [state]
        while frontier:
            frontier = [n for s in frontier for n in TRANSITIONS[s] if n not in reached]
            reached |= set(frontier)
        assert reached & ends


def test_a_step_that_is_not_in_the_table_is_refused() -> None:
    assert advance(JobState.QUEUED, JobState.STAGING) is JobState.STAGING
    with pytest.raises(Conflict):
        advance(JobState.COMPLETED, JobState.RUNNING)
    with pytest.raises(Conflict):
        advance(JobState.QUEUED, JobState.COMPLETED)


def test_every_reason_has_somebody_who_can_mend_it() -> None:
    assert {actor_for(code) for code in ReasonCode} == {"user", "site", "service"}


def test_more_faults_than_anybody_reads_are_counted() -> None:
    def faults(count: int) -> list[Fault]:
        with pytest.raises(ValidationError) as caught:
            TypeAdapter(list[int]).validate_python(["x"] * count)
        return faults_of(caught.value, "spec.")

    assert len(faults(MAX_FAULTS)) == MAX_FAULTS
    (told,) = faults(MAX_FAULTS + 1)
    assert (told.field, told.code) == ("spec", "too_many_faults")
    assert told.message == f"there are {MAX_FAULTS + 1} faults, too many to list"
