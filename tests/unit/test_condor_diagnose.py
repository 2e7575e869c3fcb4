"""Whether the slots of nodes fit a job, by real ads, and the parts of ClassAd expressions."""

from __future__ import annotations

import json
from typing import Any

import classad2
import pytest

from condor.diagnose.slot_analysis import analyse, format_value
from condor.expressions import AttributeReference, attribute_references, conjuncts, format_expression
from tests.kit.condor_daemons import job, node


@pytest.mark.parametrize(
    ("wish", "slot", "standing"),
    [
        ({}, {}, "fits"),
        ({"RequestMemory": "3000"}, {}, "busy"),
        ({}, {"Cpus": "0"}, "busy"),
        ({"RequestGPUs": "1"}, {"TotalSlotGPUs": "1"}, "busy"),
        ({}, {"PartitionableSlot": "false", "State": '"Claimed"'}, "busy"),
        ({}, {"PartitionableSlot": "", "State": '"Owner"'}, "fits"),
        ({}, {"Offline": "true"}, "off"),
        ({"RequestMemory": "9999"}, {"Offline": "true"}, "refuses"),
        ({}, {"Draining": "true", "Start": "false"}, "draining"),
        ({}, {"State": '"Drained"'}, "draining"),
        ({}, {"Start": "false"}, "refuses"),
        ({}, {"HasVMJobs": "false"}, "refuses"),
        ({"RequestMemory": "4097"}, {}, "refuses"),
        ({}, {"Requirements": ""}, "refuses"),
    ],
)
def test_what_a_node_is_to_a_job(wish: dict[str, str], slot: dict[str, str], standing: str) -> None:
    found = analyse(job(**wish), [node(**slot)])
    assert {kind: nodes["count"] for kind, nodes in found["nodes"].items() if nodes["count"]} == {
        standing: 1
    }
    assert bool(found["clauses"]) == (standing == "refuses")


#: A job, a node, and each unmet demand: whose it is, and which values of both it names.
UNMET: list[tuple[dict[str, str], dict[str, str], *tuple[tuple[Any, ...], ...]]] = [
    (
        {"RequestMemory": "4097"},
        {},
        ("job", "TARGET.Memory >= RequestMemory", {"RequestMemory": "4097"}, {"Memory": "4096"}),
        ("node", "TARGET.RequestMemory <= MY.Memory", {"RequestMemory": "4097"}, {"Memory": "4096"}),
    ),
    (
        {"RequestCpus": "5"},
        {},
        ("node", "TARGET.RequestCpus <= MY.Cpus", {"RequestCpus": "5"}, {"Cpus": "4"}),
    ),
    (
        {},
        {"HasVMJobs": "false", "VMJobsHypervisors": '""'},
        ("job", "TARGET.HasVMJobs =?= true", {}, {"HasVMJobs": "false"}),
    ),
    ({}, {"HasVMJobs": ""}, ("job", "TARGET.HasVMJobs =?= true", {}, {"HasVMJobs": "undefined"})),
    (
        {"VMJobPolicy": ""},
        {},
        (
            "node",
            "TARGET.VMJobImage =?= undefined || TARGET.VMJobPolicy =?= 1",
            {"VMJobImage": "hep", "VMJobPolicy": "undefined"},
        ),
    ),
    ({}, {"Start": "false"}, ("node", "START", {}, {"START": "false"})),
    # An attribute without a scope is looked up in its own ad before the other.
    (
        {"VMJobOwnRequirements": "OpSys == Wanted", "Wanted": '"WINDOWS"'},
        {},
        ("job", "OpSys == Wanted", {"Wanted": "WINDOWS"}, {"OpSys": "LINUX"}),
    ),
    ({"Requirements": "A", "A": "B", "B": "A"}, {}, ("job", "A", {"A": "undefined"})),
    ({"Requirements": ""}, {}, ("job", "undefined", {})),
    ({"Requirements": '"yes"'}, {}, ("job", '"yes"', {})),
    (
        {"Requirements": "TARGET.Memory > {1}"},
        {},
        ("job", "TARGET.Memory > { 1 }", {}, {"Memory": "4096"}),
    ),
]


@pytest.mark.parametrize("case", UNMET)
def test_the_demands_that_are_not_met(case: tuple[Any, ...]) -> None:
    wish, slot, *unmet = case
    found = analyse(job(**wish), [node(**slot)])["clauses"]
    expected = [(*clause, {})[:4] for clause in unmet]
    assert [(c["side"], c["text"], c["job"], c["node"]) for c in found] == expected
    assert all(c["nodes"] == {"count": 1, "names": ["node1.grid"]} for c in found)


def test_several_nodes_are_told_of_together() -> None:
    slots = [
        node("n1", TotalSlotMemory="1024"),
        node("n2", TotalSlotMemory="2048"),
        node("n3", OpSys='"WINDOWS"', HasVMJobs=""),
        *(node(f"w{i}", HasVMJobs="false") for i in range(9)),
    ]
    found = analyse(job(RequestMemory="3000"), slots)
    first, memory, _, system = found["clauses"]
    assert first["text"] == "TARGET.HasVMJobs =?= true"
    assert first["nodes"]["count"] == 10
    assert len(first["nodes"]["names"]) == 5
    assert memory["node"] == {"Memory": "2048 at most"}
    assert (system["text"], system["nodes"]["names"]) == ('TARGET.OpSys == "LINUX"', ["n3"])
    assert found["largest"]["Memory"] == [4096.0, "n3"]
    assert {kind: nodes["count"] for kind, nodes in found["agents"].items() if nodes["count"]} == {
        "works": 2,
        "silent": 9,
        "missing": 1,
    }
    assert found["hypervisors"] == ["qemu", "uml"]


def test_one_slot_that_fits_is_enough_of_a_node() -> None:
    slots = [node("n1", Start="false"), node("n1", Name='"slot2@n1"')]
    found = analyse(job(), slots)
    assert (found["nodes"]["fits"]["count"], found["clauses"]) == (1, [])


def test_hostile_ads_are_bounded_and_obeyed_by_nobody() -> None:
    wide = " && ".join(f"TARGET.X{i} =?= true" for i in range(1000))
    bomb = {f"A{i}": f"A{i + 1} && A{i + 1} && A{i + 1}" for i in range(60)}
    hostile = node(
        "a\\033]0;yours\\007" + "n" * 5000,
        OpSys='"\\033[31m' + "x" * 5000 + '"',
        VMJobsHypervisors='"\\033,' + "uml," * 5000 + '"',
        Start="recursion(Start) || Start",
    )
    deep = node("deep", Requirements="(" * 50 + "false" + ")" * 50)
    found = analyse(job(Requirements=f"A0 && {wide}", **bomb), [hostile, deep, node("n2")])
    text = json.dumps(found)
    assert "\\u001b" not in text and "\\u0007" not in text
    assert len(text) < 60_000
    assert len(found["clauses"]) == 40


def test_values_as_people_read_them() -> None:
    values = classad2.ClassAd('[a=1.0; b=true; c=error; d="x\\ny"; e={1}]')
    shown = ["1", "true", "error", "x y", "[1]", "undefined"]
    assert [format_value(values.get(name)) for name in "abcdef"] == shown
    assert len(format_value("y" * 500)) == 80


@pytest.mark.parametrize(
    ("expression", "parts"),
    [
        ("a", ["a"]),
        ("(((a)))", ["a"]),
        ("a && b", ["a", "b"]),
        ("(a && b) && (c || d && e)", ["a", "b", "c || d && e"]),
        ("( ( a ) && ( b && c ) )", ["a", "b", "c"]),
        ("(a) || (b)", ["(a) || (b)"]),
        ("a && b || c", ["a && b || c"]),
        ("a ? b && c : d && e", ["a ? b && c : d && e"]),
        ("a && !(b && c)", ["a", "!(b && c)"]),
        ('regexp("a && b","\\"&&") && x', ['regexp("a && b","\\"&&")', "x"]),
        ('a == ") && (" && b', ['a == ") && ("', "b"]),
        ("f(a && b,1) && l[a && b] && { a && b }[0]", ["f(a && b,1)", "l[a && b]", "{ a && b }[0]"]),
        ("TARGET.X is true && y isnt undefined", ["TARGET.X =?= true", "y =!= undefined"]),
    ],
)
def test_what_has_to_be_true_each_by_itself(expression: str, parts: list[str]) -> None:
    assert [format_expression(part) for part in conjuncts(str(classad2.ExprTree(expression)))] == parts


@pytest.mark.parametrize("text", ["", "((", "))&&((", '"open && x', "a &&", "&& a", "\x1b && '", "?"])
def test_what_is_no_expression_is_no_trouble(text: str) -> None:
    assert conjuncts(text)
    attribute_references(text)


def test_what_is_deep_or_long_is_no_trouble() -> None:
    assert conjuncts("(" * 10_000 + "a" + ")" * 10_000) == ["a"]
    assert len(conjuncts(" && ".join("a" * 10_000))) == 10_000
    nested = "a && (" * 2000 + "a" + ")" * 2000
    assert 1 < len(conjuncts(nested)) < 100


def test_the_attributes_that_an_expression_names() -> None:
    text = (
        'TARGET.Memory >= RequestMemory && MY.x == a.b && f(Y) is true && "Z" != 1e+5 && requestmemory'
    )
    assert attribute_references(text) == [
        AttributeReference("TARGET", "Memory"),
        AttributeReference("", "RequestMemory"),
        AttributeReference("MY", "x"),
        AttributeReference("", "a"),
        AttributeReference("", "Y"),
    ]


def test_expressions_as_people_write_them() -> None:
    assert (
        format_expression('A is "x is y" &&\n { 1 } isnt  isnta') == 'A =?= "x is y" && { 1 } =!= isnta'
    )
