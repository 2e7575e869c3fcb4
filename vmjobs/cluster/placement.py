"""Places cluster VMs on nodes, and explains why no node fits. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from vmjobs.cluster.guard import Guard, Guards
from vmjobs.cluster.member import MemberCode
from vmjobs.model import HypervisorKind

#: Nodes that a reason names.
NAMED: Final = 5


@dataclass(frozen=True)
class Need:
    """The resources of one VM on its node. memory, disk: MiB."""

    cpus: int
    memory: int
    disk: int


@dataclass(frozen=True)
class NodeNow:
    """A node as the service knows it.

    heard: time of its last heartbeat. alive: that is recent. kinds: hypervisors that work.
    cpus, memory, disk: its total offer to cluster VMs, used or not.
    """

    name: str
    site: str
    heard: datetime
    alive: bool
    kinds: frozenset[HypervisorKind]
    cpus: int
    memory: int
    disk: int


@dataclass(frozen=True)
class Wanted:
    """A VM to be placed. kinds: hypervisors that boot its image and that its cluster allows.

    image: its digest; empty: no backoff applies.
    """

    cluster: str
    need: Need
    kinds: frozenset[HypervisorKind]
    patterns: tuple[str, ...] = ()
    site: str = ""
    image: str = ""


class Placement(NamedTuple):
    """A node, or the reason why none fits."""

    node: str = ""
    code: MemberCode = MemberCode.PROGRESS
    why: str = ""


@dataclass
class _Left:
    cpus: int
    memory: int
    disk: int


class Room:
    """The free capacity of all nodes, while VMs are being placed."""

    def __init__(self, nodes: Iterable[NodeNow], guards: Guards | None = None) -> None:
        self._guards = guards or Guards()
        self._tried: set[tuple[str, str]] = set()
        self._nodes = sorted(nodes, key=lambda node: node.name)
        self._left = {n.name: _Left(n.cpus, n.memory, n.disk) for n in self._nodes}
        self._here: Counter[tuple[str, str]] = Counter()
        #: Requests that failed since capacity was last reserved: they would fail again.
        self._refused: dict[Wanted, Placement] = {}

    def take(self, node: str, need: Need) -> None:
        """Reserve a VM's resources on a node, which may offer less by now, or be unknown."""
        self._refused.clear()
        if left := self._left.get(node):
            left.cpus -= need.cpus
            left.memory -= need.memory
            left.disk -= need.disk

    def settle(self, node: str, cluster: str) -> None:
        """Count a cluster's VM on a node: other VMs of the cluster prefer other nodes."""
        self._here[node, cluster] += 1

    def try_there(self, node: str, image: str) -> None:
        """Note that a VM of the image on a live node is not up yet."""
        self._refused.clear()
        self._tried |= {(image, node), (image, "")}

    def place(self, wanted: Wanted) -> Placement:
        """Find and reserve the node with the fewest VMs of the cluster, then most free memory."""
        if refused := self._refused.get(wanted):
            return refused
        place = self._search(wanted)
        if not place.node:
            self._refused[wanted] = place
        return place

    def _search(self, wanted: Wanted) -> Placement:
        if not self._nodes:
            return Placement(code=MemberCode.NO_NODE, why="no node has registered with the service")
        named = [node for node in self._nodes if _matches(node, wanted)]
        if not named:
            return Placement(code=MemberCode.NO_NODE, why=_nobody(wanted, self._nodes))
        able = [node for node in named if node.alive and node.kinds & wanted.kinds]
        if not able:
            why = _listed([f"{node.name} {_unfit(node, wanted)}" for node in named])
            return Placement(code=MemberCode.NO_NODE, why=f"no node can run it: {why}")
        fitting = [node for node in able if not self._lacks(node, wanted.need)]
        if not fitting:
            return Placement(code=MemberCode.NO_ROOM, why=self._too_full(able, wanted.need))
        free = [node for node in fitting if self._barring(node, wanted.image) is None]
        if not free:
            return Placement(code=MemberCode.GUARDED, why=self._guarded(able, wanted))
        best = min(free, key=lambda node: self._order(node, wanted.cluster))
        self.take(best.name, wanted.need)
        self.try_there(best.name, wanted.image)
        self.settle(best.name, wanted.cluster)
        return Placement(best.name)

    def _barring(self, node: NodeNow, image: str) -> Guard | None:
        return self._guards.barring(
            image,
            node.name,
            trying=(image, "") in self._tried,
            trying_there=(image, node.name) in self._tried,
        )

    def _guarded(self, able: Sequence[NodeNow], wanted: Wanted) -> str:
        words = []
        for node in able:
            if lacking := self._lacks(node, wanted.need):
                words.append(f"{node.name} lacks {' and '.join(lacking)}")
            elif guard := self._barring(node, wanted.image):
                words.append(guard.sentence(self._guards.present))
        return _listed(list(dict.fromkeys(words)), "; ")

    def _order(self, node: NodeNow, cluster: str) -> tuple[int, int, str]:
        return self._here[node.name, cluster], -self._left[node.name].memory, node.name

    def _lacks(self, node: NodeNow, need: Need) -> list[str]:
        left = self._left[node.name]
        short = {
            "processors": need.cpus - max(0, left.cpus),
            "MiB of memory": need.memory - max(0, left.memory),
            "MiB of disk": need.disk - max(0, left.disk),
        }
        return [f"{count} {what}" for what, count in short.items() if count > 0]

    def _too_full(self, able: Sequence[NodeNow], need: Need) -> str:
        if all(node.memory == 0 for node in able):
            return (
                f"no node offers room for cluster VMs: the setting cluster_memory is 0 on "
                f"{_listed([node.name for node in able])}"
            )
        lacking = [f"{node.name} lacks {' and '.join(self._lacks(node, need))}" for node in able]
        hint = "; settings cluster_cpus, cluster_memory and cluster_disk of a node say what it offers"
        return f"no node has room: {_listed(lacking)}{hint}"


def _matches(node: NodeNow, wanted: Wanted) -> bool:
    of_site = wanted.site in {"", node.site}
    return of_site and (
        not wanted.patterns or any(fnmatchcase(node.name, pattern) for pattern in wanted.patterns)
    )


def _nobody(wanted: Wanted, nodes: Sequence[NodeNow]) -> str:
    words = []
    if wanted.site:
        words.append(f"is of the site {wanted.site!r}")
    if wanted.patterns:
        words.append(f"has a name like {_listed(list(wanted.patterns))}")
    there = _listed([f"{node.name} of {node.site!r}" if node.site else node.name for node in nodes])
    return f"no node {' and '.join(words)}; there are {there}"


def _unfit(node: NodeNow, wanted: Wanted) -> str:
    if not node.alive:
        return "has sent no recent heartbeat"
    there = ", ".join(sorted(node.kinds)) or "none"
    return f"has no hypervisor for it ({', '.join(sorted(wanted.kinds))}; working there: {there})"


def _listed(words: Sequence[str], between: str = ", ") -> str:
    more = len(words) - NAMED
    return between.join([*words[:NAMED], *([f"and {more} more"] if more > 0 else [])])
