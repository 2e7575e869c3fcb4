"""Execute nodes in the pool of a gateway: who is one, and what each of them gets."""

from __future__ import annotations

import re
from importlib import resources

import classad2
import htcondor2
import pytest

from condor.gateway import GatewayKit
from condor.gateway_nodes import (
    NODE_TOKEN_FILE,
    new_node,
    node_files,
    node_names,
    nodes_config,
    nodes_script,
)
from tests.kit.gateway_specs import gateway_spec
from tests.kit.idtokens import claims_of
from vmjobs.errors import InvalidRequest, NotFound
from vmjobs.gateway.spec import Gateway, parse_gateway

NODE = "wn7.site.example"


def gateway(**ce: object) -> Gateway:
    declared = gateway_spec(host="192.0.2.5", people={"ada": {}})
    declared["machines"]["ce"] |= ce
    return parse_gateway(declared)


PUBLISHED = gateway(publish=[9700])


def test_a_node_advertises_itself_under_a_name_that_is_not_used_twice() -> None:
    kit = GatewayKit()
    keys = dict(kit.secrets(PUBLISHED))
    users = []
    for _ in range(2):
        secrets = keys | new_node(NODE)
        claims = claims_of(kit.node_token(PUBLISHED, NODE, secrets).token)
        users.append(claims["sub"])
        assert re.fullmatch(r"node-wn7\.site\.example\.[0-9a-f]{16}@tier3\.example", users[-1])
        assert set(claims["scope"].split()) == {
            f"condor:/{right}" for right in ("ADVERTISE_STARTD", "ADVERTISE_MASTER", "READ")
        }
        assert nodes_config(PUBLISHED, secrets).decode() == f"GATEWAY_NODES = {users[-1]}\n"
    assert users[0] != users[1], "the token of a node that was removed stays refused"
    assert node_names(secrets) == [NODE]
    assert node_names(keys) == []


def requirements() -> str:
    """The pool's requirements of ads, without macros."""
    text = (resources.files("condor") / "gateway" / "92-gateway-ce.conf").read_text()
    found = re.findall(r"^(\w+) *= (.*)$", text.replace("\\\n", " "), re.M)
    values, expression = {"UID_DOMAIN": "tier3.example", **dict(found)}, "$(COLLECTOR_REQUIREMENTS)"
    while "$(" in expression:
        expression = re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], expression)
    return expression


@pytest.mark.parametrize(
    ("user", "machine", "name", "accepted"),
    [
        (f"node-{NODE}.0123456789abcdef", NODE, f"slot1_2@{NODE}", True),
        (f"node-{NODE}.0123456789abcdef", NODE, NODE, True),
        (f"node-{NODE}.0123456789abcdef", NODE, "slot1@wn.tier3.example", False),
        (f"node-{NODE}.0123456789abcdef", "wn.tier3.example", "slot1@wn.tier3.example", False),
        (f"node-{NODE}.0123456789abcdef", "wn7.site", "slot1@wn7.site", False),
        ("worker-wn", "wn.tier3.example", "slot1@wn.tier3.example", True),
        ("worker-wn", NODE, f"slot1@{NODE}", False),
        ("condor", "ce.tier3.example", "ce.tier3.example", True),
    ],
)
def test_an_ad_that_lies_about_its_host_is_refused(
    user: str, machine: str, name: str, accepted: bool
) -> None:
    assert htcondor2.version()  # its functions of ClassAds
    ad = {"AuthenticatedIdentity": f"{user}@tier3.example", "Machine": machine, "Name": name}
    assert classad2.ExprTree(requirements()).eval(classad2.ClassAd(ad)) is accepted


def test_a_node_is_told_where_the_pool_is() -> None:
    files = node_files(PUBLISHED, NODE, "a.b.c")
    told = files["60-gateway-tier3.conf"].decode().splitlines()
    assert "COLLECTOR_HOST = 192.0.2.5:9700" in told
    assert f"NETWORK_HOSTNAME = {NODE}" in told
    assert files[NODE_TOKEN_FILE] == b"a.b.c\n"


@pytest.mark.parametrize(("owner", "own"), [("ada", True), ("bob", False), ("ad", False)])
def test_only_the_named_peoples_jobs_run_as_accounts_of_the_node(owner: str, own: bool) -> None:
    told = node_files(PUBLISHED, NODE, "a.b.c", ["ada"])["60-gateway-tier3.conf"].decode()
    found = dict(re.findall(r"^(\w+) *= *(.*)$", told, re.MULTILINE))
    assert found["UID_DOMAIN"] == "tier3.example"
    expression = found["VMJOBS_RUNAS_OWNER"].replace("$(GATEWAY_ACCOUNTS)", found["GATEWAY_ACCOUNTS"])
    assert htcondor2.version()  # its functions of ClassAds
    job = classad2.ClassAd({"Owner": owner})
    assert classad2.ExprTree(expression.replace("TARGET.", "")).eval(job) is own


def test_an_account_of_a_stranger_is_refused() -> None:
    with pytest.raises(NotFound, match="eve is none of the people of tier3"):
        node_files(PUBLISHED, NODE, "a.b.c", ["eve"])


def test_the_computing_element_takes_the_list_as_it_is() -> None:
    secrets = new_node(NODE)
    script = nodes_script(PUBLISHED, secrets)
    assert nodes_config(PUBLISHED, secrets).decode().rstrip() in script
    assert "\nremoved=\n" in script
    assert f"\nremoved={NODE}\n" in nodes_script(PUBLISHED, {}, NODE)


def test_a_pool_that_is_not_published_has_no_nodes() -> None:
    with pytest.raises(InvalidRequest, match="other hosts cannot reach the pool of tier3"):
        node_files(gateway(), NODE, "a.b.c")
