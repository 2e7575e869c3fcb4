"""`vmjobs doctor` on the hosts of a grid: what works, and what is missing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kit.grid import Grid


def examined(grid: Grid, host: str, role: str, *environment: str) -> tuple[bool, dict[str, str]]:
    """Whether the doctor passes a host, and the failed checks with their details."""
    asked = f"vmjobs doctor --no-boot --json --for {role}; echo $?"
    said = grid.on(host, "env", *environment, "sh", "-c", asked)
    text, status = said.rstrip().rsplit("\n", 1)
    findings: list[dict[str, Any]] = json.loads(text)
    lacking = {f["what"]: f["detail"] for f in findings if f["role"] == role and not f["ok"]}
    return status == "0", lacking


@pytest.mark.parametrize(
    ("host", "role"),
    [("node1", "node"), ("site", "schedd"), ("site", "negotiator"), ("submit", "schedd")],
)
def test_nothing_is_missing_on_the_hosts_of_the_grid(grid: Grid, host: str, role: str) -> None:
    assert examined(grid, host, role) == (True, {})


def test_a_node_boots_a_guest_by_each_hypervisor_that_works(grid: Grid) -> None:
    said = grid.on("node1", "vmjobs", "doctor", "--json", "--for", "node")
    found = {finding["what"]: finding for finding in json.loads(said)}
    offered = grid.on("site", "condor_status", "slot1@node1.grid", "-af", "VMJobsHypervisors").strip()
    works = {kind for kind in ("kvm", "qemu", "uml") if found[f"hypervisor: {kind}"]["ok"]}
    assert works == set(offered.split(",")), found
    assert works >= {"qemu", "uml"}


@pytest.mark.parametrize(
    ("host", "role", "change", "what", "said"),
    [
        ("node1", "node", "VMJOBS_SOCKET=/none", "agent", "no agent answers at /none"),
        ("site", "schedd", "_CONDOR_JOB_TRANSFORM_NAMES=", "HTCondor: schedd", "has no VMJobs"),
        ("submit", "node", "LC_ALL=C", "HTCondor: node", "DAEMON_LIST of HTCondor has no such daemon"),
    ],
)
def test_what_is_missing_is_said(
    grid: Grid, host: str, role: str, change: str, what: str, said: str
) -> None:
    """Environment variables simulate the faulty HTCondor configuration."""
    content, lacking = examined(grid, host, role, change)
    assert not content
    assert said in lacking[what]
