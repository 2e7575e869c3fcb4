"""`vmjobs job why`: the reasons for which jobs do not run, on hosts with a schedd."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.kit.grid import NODES, Grid
from tests.kit.steps import configured
from tests.kit.submit_host import BY_CONDOR_C, Desk, desk, why_once

__all__ = ["desk"]


def test_a_job_that_no_node_has_the_memory_for(desk: Desk) -> None:
    """Its image does not exist either: that is found before a node meets it."""
    cluster = desk.submit("true", image="no-such-image", request_memory="999999")
    found = why_once(desk, cluster, "TOO_LARGE")
    assert (found["id"], found["state"]) == (f"{cluster}.0", "idle")
    assert len(found["way"]) == (1 if desk.host == "site" else 2)
    assert found["way"][-1].endswith(" at site.grid")
    assert "999999 MiB" in found["findings"][0]["message"]
    (clause,) = [c for c in found["clauses"] if c["text"] == "TARGET.RequestMemory <= MY.Memory"]
    # VMs of a virtual cluster, or the ads that they leave, may be in the pool as well.
    assert clause["nodes"]["count"] >= len(NODES)
    assert clause["job"] == {"RequestMemory": "999999"}

    said = desk("vmjobs", "job", "why", cluster)
    assert said.startswith(f"{cluster}.0 is idle")
    assert "CLAUSE" in said and "what to do:" in said

    token = Path(os.environ["VMJOBS_TOKEN_FILE"]).read_text("ascii").strip()
    desk.write("token", token)
    desk("chmod", "600", f"{desk.folder}/token")
    ask = ("env", f"VMJOBS_TOKEN_FILE={desk.folder}/token", "VMJOBS_API_URL=https://api.grid:8443")
    findings = json.loads(desk(*ask, "vmjobs", "job", "why", cluster, "--json"))["findings"]
    (missing,) = [finding for finding in findings if finding["code"] == "IMAGE_MISSING"]
    assert "no-such-image" in missing["message"]


def test_a_job_whose_site_is_not_there(grid: Grid) -> None:
    nowhere = BY_CONDOR_C.replace("site.grid site.grid", "nowhere.grid nowhere.grid")
    with Desk(grid, "submit", nowhere) as desk:
        found = why_once(desk, desk.submit("true"), "SITE_DOWN")
        assert "cannot reach the schedd nowhere.grid" in found["findings"][0]["message"]


@pytest.mark.disruptive
def test_a_job_that_the_router_does_not_take(grid: Grid) -> None:
    with configured(grid, "submit", "route", "JOB_ROUTER_ROUTE_NAMES ="), Desk(grid, "submit") as desk:
        found = why_once(desk, desk.submit("true"), "NOT_ROUTED")
        assert "job router" in found["findings"][0]["message"]


@pytest.mark.disruptive
def test_a_job_whose_group_has_what_it_may_have(grid: Grid) -> None:
    quota = "GROUP_NAMES = group_small\nGROUP_QUOTA_group_small = 1\nGROUP_ACCEPT_SURPLUS = false"
    group = {"accounting_group": "group_small", "request_memory": "128"}
    with configured(grid, "site", "quota", quota), Desk(grid, "site") as desk:
        desk.running(desk.submit("sleep 1000", **group))
        found = why_once(desk, desk.submit("true", **group), "QUOTA")
        assert "group_small may use 1, and uses 1" in found["findings"][0]["message"]
