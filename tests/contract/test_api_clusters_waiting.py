"""Agents that wait over the REST interface until their cluster VMs change."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
import requests

from api.assignment_stream import POLL_SECONDS
from api.tokens import make_issuer
from repository.clusters.assignments import ClusterAssignments
from repository.clusters.core import node_lease
from repository.clusters.tables import AssignmentRow
from repository.db.models import NodeRow
from repository.service import Repository, open_repository
from tests.kit.api_site import Site
from tests.kit.cluster_nodes import POOLS, Mint, World
from tests.kit.cluster_specs import spec
from tests.kit.processes import running
from tests.kit.repository_jobs import migrated_sqlite
from tests.kit.sockets import free_port
from tests.kit.waiting import wait_until
from vmjobs.client import AssignmentClient
from vmjobs.client import agent as agent_client
from vmjobs.cluster.vm_state import ClusterVmState, Goal
from vmjobs.config import Config
from vmjobs.model import now

pytestmark = pytest.mark.settings(pools=POOLS, token_issuer=Mint(), pool_token_seconds=700)


def test_a_change_ends_the_wait(site: Site, world: World, url: str) -> None:
    agent = AssignmentClient(url, site.node("n1").token, "n1")
    seen = agent.assignment(-1, 0).revision
    with ThreadPoolExecutor(1) as pool:
        begun = time.monotonic()
        waiting = pool.submit(agent.assignment, seen, 30)
        world.apply(spec(nodes=["n1"]))
        world.step()
        assert len(waiting.result().members) == 1
        # Each change of an order ends the wait again: here, its cluster is deleted.
        waiting = pool.submit(agent.assignment, seen + 1, 30)
        world.repository.cluster_actions.delete("vc", Goal.STOP, "root")
        world.step()
        assert waiting.result().members[0].goal is Goal.STOP
        assert time.monotonic() - begun < 25
    assert agent.assignment(seen + 2, 0.2).revision == seen + 2
    agent.close()


def test_waiting_costs_one_query_for_all(site: Site, world: World, url: str) -> None:
    asked: list[list[str]] = []
    real = world.repository.assignments.revisions
    site.app.extensions["vmjobs"].assignments._revisions = lambda nodes: (
        asked.append(list(nodes)) or real(nodes)
    )
    names = [f"n{number}" for number in range(4)]
    agents = [AssignmentClient(url, site.node(name).token, name) for name in names]
    with ThreadPoolExecutor(len(agents)) as pool:
        begun = time.monotonic()
        list(pool.map(lambda agent: agent.assignment(0, 8), agents))
        took = time.monotonic() - begun
    assert names in asked
    assert len(asked) <= took / POLL_SECONDS + 4
    wait_until(lambda: not site.app.extensions["vmjobs"].assignments._is_polling)
    before = len(asked)
    time.sleep(1)
    assert len(asked) == before  # without a waiter, no query
    for agent in agents:
        agent.close()


def test_who_comes_when_too_many_wait_is_answered_at_once(site: Site, world: World, url: str) -> None:
    assignments = site.app.extensions["vmjobs"].assignments
    arguments = [(f"n{n}", 0, 300) for n in range(4)]
    waiting = [threading.Thread(target=assignments.wait, args=a, daemon=True) for a in arguments]
    for thread in waiting:
        thread.start()
    wait_until(lambda: assignments._waiting.total() == 4)
    begun = time.monotonic()
    assert site.node("n9")("GET", "/v1/nodes/n9/members?seen=0&wait=20").status_code == 200
    assert time.monotonic() - begun < 15
    # The client library does not ask again at once.
    with patch.object(agent_client, "CROWDED_PAUSE_SECONDS", 0.5):
        agent = AssignmentClient(url, site.node("n9").token, "n9")
        real = ClusterAssignments.get
        with patch.object(ClusterAssignments, "get", autospec=True, side_effect=real) as asked:
            assert agent.assignment(0, 1.2).revision == 0
        assert 2 <= asked.call_count <= 8
        agent.close()
    assignments.close()  # like a server that stops
    for thread in waiting:
        thread.join(60)
        assert not thread.is_alive()


def test_who_waits_does_not_hold_up_the_end_of_the_service(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    settings = Config(data_dir=tmp_path / "data", listen=listen, api_workers=1)
    migrated_sqlite(tmp_path / "data" / "vmjobs.db")
    headers = {"Authorization": f"Bearer {make_issuer(settings).node_token('n1')}"}
    url = f"http://{listen}/v1/nodes/n1/members?seen=0&wait=25"
    with ThreadPoolExecutor(1) as pool:
        with running(settings, tmp_path / "log") as process:
            waiting = pool.submit(requests.get, url, headers=headers, timeout=60)
            with closing(open_repository(settings, migrate=False)) as repository:
                wait_until(lambda: has_asked(repository, "n1"))
            assert not waiting.done()
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert waiting.result(60).json() == {"revision": 0, "members": [], "sessions": []}
    assert time.monotonic() - begun < 20


def has_asked(repository: Repository, node: str) -> bool:
    """Whether a node has asked for its assignment."""
    with repository.database.read() as session:
        return session.get(AssignmentRow, node) is not None


def test_asking_for_its_assignment_shows_that_a_node_is_there(site: Site, world: World) -> None:
    world.apply(spec(nodes=["n1"]))
    world.step()
    long_ago = now() - 2 * node_lease(world.repository.config)
    with site.repository.database.write() as session:
        for row in session.query(NodeRow):
            row.heard = long_ago
    assert world.states() == {"vc-0": ClusterVmState.LOST}
    site.node("n1")("GET", "/v1/nodes/n1/members")
    assert world.states() == {"vc-0": ClusterVmState.ASSIGNED}
