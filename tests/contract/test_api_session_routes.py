"""Sessions over the REST interface: operators on one side, a node's agent on the other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from api import sessions
from tests.kit.api_site import Site
from tests.kit.cluster_nodes import POOLS, World
from vmjobs.cluster.ssh_session import MAX_PIECE_BYTES
from vmjobs.cluster.vm_state import Phase

pytestmark = [pytest.mark.in_process, pytest.mark.settings(pools=POOLS)]

KEY = "ssh-ed25519 " + "K" * 68
HOST_KEY = "ssh-ed25519 " + "H" * 68
URL = "/v1/clusters/vc/members/vc-0/sessions"


@pytest.fixture
def world(site: Site) -> World:
    """One cluster VM, on the node n1."""
    made = World(site.repository, "n1")
    made.apply(image="tiny")
    made.step()
    return made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def answered(site: Site, pool: ThreadPoolExecutor, **answer: Any) -> tuple[Any, str]:
    """Ask for a session, have the node answer; return the operator's response, and the id."""
    share = site.node("n1")
    seen = share("GET", "/v1/nodes/n1/members").get_json()["revision"]
    asked = pool.submit(site.admin(), "POST", URL, json={"key": KEY})
    told = share("GET", f"/v1/nodes/n1/members?seen={seen}&wait=20").get_json()
    assert told["revision"] > seen
    (call,) = told["sessions"]
    assert (call["key"], call["incarnation"]) == (KEY, 1)
    assert share("POST", f"/v1/nodes/n1/sessions/{call['id']}", json=answer).status_code == 204
    assert share("GET", "/v1/nodes/n1/members").get_json()["sessions"] == []
    return asked.result(60), call["id"]


def test_bytes_pass_and_the_login_is_in_the_history(
    site: Site, world: World, pool: ThreadPoolExecutor
) -> None:
    world.run("vc-0")
    made, session = answered(site, pool, host_key=HOST_KEY)
    shown = {"id": session, "cluster": "vc", "machine": "vc-0", "node": "n1", "user": "root"}
    assert (made.status_code, made.get_json()) == (201, {**shown, "host_key": HOST_KEY})
    operator, agent = f"/v1/sessions/{session}", f"/v1/nodes/n1/sessions/{session}"
    root, node = site.admin(), site.node("n1")
    sent = root("POST", f"{operator}/bytes?offset=0", data=b"\0ssh")
    assert (sent.status_code, sent.get_json()) == (200, {"offset": 4})
    heard = node("GET", f"{agent}/bytes?offset=0&wait=10")
    assert (heard.data, heard.headers["Vmjobs-Stream"]) == (b"\0ssh", "open")
    assert heard.headers["Cache-Control"] == "no-store"
    node("POST", f"{agent}/bytes?offset=0&end=true", data=b"bye")
    heard = root("GET", f"{operator}/bytes?offset=0&wait=10")
    assert (heard.data, heard.headers["Vmjobs-Stream"]) == (b"bye", "ended")
    for _ in range(2):
        assert root("DELETE", operator).status_code == 204
        assert node("DELETE", agent).status_code == 204
    over = node.problem(404, "GET", f"{agent}/bytes?offset=4")
    assert over["code"] == "SESSION_OVER"
    assert over["detail"] == "the session is over: its node has left"
    (line,) = [e for e in world.repository.clusters.events("vc") if e.code == "LOGIN"]
    assert (line.member, line.node, line.state) == ("vc-0", "n1", "LOGIN")
    assert line.message == "root logs in as root"


def test_a_vm_that_lets_nobody_in(site: Site, world: World, pool: ThreadPoolExecutor) -> None:
    world.run("vc-0")
    made, _ = answered(site, pool, refused="the machine's image has no SSH server")
    assert (made.status_code, made.get_json(force=True)["code"]) == (409, "NO_LOGIN")
    assert made.get_json(force=True)["detail"] == "vc-0: the machine's image has no SSH server"
    assert not [e for e in world.repository.clusters.events("vc") if e.code == "LOGIN"]


def test_a_node_that_says_nothing(site: Site, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ANSWER_SECONDS", 0.1)
    world.run("vc-0")
    problem = site.admin().problem(503, "POST", URL, json={"key": KEY})
    assert (problem["code"], problem["service"]) == ("UNAVAILABLE", "agent")
    assert "n1" in problem["detail"]
    assert site.node("n1")("GET", "/v1/nodes/n1/members").get_json()["sessions"] == []


@pytest.mark.parametrize("phase", [Phase.BOOTING, Phase.WAITING, Phase.STOPPING, Phase.GONE])
def test_a_vm_that_does_not_run(site: Site, world: World, phase: Phase) -> None:
    world.report(world.vms()["vc-0"], phase)
    problem = site.admin().problem(409, "POST", URL, json={"key": KEY})
    assert problem["code"] == "MACHINE_NOT_RUNNING"
    assert "vc-0: it is" in problem["detail"]


def test_who_may_not(site: Site, world: World, pool: ThreadPoolExecutor) -> None:
    world.run("vc-0")
    assert site.user().problem(403, "POST", URL, json={"key": KEY})["code"] == "FORBIDDEN"
    site.node("n1").problem(403, "POST", URL, json={"key": KEY})
    for key in ("ssh-rsa AAAA", KEY + "\nssh-ed25519 x", f'command="x" {KEY}', KEY + " x"):
        site.admin().problem(422, "POST", URL, json={"key": key})
    _, session = answered(site, pool, host_key=HOST_KEY)
    for somebody in (site.admin("eve"), site.user(), site.node("n1")):
        for method, path in (("GET", "/bytes?offset=0"), ("POST", "/bytes?offset=0")):
            refused = somebody(method, f"/v1/sessions/{session}{path}")
            assert refused.status_code in {403, 404}
        somebody("DELETE", f"/v1/sessions/{session}")
    other = site.node("n2")
    other.problem(403, "GET", f"/v1/nodes/n1/sessions/{session}/bytes?offset=0")
    other.problem(404, "GET", f"/v1/nodes/n2/sessions/{session}/bytes?offset=0")
    other.problem(404, "POST", f"/v1/nodes/n2/sessions/{session}", json={"host_key": HOST_KEY})
    root = site.admin()
    assert root("GET", f"/v1/sessions/{session}/bytes?offset=0").status_code == 200
    root.problem(413, "POST", f"/v1/sessions/{session}/bytes?offset=0", data=bytes(MAX_PIECE_BYTES + 1))
    root.problem(409, "POST", f"/v1/sessions/{session}/bytes?offset=1", data=b"x")


def test_nothing_is_written_down(site: Site, world: World, pool: ThreadPoolExecutor) -> None:
    world.run("vc-0")
    _, session = answered(site, pool, host_key=HOST_KEY)
    site.admin()("POST", f"/v1/sessions/{session}/bytes?offset=0", data=b"what nobody keeps")
    files = [path for path in site.config.data_dir.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"what nobody keeps" in path.read_bytes()]
    left = {path.name for path in (site.config.data_dir / "run").iterdir()}
    assert left == {"sessions.lock", "sessions.sock"}
