"""Backoff after failed VMs: stops starting an image where it keeps failing. No I/O.

Failures in a row are counted for each image on each node, and for each image on all nodes. Too many
of them close the pair, or the image everywhere, for a pause that doubles each time. After it one VM
at a time is tried, and a VM that comes up opens it again. (A circuit breaker with inverted names:
OPEN lets VMs start.)

=========  =================================  ==============================================
state      a failure                          a VM that comes up
=========  =================================  ==============================================
OPEN       counts; one too many: CLOSED       resets the count
CLOSED     counts                             OPEN
HALF_OPEN  CLOSED for twice as long           OPEN
=========  =================================  ==============================================

CLOSED becomes HALF_OPEN after its pause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from vmjobs.cluster.vm_state import ClusterVmCode

#: Failures in a row of an image on one node that close it there.
PAIR_LIMIT: Final = 3
#: An image that never came up anywhere is closed everywhere after failures on so many nodes...
IMAGE_NODES: Final = 2
#: ... or after so many failures.
IMAGE_LIMIT: Final = 5
FIRST_PAUSE: Final = timedelta(seconds=60)
LONGEST_PAUSE: Final = timedelta(hours=1)
#: Limits of a message: failed nodes, and characters of the last failure's message.
MAX_NAMED_NODES: Final = 5
_MAX_MESSAGE_CHARACTERS: Final = 200


class BackoffState(StrEnum):
    """OPEN: VMs may start. CLOSED: none for now. HALF_OPEN: one at a time."""

    OPEN = "open"
    CLOSED = "closed"
    HALF_OPEN = "half-open"


class FaultSource(StrEnum):
    """The suspected cause of a failed VM. PAIR: this image on this node."""

    UNKNOWN = "unknown"
    NODE = "node"
    IMAGE = "image"
    PAIR = "pair"


_FAULT_SOURCES: Final = {
    ClusterVmCode.IMAGE_REJECTED: FaultSource.IMAGE,
    ClusterVmCode.KERNEL_PANIC: FaultSource.IMAGE,
    ClusterVmCode.IMAGE_UNAVAILABLE: FaultSource.NODE,
    ClusterVmCode.NO_HYPERVISOR: FaultSource.NODE,
    ClusterVmCode.NODE_FAILED: FaultSource.NODE,
    ClusterVmCode.INTERNAL: FaultSource.NODE,
    ClusterVmCode.BOOT_FAILED: FaultSource.PAIR,
    ClusterVmCode.BOOT_TIMED_OUT: FaultSource.PAIR,
    ClusterVmCode.GUEST_LOST: FaultSource.PAIR,
    ClusterVmCode.GUEST_ENDED: FaultSource.PAIR,
    ClusterVmCode.JOIN_TIMED_OUT: FaultSource.PAIR,
    ClusterVmCode.PROBE_FAILED: FaultSource.PAIR,
}


def fault_source(code: ClusterVmCode) -> FaultSource:
    """Return the suspected cause of a VM that ended for this reason."""
    return _FAULT_SOURCES.get(code, FaultSource.UNKNOWN)


@dataclass(frozen=True)
class VmFailures:
    """Failed VMs of an image on a node: how many, and the last one's reason."""

    node: str
    code: ClusterVmCode
    why: str = ""
    count: int = 1


@dataclass(frozen=True)
class FailureBackoff:
    """The failures of an image on a node; node: empty: on all nodes.

    failures: in a row. closures: since the last VM that came up. until: time of the next try; None: it
    is open. code, why: of the last failure. nodes: where it failed, if it covers all nodes. proven: a
    VM came up at some time.
    """

    image: str
    node: str = ""
    failures: int = 0
    closures: int = 0
    until: datetime | None = None
    code: ClusterVmCode = ClusterVmCode.PROGRESS
    why: str = ""
    nodes: tuple[str, ...] = ()
    proven: bool = False

    def state(self, present: datetime) -> BackoffState:
        if self.until is None:
            return BackoffState.OPEN
        return BackoffState.CLOSED if present < self.until else BackoffState.HALF_OPEN

    def is_relevant(self, failure: VmFailures) -> bool:
        """Whether a failure counts here."""
        source = fault_source(failure.code)
        return source is not FaultSource.UNKNOWN and not (source is FaultSource.NODE and not self.node)

    @property
    def exceeds_limit(self) -> bool:
        if self.node:
            return self.failures >= PAIR_LIMIT
        spread = self.failures >= IMAGE_LIMIT or len(self.nodes) >= IMAGE_NODES
        return spread and not self.proven

    def after_failure(self, failure: VmFailures, present: datetime) -> FailureBackoff:
        if not self.is_relevant(failure):
            return self
        nodes = self.nodes
        if not self.node and failure.node not in nodes:
            nodes = (*nodes, failure.node)[-MAX_NAMED_NODES:]
        failures = self.failures + failure.count
        seen = replace(self, failures=failures, code=failure.code, why=failure.why, nodes=nodes)
        if not seen.exceeds_limit or self.state(present) is BackoffState.CLOSED:
            return seen
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.closures, 30))
        return replace(seen, closures=self.closures + 1, until=present + pause)

    def after_success(self) -> FailureBackoff:
        return replace(self.reset(), proven=True)

    def reset(self) -> FailureBackoff:
        """Return this backoff after an operator has reset it."""
        return FailureBackoff(self.image, self.node, proven=self.proven)

    def describe(self, present: datetime) -> str:
        """Return a sentence: why it is closed, and until when."""
        last = f"{self.code} {self.why.partition(chr(10))[0][:_MAX_MESSAGE_CHARACTERS]}".strip()
        image = f"{self.image[:19]}…"
        if self.node:
            failed = f"{self.node}: {self.failures} VMs of {image} failed there in a row"
        else:
            where = ", ".join(self.nodes)
            failed = f"{self.failures} VMs of {image} failed on {where}, and none ever came up"
        if self.until is None:
            return f"{self.node}: VMs of {image} may start again".removeprefix(": ")
        again = f"next try at {self.until.astimezone(UTC):%H:%M:%S} UTC"
        if self.state(present) is BackoffState.HALF_OPEN:
            again = "now one is tried at a time"
        return f"{failed}, last: {last}; {again}"


class FailureBackoffs:
    """All backoffs at one moment."""

    def __init__(self, known: Iterable[FailureBackoff] = (), present: datetime | None = None) -> None:
        self._known = {(guard.image, guard.node): guard for guard in known}
        self.present = present or datetime.min.replace(tzinfo=UTC)

    def of(self, image: str, node: str = "") -> FailureBackoff:
        """Return the backoff of an image on a node, or on all nodes."""
        return self._known.get((image, node)) or FailureBackoff(image, node)

    def closed(self, image: str, node: str = "") -> bool:
        """Whether no VM of an image may start on a node, or on any node."""
        return self.of(image, node).state(self.present) is BackoffState.CLOSED

    def blocking(
        self, image: str, node: str, *, trying: bool, trying_there: bool
    ) -> FailureBackoff | None:
        """Return the backoff that keeps a new VM of an image off a node; None: it may start.

        trying, trying_there: a VM of the image that is not up yet is on any node, on this one.
        """
        for guard, tried in ((self.of(image), trying), (self.of(image, node), trying_there)):
            state = guard.state(self.present)
            if state is BackoffState.CLOSED or (state is BackoffState.HALF_OPEN and tried):
                return guard
        return None
