"""Virtual clusters over the REST interface, as operators and agents use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from api.serve import make_app
from tests.kit.api_site import Caller, Site, make_site
from tests.kit.cluster_nodes import POOLS, Mint, World
from tests.kit.cluster_specs import body, spec
from vmjobs.client import AssignmentClient, Client
from vmjobs.cluster.vm_state import ClusterVmState, Phase
from vmjobs.cluster.wire import ClusterVmReport, ClusterVmReports
from vmjobs.errors import Forbidden, NotFound, Unavailable
from vmjobs.model import now

pytestmark = pytest.mark.settings(pools=POOLS, token_issuer=Mint(), pool_token_seconds=700)


def test_declaring_looking_and_deleting(site: Site, world: World) -> None:
    root = site.admin()
    answer = root("PUT", "/v1/clusters/vc", json=body())
    assert (answer.status_code, answer.headers["Location"]) == (201, "/v1/clusters/vc")
    made = answer.get_json()
    assert (made["outcome"], made["cluster"]["image"]) == ("created", site.image)
    again = root("PUT", "/v1/clusters/vc", json=body())
    assert (again.status_code, again.get_json()["outcome"]) == (200, "unchanged")
    assert again.get_json()["cluster"] == made["cluster"]
    assert site.queue.looks == 1
    changed = root("PUT", "/v1/clusters/vc", json=body(memory=300))
    assert (changed.status_code, changed.get_json()["outcome"]) == (200, "changed")
    (listed,) = site.user()("GET", "/v1/clusters").get_json()["clusters"]
    assert (listed["name"], listed["generation"]) == ("vc", 2)
    history = site.user()("GET", "/v1/clusters/vc/events?after=1").get_json()["events"]
    assert [e["state"] for e in history] == ["CHANGED"]
    assert root("DELETE", "/v1/clusters/vc?mode=now").status_code == 202
    for change in ("resume", "retry"):
        assert root.problem(409, "POST", f"/v1/clusters/vc/{change}")["code"] == "CONFLICT"
    world.step()
    root.problem(404, "DELETE", "/v1/clusters/vc")
    root.problem(404, "GET", "/v1/clusters/vc")


def test_who_may(site: Site) -> None:
    ada, node, job = site.user(), site.node("n1"), site.agent("0" * 32)
    changes = (
        ("PUT", "/v1/clusters/vc", body()),
        ("POST", "/v1/clusters/vc/scale", {"size": 2}),
        ("POST", "/v1/clusters/vc/drain", None),
        ("POST", "/v1/clusters/vc/resume", None),
        ("POST", "/v1/clusters/vc/retry", None),
        ("DELETE", "/v1/clusters/vc", None),
    )
    for method, path, data in changes:
        for who in (ada, node, job):
            who.problem(403, method, path, json=data)
    for path in ("/v1/clusters", "/v1/clusters/vc", "/v1/clusters/vc/events"):
        for who in (node, job):
            who.problem(403, "GET", path)
        site.caller().problem(401, "GET", path)


def test_a_pools_rooster_wakes_who_sleeps(site: Site) -> None:
    root, ada = site.admin(), site.user()
    rooster = site.caller(site.issuer.rooster_token("site"))
    root("PUT", "/v1/clusters/vc", json=body(size={"min": 0, "max": 2}))
    looks = site.queue.looks
    for _ in range(2):
        answer = rooster("POST", "/v1/clusters/vc/wake")
        assert (answer.status_code, answer.data) == (204, b"")
    assert site.queue.looks == looks + 1
    assert ada("GET", "/v1/clusters/vc").get_json()["target"] == 1
    history = ada("GET", "/v1/clusters/vc/events?after=1").get_json()["events"]
    assert [(e["state"], e["message"]) for e in history] == [
        ("SCALED", "1 VM: woken by a request of site")
    ]
    assert root("POST", "/v1/clusters/vc/wake").status_code == 204
    rooster.problem(404, "POST", "/v1/clusters/none/wake")
    rooster.problem(422, "POST", "/v1/clusters/NONE/wake")
    for who in (ada, site.node("n1"), site.agent("0" * 32)):
        who.problem(403, "POST", "/v1/clusters/vc/wake")
    for method, path, data in (
        ("GET", "/v1/clusters/vc", None),
        ("POST", "/v1/clusters/vc/scale", {"size": 2}),
        ("DELETE", "/v1/clusters/vc", None),
        ("GET", "/v1/jobs", None),
        ("GET", "/v1/images", None),
    ):
        rooster.problem(403, method, path, json=data)


def test_what_is_refused(site: Site) -> None:
    root = site.admin()
    bad = body(image="none", pool="nowhere", attributes={"Memory": 1}, start="x = 1; y")
    problem = root.problem(422, "PUT", "/v1/clusters/vc", json=bad)
    assert problem["code"] == "INVALID_SPEC"
    fields = {error["field"] for error in problem["errors"]}
    assert {"image", "pool", "attributes.Memory", "start"} <= fields
    assert root.problem(422, "POST", "/v1/cluster-assessments", json=bad)["errors"] == problem["errors"]
    faults = root.problem(422, "PUT", "/v1/clusters/other", json=body())["errors"]
    assert [(fault["field"], fault["code"]) for fault in faults] == [("name", "mismatch")]
    faults = root.problem(422, "PUT", "/v1/clusters/vc", json=body(size=-1, cpus="x", odd=1))["errors"]
    assert len({fault["field"] for fault in faults}) == 3
    for name in ("VC", "-a", "a" * 40, "a.b"):
        root.problem(422, "GET", f"/v1/clusters/{name}")
    root.problem(400, "PUT", "/v1/clusters/vc", data=b"{", content_type="application/json")
    root("PUT", "/v1/clusters/vc", json=body())
    for query in ("mode=soon", "when=now"):
        root.problem(422, "DELETE", f"/v1/clusters/vc?{query}")
    root.problem(422, "POST", "/v1/clusters/vc/scale", json={"size": 1001})
    root.problem(404, "POST", "/v1/clusters/none/scale", json={"size": 1})


def test_a_change_needs_no_broker(site: Site) -> None:
    site.queue.down = True
    assert site.admin()("PUT", "/v1/clusters/vc", json=body()).status_code == 201


def test_another_nodes_token_is_refused(site: Site, world: World) -> None:
    site.admin()("PUT", "/v1/clusters/vc", json=body(nodes=["n1"]))
    world.step()
    member = world.vms()["vc-0"].id
    paths: tuple[tuple[str, str, Any], ...] = (
        ("GET", "/v1/nodes/n1/members", None),
        ("POST", "/v1/nodes/n1/members", {"reports": []}),
        ("POST", f"/v1/nodes/n1/members/{member}/token", {"incarnation": 1}),
    )
    console = f"/v1/nodes/n1/members/{member}/console?incarnation=1&offset=0"
    for who in (site.node("n2"), site.user("n1"), site.admin("n1"), site.agent(member, "n1")):
        for method, path, data in paths:
            who.problem(403, method, path, json=data)
        who.problem(403, "POST", console, data=b"x")
    # A node that asks under its own name for the token of another node's VM.
    problem = site.node("n2").problem(
        403, "POST", f"/v1/nodes/n2/members/{member}/token", json={"incarnation": 1}
    )
    assert problem["code"] == "FORBIDDEN"
    site.node("n2").problem(403, "POST", console.replace("/n1/", "/n2/"), data=b"x")
    made = site.node("n1")("POST", paths[2][1], json={"incarnation": 1})
    assert made.get_json()["token"] == "site vc-0 1 700"
    assert made.headers["Cache-Control"] == "no-store"
    for incarnation in (2, 0, -1, "x", 2**70):
        answer = site.node("n1")("POST", paths[2][1], json={"incarnation": incarnation})
        assert answer.status_code in {403, 422}, answer.text


@pytest.mark.parametrize("keys", [None, "keys-of-pools"])
def test_a_service_without_good_keys_makes_no_tokens(tmp_path: Path, keys: str | None) -> None:
    """The agent's request fails with 503, so that it asks again."""
    site = make_site(tmp_path, pools=POOLS, pool_key_dir=tmp_path / keys if keys else None)
    world = World(site.repository, "n1")
    site.admin()("PUT", "/v1/clusters/vc", json=body())
    world.step()
    path = f"/v1/nodes/n1/members/{world.vms()['vc-0'].id}/token"
    agent = Caller(make_app(site.config).test_client(), site.node("n1").token)
    problem = agent.problem(503, "POST", path, json={"incarnation": 1})
    assert problem["code"] == "UNAVAILABLE"
    assert keys or "pool_key_dir" in problem["hint"]


def test_the_assignment_and_reports(site: Site, world: World) -> None:
    agent = site.node("n1")
    nothing = agent("GET", "/v1/nodes/n1/members").get_json()
    assert nothing == {"revision": 0, "members": [], "sessions": []}
    site.admin()("PUT", "/v1/clusters/vc", json=body(nodes=["n1"]))
    world.step()
    found = agent("GET", "/v1/nodes/n1/members").get_json()
    (order,) = found["members"]
    assert (found["revision"], order["name"], order["image"]) == (1, "vc-0", site.image)
    report = {"id": order["id"], "incarnation": 1, "phase": "running", "since": "2026-01-01T00:00:00Z"}
    told = {**report, "message": "a\0b", "retry": "2026-01-01T00:00:00"}
    assert agent("POST", "/v1/nodes/n1/members", json={"reports": [told]}).status_code == 204
    (vm,) = site.user()("GET", "/v1/clusters/vc").get_json()["members"]
    assert (vm["state"], vm["incarnation"]) == ("JOINING", 1)
    agent.problem(422, "POST", "/v1/nodes/n1/members", json={"reports": [{**report, "phase": "x"}]})
    # The node may read its image, even a private one.
    assert agent("GET", f"/v1/images/{order['image']}/manifest").status_code == 200


def test_consoles(site: Site, world: World) -> None:
    site.admin()("PUT", "/v1/clusters/vc", json=body(nodes=["n1"]))
    world.step()
    path = f"/v1/nodes/n1/members/{world.vms()['vc-0'].id}/console"
    agent, ada = site.node("n1"), site.user()
    for _ in range(2):
        assert agent("POST", f"{path}?incarnation=1&offset=0", data=b"hello").status_code == 204
    agent.problem(409, "POST", f"{path}?incarnation=1&offset=9", data=b"x")
    agent.problem(422, "POST", f"{path}?incarnation=0&offset=0", data=b"x")
    shown = "/v1/clusters/vc/members/vc-0/console"
    assert ada("GET", shown).data == b"hello"
    ada.problem(404, "GET", "/v1/clusters/vc/members/vc-9/console")
    ada.problem(404, "GET", f"{shown}?incarnation=3")
    ada.problem(422, "GET", "/v1/clusters/vc/members/x/console")
    agent.problem(403, "GET", shown)


def test_the_operators_client(site: Site, world: World, url: str) -> None:
    """The commands use the rest of it: test_cluster_commands.py."""
    world.apply(spec(size=2))
    world.bring_up()
    with Client(url, site.admin().token) as api:
        clusters = api.clusters
        assert [(c.name, c.up) for c in clusters.list()] == [("vc", 2)]
        events = clusters.events("vc")
        assert clusters.events("vc", events[-2].seq) == events[-1:]
        vm = clusters.get("vc").members[0]
        world.repository.assignments.append_console(vm.node, vm.id, 1, 0, b"hello")
        assert b"".join(clusters.console("vc", vm.name, 2)) == b"llo"
        assert b"".join(clusters.console("vc", vm.name, 5)) == b""
        with pytest.raises(NotFound):
            clusters.get("..")


def test_the_agents_client(site: Site, world: World, url: str) -> None:
    agent = AssignmentClient(url, site.node("n1").token, "n1")
    assert agent.assignment(-1, 20).revision == 0
    world.apply(spec(nodes=["n1"]))
    world.step()
    (order,) = agent.assignment(0, 20).members
    assert agent.token(order.id, 1).identity == order.id
    with pytest.raises(Forbidden):
        agent.token(order.id, 2)
    agent.append_console(order.id, 1, 0, b"x" * 900)
    told = ClusterVmReport(id=order.id, incarnation=1, phase=Phase.RUNNING, since=now())
    agent.report(ClusterVmReports(reports=(told,), complete=True))
    assert world.states() == {"vc-0": ClusterVmState.JOINING}
    agent.close()
    with pytest.raises(Unavailable):
        agent.assignment(0, 0)
