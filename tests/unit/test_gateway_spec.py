"""Declarations of gateways: what is accepted, and every error at its field."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Any

import pytest

from tests.kit.gateway_specs import gateway_spec
from vmjobs.errors import InvalidSpec
from vmjobs.gateway.spec import Gateway, GatewayRole, parse_gateway


def machine(**changes: Any) -> dict[str, Any]:
    found = gateway_spec()
    found["machines"]["ce"].update(changes)
    return found


def faults(data: Any) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as refused:
        parse_gateway(data)
    return {fault.field: fault.message for fault in refused.value.faults}


def test_a_declaration_becomes_a_gateway() -> None:
    gateway = parse_gateway(gateway_spec())
    assert isinstance(gateway, Gateway)
    assert (gateway.name, gateway.domain, str(gateway.network)) == (
        "tier3",
        "tier3.example",
        "10.77.0.0/24",
    )
    ce, wn = gateway.machines
    assert (ce.name, ce.role, ce.address) == (
        "ce",
        GatewayRole.COMPUTING_ELEMENT,
        IPv4Address("10.77.0.10"),
    )
    assert (wn.cpus, wn.memory, wn.disk, wn.hypervisor) == (1, 512, 2048, None)
    assert gateway.fqdn(ce) == "ce.tier3.example"
    assert gateway.of_role(GatewayRole.WORKER) == (wn,)
    assert gateway.machine("wn") is wn
    assert gateway.machine("se") is None


@pytest.mark.parametrize(
    ("data", "field", "words"),
    [
        (gateway_spec(gateway="Tier3"), "gateway", "has an invalid format"),
        (gateway_spec(name="x"), "name", "is an unknown field"),
        (gateway_spec(domain="tier3"), "domain", "has an invalid format"),
        (gateway_spec(domain=f"{'a' * 64}.org"), "domain", "has an invalid format"),
        (gateway_spec(network="10.77.0.1/24"), "network", "network"),
        (gateway_spec(network="172.16.0.0/12"), "network", "between 16 and 29 bits"),
        (gateway_spec(network="10.0.2.0/24"), "network", "must not overlap 10.0.2.0/24"),
        (gateway_spec(network="8.8.8.0/24"), "network", "private"),
        (gateway_spec(network="fd00::/64"), "network", "network"),
        (gateway_spec(machines={}), "machines", "at least 1"),
        (gateway_spec(machines=["ce"]), "machines.0", "dictionary"),
        (gateway_spec(machines={"ce": 1}), "machines.ce", "dictionary"),
        (
            gateway_spec(machines={"Ce": gateway_spec()["machines"]["ce"]}),
            "machines.Ce",
            "has an invalid format",
        ),
        (machine(role="proxy"), "machines.ce.role", "'computing-element'"),
        (machine(image=""), "machines.ce.image", "has an invalid format"),
        (
            gateway_spec(machines={"a": {"role": "worker", "address": "10.77.0.9"}}),
            "machines.a.image",
            "is missing",
        ),
        (machine(recipe="x.toml"), "machines.ce.recipe", "not both"),
        (machine(address="10.77.1.10"), "machines.ce.address", "is not in the network 10.77.0.0/24"),
        (machine(address="10.77.0.0"), "machines.ce.address", "is reserved"),
        (machine(address="10.77.0.255"), "machines.ce.address", "is reserved"),
        (machine(address="10.77.0.x"), "machines.ce.address", "IPv4"),
        (machine(address=12), "machines.ce.address", "must be an address"),
        (machine(memory=63), "machines.ce.memory", "64"),
        (machine(memory="512"), "machines.ce.memory", "integer"),
        (machine(cpus=True), "machines.ce.cpus", "integer"),
        (machine(cpus=4), "machines.ce.cpus", "a uml VM has at most 1 processor, but 4 are requested"),
        (machine(disk=0), "machines.ce.disk", "64"),
        (machine(hypervisor="xen"), "machines.ce.hypervisor", "uml"),
        (machine(colour="red"), "machines.ce.colour", "is an unknown field"),
        (machine(name="ce"), "machines.ce.name", "is an unknown field"),
        ("tier3", "", "dictionary"),
    ],
)
def test_a_fault_is_told_at_its_field(data: Any, field: str, words: str) -> None:
    found = faults(data)
    assert list(found) == [field]
    assert words in found[field]


def test_all_faults_are_told_at_once() -> None:
    data = machine(memory=1, role="x")
    data["domain"] = "-"
    data["machines"]["wn"]["address"] = "10.77.0.10"
    found = faults(data)
    assert set(found) == {"domain", "machines.ce.memory", "machines.ce.role", "machines.wn.address"}
    assert found["machines.wn.address"] == "is also the address of ce"


@pytest.mark.parametrize("value", [None, [], 5, {"machines": None}, {"machines": {"a": None}}, {1: 2}])
def test_nonsense_is_refused_and_never_crashes(value: Any) -> None:
    assert faults(value)
