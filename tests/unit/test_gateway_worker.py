"""``vmjobs gateway worker`` for a gateway that does not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from condor.gateway import GatewayKit
from tests.kit.cli import Run
from tests.kit.gateway_specs import gateway_spec
from tests.kit.idtokens import claims_of
from vmjobs.gateway.directory import GatewayDirectory, InstalledGateway
from vmjobs.gateway.spec import parse_gateway
from vmjobs.model import HypervisorKind

NODE = "wn7.site.example"


@pytest.fixture
def place(tmp_path: Path) -> GatewayDirectory:
    declared = gateway_spec(host="tier3.example.org", people={"ada": {}})
    declared["machines"]["ce"]["publish"] = [9700]
    gateway = parse_gateway(declared)
    made = GatewayDirectory(tmp_path / "gateway")
    made.save_secrets(GatewayKit().secrets(gateway))
    made.save(InstalledGateway(schema=1, gateway=gateway, images={}, kind=HypervisorKind.UML))
    return made


def test_a_node_is_added_again_for_another_token_and_removed_once(
    typed: Run, place: GatewayDirectory, tmp_path: Path
) -> None:
    def do(word: str, *more: str, code: int = 0) -> str:
        done = typed("gateway", "worker", word, *more, "--state-dir", place.directory, code=code)
        return done.out + done.err

    def token(*more: str) -> dict[str, object]:
        do("add", NODE, "--output", str(tmp_path / "out"), *more)
        return claims_of((tmp_path / "out" / "token").read_bytes())

    first, second = token("--account", "ada"), token()
    assert first["jti"] != second["jti"]
    assert first["sub"] == second["sub"], "the first is still valid"
    assert (tmp_path / "out" / "token").stat().st_mode & 0o777 == 0o600
    assert do("list").split() == ["NODE", "ACCOUNTS", NODE, "ada"], "it keeps its accounts"
    assert "ACCOUNTS = ada\n" in (tmp_path / "out" / "60-gateway-tier3.conf").read_text()
    do("remove", NODE)
    assert f"{NODE} is no node of tier3" in do("remove", NODE, code=66)
    assert NODE not in do("list", "--json")
    assert token()["sub"] != first["sub"], "tokens of before stay refused"


@pytest.mark.parametrize("command", ["add", "remove"])
@pytest.mark.parametrize(
    ("node", "why", "code"),
    [
        ("wn7", "'wn7' is not a full host name", 64),
        ("../wn7.site.example", "is not a full host name", 64),
        ("wn.tier3.example", "wn.tier3.example is a VM of tier3", 65),
    ],
)
def test_a_name_that_is_none_or_taken_is_refused(
    typed: Run, place: GatewayDirectory, command: str, node: str, why: str, code: int
) -> None:
    done = typed("gateway", "worker", command, node, "--state-dir", place.directory, code=code)
    assert why in done.err
    assert not [name for name in place.secrets() if name.startswith("node-")]
