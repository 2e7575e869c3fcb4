"""Files for the VMs of a gateway, by role, and tokens made without HTCondor's programs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from condor.gateway import CHECK_KEY, POOL_KEY, STORAGE_KEY, GatewayKit
from condor.pool.idtoken import create_token, sign
from tests.kit.gateway_specs import gateway_spec
from tests.kit.idtokens import claims_of
from vmjobs.errors import Forbidden, InvalidSpec
from vmjobs.gateway.spec import Gateway, GatewayRole, parse_gateway

NOW = datetime(2026, 1, 1, tzinfo=UTC)

#: A key that is used nowhere, and a token that condor_token_create of HTCondor 23.9.6 made with it.
KNOWN_KEY = b"B6Z2lniZJFVirhsQQexNzDP4r/VOg1FynZzHgPe5zBVoi8t9A0SJdA9Mm+gqJhP1"
KNOWN_TOKEN = (
    "eyJhbGciOiJIUzI1NiIsImtpZCI6ImdhdGV3YXkifQ.eyJleHAiOjE3OTUxOTE5MjksImlhdCI6MTc5NTE4ODMyO"
    "SwiaXNzIjoidGllcjMuZXhhbXBsZSIsImp0aSI6IjFjYjQwOTYxNDk1ZGUyZDJlYTA4MDdkN2QxN2Y0ZmVhIiwic"
    "2NvcGUiOiJjb25kb3I6XC9SRUFEIGNvbmRvcjpcL1dSSVRFIiwic3ViIjoieEB0aWVyMy5leGFtcGxlIn0.QCCpe"
    "zof-u787D7qOBOh8S2MfQ-pAN-zotEpRw6BMr4"
)

ROLES = {
    "ce": ("computing-element", "10.77.0.10"),
    "se": ("storage-element", "10.77.0.11"),
    "ui": ("user-interface", "10.77.0.12"),
    "wn": ("worker", "10.77.0.20"),
}


PEOPLE = {"ada": {"keys": ["ssh-ed25519 " + "A" * 68 + " ada@laptop"]}, "bob": {}}


def gateway(
    *vms: str,
    ce: dict[str, Any] | None = None,
    host: str | None = None,
    people: Any = PEOPLE,
    **more: tuple[str, str],
) -> Gateway:
    """A gateway with these VMs of ROLES, and more. ce: further fields of that VM."""
    chosen = {name: ROLES[name] for name in vms or ROLES} | more
    machines: dict[str, Any] = {
        name: {"role": role, "image": "any", "address": address}
        for name, (role, address) in chosen.items()
    }
    if ce:
        machines["ce"] |= ce
    return parse_gateway(gateway_spec(host=host, people=people, machines=machines))


@pytest.fixture
def kit() -> GatewayKit:
    return GatewayKit(clock=lambda: NOW)


def files_of(kit: GatewayKit, name: str, secrets: dict[str, bytes]) -> dict[str, bytes]:
    plain = gateway()
    return dict(kit.files(plain, plain.vm(name), secrets))


@pytest.fixture
def secrets(kit: GatewayKit) -> dict[str, bytes]:
    return dict(kit.secrets(gateway()))


def test_a_token_is_signed_and_says_what_those_of_htcondor_do() -> None:
    said, _, signature = KNOWN_TOKEN.rpartition(".")
    assert sign(KNOWN_KEY, said) == signature
    assert sign(KNOWN_KEY[:-1] + b"0", said) != signature
    known, rights = claims_of(KNOWN_TOKEN), ("READ", "WRITE")
    when = {"now": datetime.fromtimestamp(known["iat"], UTC), "lifetime": timedelta(hours=1)}
    made = create_token(KNOWN_KEY, "gateway", "x@tier3.example", authorizations=rights, **when)
    assert claims_of(made) == known | {"jti": claims_of(made)["jti"]}
    said, _, signature = made.rpartition(".")
    assert signature == sign(KNOWN_KEY, said)


def test_no_two_tokens_are_the_same() -> None:
    def one() -> str:
        return create_token(b"key", "gateway", "x@d", now=NOW, lifetime=timedelta(1))

    assert claims_of(one())["jti"] != claims_of(one())["jti"]
    assert "scope" not in claims_of(one())


@pytest.mark.parametrize(
    ("vm", "subject", "rights"),
    [("wn", "worker-wn", "ADVERTISE_STARTD READ"), ("ui", "ada", "READ WRITE")],
)
def test_tokens_are_good_for_what_a_vm_is_there_for_and_nothing_else(
    kit: GatewayKit, secrets: dict[str, bytes], vm: str, subject: str, rights: str
) -> None:
    token = claims_of(files_of(kit, vm, secrets)["token"])
    assert (token["sub"], token["iss"]) == (f"{subject}@tier3.example", "tier3.example")
    assert token["scope"].split() == [f"condor:/{right}" for right in rights.split()]
    assert 29 * 86400 < token["exp"] - NOW.timestamp() < 31 * 86400


@pytest.mark.parametrize("name", ["ce", "ui", "wn"])
def test_a_vm_that_runs_gets_a_token_like_its_first(
    kit: GatewayKit, secrets: dict[str, bytes], name: str
) -> None:
    plain = gateway()
    first = claims_of(files_of(kit, name, secrets)["token"])
    later = GatewayKit(clock=lambda: NOW + timedelta(days=15)).token(plain, plain.vm(name), secrets)
    passed = 15 * 86400
    then = {"jti": first["jti"], "iat": first["iat"] + passed, "exp": first["exp"] + passed}
    assert claims_of(later.token) | {"jti": first["jti"]} == first | then
    assert later.expires.timestamp() == then["exp"]


def test_a_vm_without_htcondor_gets_no_token(kit: GatewayKit, secrets: dict[str, bytes]) -> None:
    plain = gateway()
    with pytest.raises(Forbidden, match="needs no token"):
        kit.token(plain, plain.vm("se"), secrets)


@pytest.mark.parametrize(
    ("secret", "having"), [(POOL_KEY, {"ce"}), (STORAGE_KEY, set()), (CHECK_KEY, {"se"})]
)
def test_a_key_is_on_no_vm_that_has_no_use_for_it(
    kit: GatewayKit, secrets: dict[str, bytes], secret: str, having: set[str]
) -> None:
    found = {
        name
        for name in ROLES
        if any(secrets[secret] in text for text in files_of(kit, name, secrets).values())
    }
    assert found == having


def test_each_person_has_an_account_and_keys_of_his_own(
    kit: GatewayKit, secrets: dict[str, bytes]
) -> None:
    ce, se, ui = (files_of(kit, name, secrets) for name in ("ce", "se", "ui"))
    lines = [line.split() for line in ui["token"].decode().splitlines() if line]
    assert [(name, claims_of(token)["sub"]) for name, token in lines] == [
        ("ada", "ada@tier3.example"),
        ("bob", "bob@tier3.example"),
    ]
    assert ui["keys/ada"].decode().splitlines() == PEOPLE["ada"]["keys"]
    assert ui["keys/bob"] == b""
    assert ui["storage/ada"] in se["storage-keytab"]
    assert ui["storage/ada"].split()[-1] != ui["storage/bob"].split()[-1]
    assert ui["people"] == ce["people"]
    numbers = {line.split()[1] for line in ui["people"].decode().splitlines()}
    assert len(numbers) == 2
    others = gateway(people={"bob": {}, "eve": {}})
    kept = kit.files(others, others.vm("ui"), secrets)
    assert kept["storage/bob"] == ui["storage/bob"], "it stays when others come and go"


@pytest.mark.parametrize("people", [{}, {"condor": {}}, {"worker-wn": {}}])
def test_people_are_needed_and_have_names_of_their_own(kit: GatewayKit, people: Any) -> None:
    with pytest.raises(InvalidSpec) as caught:
        kit.secrets(gateway(people=people))
    assert [fault.field for fault in caught.value.faults] == [".".join(["people", *people])]


def test_two_gateways_share_no_key(kit: GatewayKit) -> None:
    first, second = kit.secrets(gateway()), kit.secrets(gateway())
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


def test_each_vm_knows_the_computing_element_and_itself(
    kit: GatewayKit, secrets: dict[str, bytes]
) -> None:
    told = files_of(kit, "wn", secrets)["99-gateway-machine.conf"].decode().splitlines()
    assert "COLLECTOR_HOST = ce.tier3.example" in told
    assert "NETWORK_INTERFACE = 10.77.0.20" in told
    assert "NETWORK_HOSTNAME = wn.tier3.example" in told
    assert "UID_DOMAIN = wn.tier3.example" in told
    example = files_of(kit, "ui", secrets)["example.sub"].decode()
    assert "\ngrid_resource = condor ce.tier3.example ce.tier3.example\n" in example


def test_a_computing_element_that_is_published_says_where_it_is_reached(
    kit: GatewayKit, secrets: dict[str, bytes]
) -> None:
    published = gateway(ce={"publish": [9700]}, host="192.0.2.5")
    told = {
        vm.name: kit.files(published, vm, secrets)["99-gateway-machine.conf"].decode().splitlines()
        for vm in published.machines
        if vm.name in {"ce", "wn"}
    }
    for lines in told.values():
        assert "COLLECTOR_HOST = ce.tier3.example:9700" in lines
        assert "PRIVATE_NETWORK_NAME = tier3.example" in lines
    assert "TCP_FORWARDING_HOST = 192.0.2.5" in told["ce"]
    assert "SHARED_PORT_PORT = 9700" in told["ce"]
    assert "BIND_ALL_INTERFACES = True" not in told["wn"]
    token = kit.person_token(published, "bob", secrets)
    assert claims_of(token.token)["sub"] == "bob@tier3.example"


@pytest.mark.parametrize(
    ("publish", "host", "fields"),
    [
        ([9700, 9701], "192.0.2.5", ["machines.ce.publish"]),
        (["9700:9618"], "192.0.2.5", ["machines.ce.publish"]),
        ([9618], None, ["host"]),
    ],
)
def test_a_computing_element_publishes_its_own_port(
    kit: GatewayKit, publish: list[Any], host: str | None, fields: list[str]
) -> None:
    with pytest.raises(InvalidSpec) as caught:
        kit.secrets(gateway(ce={"publish": publish}, host=host))
    assert [fault.field for fault in caught.value.faults] == fields


def test_there_is_one_computing_element_and_what_needs_it_says_so(kit: GatewayKit) -> None:
    two = gateway(other=(str(GatewayRole.COMPUTING_ELEMENT), "10.77.0.30"))
    for made, names in ((gateway("ui", "wn"), ["ui", "wn"]), (two, ["other"])):
        with pytest.raises(InvalidSpec) as caught:
            kit.secrets(made)
        assert [fault.field for fault in caught.value.faults] == [f"machines.{n}.role" for n in names]
