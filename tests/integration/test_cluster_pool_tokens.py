"""Tokens of cluster VMs and of nodes: their rights at the site, and their renewal."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial

from tests.kit.grid import Grid, wait_for
from tests.kit.grid_pool import advertise, as_bearer, mint, withdraw
from tests.kit.idtokens import claims_of
from vmjobs.cluster.pool import PoolVm


def advertised(grid: Grid, vm: str) -> str:
    where = f'Machine == "{vm}"'
    return grid.on("site", "condor_status", "-constraint", where, "-af", "MyAddress").strip()


def may(grid: Grid, token: str, kind: str, right: str, host: str = "site.grid") -> bool:
    where = ("-name", host) if kind == "schedd" else ()
    ping = ("condor_ping", "-pool", host, *where, "-type", kind, "-table", right)
    return " ALLOW " in as_bearer(grid, token, *ping)


def check_may(grid: Grid, token: str, kind: str, right: str) -> None:
    """Check that a right is given; a busy daemon may not answer the first time."""
    wait_for(lambda: may(grid, token, kind, right) or None, f"{right} to be given", 60)


def test_a_token_is_for_one_vm_and_for_nothing_else(grid: Grid) -> None:
    name = f"t{uuid.uuid4().hex[:8]}-0"
    other = name.replace("-0", "-1")
    known = PoolVm(name, 2, uuid.uuid4().hex)
    target = f"{known.id}.2"
    minted = mint(grid, known)
    assert minted["identity"] == f"vmjobs-{name}.{target}@grid"
    token = minted["token"]

    check_may(grid, token, "collector", "ADVERTISE_STARTD")
    for right in (
        "WRITE",
        "DAEMON",
        "ADMINISTRATOR",
        "NEGOTIATOR",
        "ADVERTISE_SCHEDD",
        "ADVERTISE_MASTER",
    ):
        assert not may(grid, token, "collector", right), right
    assert not may(grid, token, "schedd", "WRITE")

    mine = {"Name": f"slot1@{name}.vc", "Machine": f"{name}.vc", "VMJobsMember": name}
    mine["VMJobsMachine"] = target
    advertise(grid, token, **mine)
    wait_for(lambda: advertised(grid, f"{name}.vc"), "its own ad to be taken", 60)
    for stolen in (
        {"Name": f"slot1@{other}.vc", "Machine": f"{other}.vc", "VMJobsMember": other},
        {"Name": f"slot1@{other}.vc", "Machine": f"{other}.vc", "VMJobsMember": name},
        {"Name": "slot1@node9.grid", "Machine": "node9.grid", "VMJobsMember": name},
        {"Name": "slot1@node9.grid", "Machine": "node9.grid"},
    ):
        advertise(grid, token, **{"VMJobsMachine": target, **stolen})
        assert not advertised(grid, stolen["Machine"]), stolen
    withdraw(grid, known)
    assert not advertised(grid, f"{name}.vc")
    following = mint(grid, replace(known, incarnation=4))["token"]
    for lie in (f"{known.id}.3", f"{uuid.uuid4().hex}.2", f"{target}.2", ""):
        advertise(grid, following, **{**mine, "VMJobsMachine": lie})
        assert not advertised(grid, f"{name}.vc"), lie


def test_a_nodes_token_is_for_that_node_and_administers_nothing(grid: Grid) -> None:
    token = grid.on("node1", "cat", "/etc/condor/tokens.d/condor").strip()
    claims = claims_of(token)
    assert claims["sub"] == "node-node1.grid@grid"
    assert claims["exp"] - claims["iat"] <= 366 * 86400
    for right in ("READ", "ADVERTISE_STARTD", "ADVERTISE_MASTER"):
        check_may(grid, token, "collector", right)
    for right in ("WRITE", "DAEMON", "ADMINISTRATOR", "NEGOTIATOR", "ADVERTISE_SCHEDD"):
        assert not may(grid, token, "collector", right), right
        assert not may(grid, token, "schedd", right), right
        assert not may(grid, token, "schedd", right, host="submit.grid"), right
    another = {"Name": "slot1@node9.grid", "Machine": "node9.grid"}
    advertise(grid, token, **another)
    assert not advertised(grid, another["Machine"])


def test_a_nodes_token_is_renewed_and_that_of_nobody_else_is_made(grid: Grid) -> None:
    file, list_all = "/etc/condor/tokens.d/condor", ("condor_token_request_list", "-json")
    made = "/tmp/token-of-another"  # noqa: S108 - in the node's container
    ask = f"condor_token_request -type collector -identity condor@grid >{made} 2>/dev/null"
    # A busy collector may not answer the first time.
    again = f"timeout 900 sh -c 'until {ask}; do sleep 1; done' >/dev/null 2>&1 &"
    grid.on("node1", "sh", "-c", again)
    asked = '"RequestedIdentity": "condor@grid"'
    requests = partial(grid.on, "site", *list_all, check=False)
    wait_for(lambda: asked in requests() or None, "the request to be there", 120)
    before = grid.on("node1", "cat", file)
    grid.on("node1", "touch", "-d", "40 days ago", file)

    def renewed() -> str | None:
        grid.on("node1", "/usr/libexec/vmjobs/token-renew", "once")
        now = grid.on("node1", "cat", file)
        return now if now != before else None

    # The renewal may find the central manager busy; by itself it retries only after an hour.
    after = wait_for(renewed, "a new token", 120)
    claims = [claims_of(token) for token in (before, after)]
    for same in ("sub", "scope"):
        assert claims[0][same] == claims[1][same]
    assert claims[1]["exp"] - claims[1]["iat"] == 365 * 86400
    assert grid.on("node1", "stat", "-c", "%a %U", file).split() == ["600", "root"]
    assert "\ney" not in "\n" + grid.on("node1", "cat", made), "it was approved"
