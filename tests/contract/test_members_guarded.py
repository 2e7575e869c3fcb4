"""A node on which machines only fail, for real: User Mode Linux, two agents, the repository."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from api_support import make_site
from clusters_kit import POOLS, World
from hypervisor_host import wait_until
from member_node_kit import clear, kept, member_parts, remains

from repository.clusters.service import Clusters
from vmjobs.agent.members.parts import MemberParts
from vmjobs.cluster.guard import GuardState
from vmjobs.cluster.member import MemberCode, MemberState
from vmjobs.cluster.wire import MemberReports, NodeShare, PoolToken
from vmjobs.model import now

SECONDS = 120.0


class Direct:
    """The service as the agent of a node has it, without a network in between."""

    def __init__(self, clusters: Clusters, node: str) -> None:
        self._clusters, self._node = clusters, node

    def share(self, seen: int, wait: float) -> NodeShare:
        deadline = time.monotonic() + min(wait, 1.0)
        while True:
            share = self._clusters.share(self._node)
            if share.revision != seen or time.monotonic() > deadline:
                return share
            time.sleep(0.05)

    def report(self, reports: MemberReports) -> None:
        self._clusters.take_reports(self._node, reports)

    def token(self, member: str, incarnation: int) -> PoolToken:
        self._clusters.order_for(self._node, member, incarnation)
        return PoolToken(token="t", identity="it", expires=now() + timedelta(seconds=600))

    def append_console(self, member: str, incarnation: int, offset: int, data: bytes) -> None:
        self._clusters.append_console(self._node, member, incarnation, offset, data)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(make_site(tmp_path / "data", pools=POOLS).repository, "n1", "n2")


@pytest.fixture
def nodes(tmp_path: Path, world: World) -> Iterator[dict[str, MemberParts]]:
    """On n1 no machine gets anywhere; n2 is well."""
    made = {}
    for name, more in (("n1", "echo no pool here; exit 3"), ("n2", "")):
        made[name] = member_parts(tmp_path / name, Direct(world.clusters, name), more=more)
    yield made
    for parts in made.values():
        clear(parts.journal.prefix)


def test_a_black_hole_is_left(world: World, nodes: dict[str, MemberParts]) -> None:
    world.apply(image="tiny", memory=128, disk=64)
    world.step()
    (first,) = world.members().values()
    assert first.node == "n1"

    def is_up() -> bool:
        world.step()
        for member in world.members().values():
            if member.state is MemberState.JOINING and member.node == "n2":
                world.pool.join(member.name, member.incarnation)
        return list(world.states().values()) == [MemberState.UP]

    with kept(nodes["n1"]), kept(nodes["n2"]):
        wait_until(is_up, SECONDS, "another machine is up")
        (last,) = world.members().values()
        assert (last.name, last.node, last.incarnation) == ("vc-1", "n2", 1)
        (guard,) = world.clusters.get("vc").guards
        assert (guard.node, guard.state, guard.failures, guard.code) == (
            "n1",
            GuardState.CLOSED,
            3,
            MemberCode.GUEST_ENDED,
        )
        assert "ended with status 3" in guard.message
        wait_until(lambda: remains(nodes["n1"]) == [], SECONDS, "nothing is left on the other node")
        assert [e[1] for e in world.codes()].count("BACKOFF") == 3
