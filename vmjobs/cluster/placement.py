"""Places cluster VMs on nodes, and explains why no node fits. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from vmjobs.cluster.failure_backoff import FailureBackoff, FailureBackoffs
from vmjobs.cluster.vm_state import ClusterVmCode
from vmjobs.model import HypervisorKind

#: Nodes that a reason names.
MAX_NAMED_NODES: Final = 5


@dataclass(frozen=True)
class VmRequest:
    """The resources of one VM on its node. memory, disk: MiB."""

    cpus: int
    memory: int
    disk: int


@dataclass(frozen=True)
class NodeSnapshot:
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
class PlacementRequest:
    """A VM to be placed. kinds: hypervisors that boot its image and that its cluster allows.

    image: its digest; empty: no backoff applies.
    """

    cluster: str
    need: VmRequest
    kinds: frozenset[HypervisorKind]
    patterns: tuple[str, ...] = ()
    site: str = ""
    image: str = ""


class Placement(NamedTuple):
    """A node, or the reason why none fits."""

    node: str = ""
    code: ClusterVmCode = ClusterVmCode.PROGRESS
    why: str = ""


@dataclass
class _FreeResources:
    cpus: int
    memory: int
    disk: int


class FreeCapacity:
    """The free capacity of all nodes, while VMs are being placed."""

    def __init__(self, nodes: Iterable[NodeSnapshot], guards: FailureBackoffs | None = None) -> None:
        self._guards = guards or FailureBackoffs()
        self._starting: set[tuple[str, str]] = set()
        self._nodes = sorted(nodes, key=lambda node: node.name)
        self._free = {n.name: _FreeResources(n.cpus, n.memory, n.disk) for n in self._nodes}
        self._vm_counts: Counter[tuple[str, str]] = Counter()
        #: Requests that failed since capacity was last reserved: they would fail again.
        self._refused: dict[PlacementRequest, Placement] = {}

    def reserve(self, node: str, need: VmRequest) -> None:
        """Reserve a VM's resources on a node, which may offer less by now, or be unknown."""
        self._refused.clear()
        if left := self._free.get(node):
            left.cpus -= need.cpus
            left.memory -= need.memory
            left.disk -= need.disk

    def count_vm(self, node: str, cluster: str) -> None:
        """Count a cluster's VM on a node: other VMs of the cluster prefer other nodes."""
        self._vm_counts[node, cluster] += 1

    def note_starting(self, node: str, image: str) -> None:
        """Note that a VM of the image on a live node is not up yet."""
        self._refused.clear()
        self._starting |= {(image, node), (image, "")}

    def place(self, wanted: PlacementRequest) -> Placement:
        """Find and reserve the node with the fewest VMs of the cluster, then most free memory."""
        if refused := self._refused.get(wanted):
            return refused
        place = self._search(wanted)
        if not place.node:
            self._refused[wanted] = place
        return place

    def _search(self, wanted: PlacementRequest) -> Placement:
        if not self._nodes:
            return Placement(code=ClusterVmCode.NO_NODE, why="no node has registered with the service")
        named = [node for node in self._nodes if _matches(node, wanted)]
        if not named:
            return Placement(code=ClusterVmCode.NO_NODE, why=_no_match_reason(wanted, self._nodes))
        able = [node for node in named if node.alive and node.kinds & wanted.kinds]
        if not able:
            why = _join_limited([f"{node.name} {_unusable_reason(node, wanted)}" for node in named])
            return Placement(code=ClusterVmCode.NO_NODE, why=f"no node can run it: {why}")
        fitting = [node for node in able if not self._lacks(node, wanted.need)]
        if not fitting:
            return Placement(code=ClusterVmCode.NO_ROOM, why=self._full_reason(able, wanted.need))
        free = [node for node in fitting if self._blocking(node, wanted.image) is None]
        if not free:
            return Placement(code=ClusterVmCode.GUARDED, why=self._blocked_reason(able, wanted))
        best = min(free, key=lambda node: self._order(node, wanted.cluster))
        self.reserve(best.name, wanted.need)
        self.note_starting(best.name, wanted.image)
        self.count_vm(best.name, wanted.cluster)
        return Placement(best.name)

    def _blocking(self, node: NodeSnapshot, image: str) -> FailureBackoff | None:
        return self._guards.blocking(
            image,
            node.name,
            trying=(image, "") in self._starting,
            trying_there=(image, node.name) in self._starting,
        )

    def _blocked_reason(self, able: Sequence[NodeSnapshot], wanted: PlacementRequest) -> str:
        words = []
        for node in able:
            if lacking := self._lacks(node, wanted.need):
                words.append(f"{node.name} lacks {' and '.join(lacking)}")
            elif guard := self._blocking(node, wanted.image):
                words.append(guard.describe(self._guards.present))
        return _join_limited(list(dict.fromkeys(words)), "; ")

    def _order(self, node: NodeSnapshot, cluster: str) -> tuple[int, int, str]:
        return self._vm_counts[node.name, cluster], -self._free[node.name].memory, node.name

    def _lacks(self, node: NodeSnapshot, need: VmRequest) -> list[str]:
        left = self._free[node.name]
        short = {
            "processors": need.cpus - max(0, left.cpus),
            "MiB of memory": need.memory - max(0, left.memory),
            "MiB of disk": need.disk - max(0, left.disk),
        }
        return [f"{count} {what}" for what, count in short.items() if count > 0]

    def _full_reason(self, able: Sequence[NodeSnapshot], need: VmRequest) -> str:
        if all(node.memory == 0 for node in able):
            return (
                f"no node offers room for cluster VMs: the setting cluster_memory is 0 on "
                f"{_join_limited([node.name for node in able])}"
            )
        lacking = [f"{node.name} lacks {' and '.join(self._lacks(node, need))}" for node in able]
        hint = "; settings cluster_cpus, cluster_memory and cluster_disk of a node say what it offers"
        return f"no node has room: {_join_limited(lacking)}{hint}"


def _matches(node: NodeSnapshot, wanted: PlacementRequest) -> bool:
    of_site = wanted.site in {"", node.site}
    return of_site and (
        not wanted.patterns or any(fnmatchcase(node.name, pattern) for pattern in wanted.patterns)
    )


def _no_match_reason(wanted: PlacementRequest, nodes: Sequence[NodeSnapshot]) -> str:
    words = []
    if wanted.site:
        words.append(f"is of the site {wanted.site!r}")
    if wanted.patterns:
        words.append(f"has a name like {_join_limited(list(wanted.patterns))}")
    there = _join_limited(
        [f"{node.name} of {node.site!r}" if node.site else node.name for node in nodes]
    )
    return f"no node {' and '.join(words)}; there are {there}"


def _unusable_reason(node: NodeSnapshot, wanted: PlacementRequest) -> str:
    if not node.alive:
        return "has sent no recent heartbeat"
    there = ", ".join(sorted(node.kinds)) or "none"
    return f"has no hypervisor for it ({', '.join(sorted(wanted.kinds))}; working there: {there})"


def _join_limited(words: Sequence[str], between: str = ", ") -> str:
    more = len(words) - MAX_NAMED_NODES
    return between.join([*words[:MAX_NAMED_NODES], *([f"and {more} more"] if more > 0 else [])])
