"""What the agent needs of the rest of the world, as small Protocols.

``images/`` provides :class:`ImageSource`, the client library :class:`JobSource`, ``condor/``
:class:`SchedulerReporter`; ``vmjobs/cli/`` hands them in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Protocol

from vmjobs.cluster.session import SessionAnswer
from vmjobs.cluster.wire import MemberOrder, MemberReports, NodeShare, PoolToken
from vmjobs.gateway.spec import Gateway, GatewayMachine
from vmjobs.hypervisor.base import BootImage
from vmjobs.model import (
    AttemptClaim,
    Checkpoint,
    CondorRef,
    HypervisorKind,
    InputFile,
    JobAction,
    JobSpec,
    JobTicket,
    Output,
    Report,
    SavedFile,
    StreamName,
)
from vmjobs.relay import ByteStream

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]

#: A value that a ClassAd attribute can have.
ClassAdValue = str | int | float | bool


class JobSource(Protocol):
    """One job, as its repository offers it to the agent that holds the job's token.

    Every method raises :class:`vmjobs.errors.Conflict` once another attempt has claimed the job,
    and :class:`vmjobs.errors.Unavailable` where the repository stays out of reach.
    """

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """Take the job for this attempt; from now on older attempts are refused."""

    def end(self) -> Report:
        """How a job ended that refuses to be claimed, being over; ``Conflict`` if it is not."""

    def resume(self, attempt: str) -> None:
        """Speak for an attempt that was claimed earlier, by a process that is gone."""

    def fetch_input(self, file: InputFile, sink: BinaryIO) -> None:
        """Write the file's bytes to ``sink``, verified against its digest."""

    def report(self, report: Report) -> None:
        """Deliver one report; reports arrive in the order of the calls."""

    def append(self, stream: StreamName, offset: int, data: bytes) -> None:
        """Add to a stream at ``offset``; repeating a call does no harm."""

    def put_output(self, path: str, source: BinaryIO, size: int) -> Output:
        """Store one output: the next ``size`` bytes of ``source``, which may have more."""

    def open_upload(self, size: int) -> ContentReceiver:
        """Room at the repository for ``size`` bytes of a machine that was saved."""

    def keep(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        """Have the next attempt go on from there. What was uploaded stays until it has."""

    def saved(self) -> ContentSource:
        """The files of the job's checkpoint."""


class CheckpointStore(Protocol):
    """Where the machine of a job is kept that HTCondor alone knows. Errors: as of a ``JobSource``."""

    def begin(self, attempt: str) -> Checkpoint | None:
        """Take the job for this attempt, and say what it goes on from; older attempts are refused."""

    def open_upload(self, size: int) -> ContentReceiver:
        """See :class:`JobSource`."""

    def keep(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        """See :class:`JobSource`."""

    def saved(self) -> ContentSource:
        """See :class:`JobSource`."""

    def not_resumed(self) -> None:
        """The attempt did not go on from there; after the second that did not it is forgotten."""

    def over(self) -> None:
        """The job is over: nothing of it is needed."""

    def close(self) -> None:
        """Nobody is going to ask any more."""


class ContentReceiver(Protocol):
    """An open upload at a repository. Safe to share between threads."""

    @property
    def id(self) -> str:
        """What it is called there."""

    def missing_segments(self, digests: Sequence[bytes]) -> list[bool]:
        """Which of these segments have to be sent."""

    def missing_blocks(self, digests: Sequence[bytes]) -> list[bool]:
        """Which of these blocks have to be sent."""

    def put_segment(self, digest: bytes, body: bytearray) -> bool:
        """Send a segment. Raises MissingBlocks."""

    def put_content(self, digest: str, layout: bytes) -> None:
        """Say of which segments a content consists. Raises MissingBlocks."""


class ContentSource(Protocol):
    """Contents at a repository, whose bytes whoever reads them checks."""

    def layout(self, content: str) -> bytes:
        """The layout of one of them. Raises NotFound."""

    def segment(self, segment: bytes) -> bytes:
        """A segment as it is stored, by its digest's 32 bytes. Raises NotFound."""


class ContentCarrier(Protocol):
    """What sends files to a repository as blocks, and brings them back."""

    def send(self, path: Path, receiver: ContentReceiver, heed: Callable[[], None]) -> tuple[str, int]:
        """Have a file there: its content's digest, and the bytes that were sent for it.

        heed: called again and again, from any thread; what it raises ends it.

        Raises:
            InvalidRequest: it cannot be read. Others: as the receiver does.
        """

    def fetch(
        self, file: SavedFile, source: ContentSource, target: Path, heed: Callable[[], None]
    ) -> int:
        """Have it here, whole, sparse and verified; bytes that were fetched for it. heed: as above.

        Raises:
            NotFound, Unavailable: as the source does. DigestMismatch: it is another one. StorageFull.
            InvalidRequest: it cannot be written.
        """


class ImageSource(Protocol):
    """Images as they come to this node."""

    def prepare(self, digest: str, progress: Progress | None = None) -> BootImage:
        """Have the image on this node, verified, and say where.

        Raises:
            NotFound: there is no such image.
            DigestMismatch: what arrived is not what the digest names.
            StorageFull: it does not fit onto this node.
        """

    def lease(self, digest: str, progress: Progress | None = None) -> AbstractContextManager[BootImage]:
        """As :meth:`prepare`, and the image stays here for as long as the context lasts."""

    def fetched(self, digest: str) -> int:
        """Bytes of the image that were fetched so far, over all who needed it."""

    def cached(self) -> list[str]:
        """Digests of the images that are here already."""


@dataclass(frozen=True)
class LiveImage:
    """An image of which a machine may be started; its root disk may still be on its way.

    ready: to be called once the machine's guest is ready: all else may come now.
    waiting: whether a machine waits for a part of it right now.
    waited: for how many seconds machines have waited.
    """

    image: BootImage
    ready: Callable[[], object] = lambda: None
    waiting: Callable[[], bool] = lambda: False
    waited: Callable[[], float] = lambda: 0.0


class LiveSource(Protocol):
    """Images that machines are started of before they are complete."""

    def live(
        self,
        digest: str,
        socket: Path,
        failed: Callable[[Exception], object],
        progress: Progress | None = None,
    ) -> AbstractContextManager[LiveImage]:
        """The image, in use for as long as the context lasts. Raises as ``ImageSource.lease``.

        socket: where to listen for those who read the root disk.
        failed: called, from any thread, with what makes the image unusable from now on.
        """


class SeedSource(Protocol):
    """What makes cloud-init data for images that look for it."""

    def write(self, path: Path, ticket: JobTicket) -> None:
        """Write the disk with the job's NoCloud data.

        Raises:
            HypervisorError: it cannot be made.
        """


class SchedulerReporter(Protocol):
    """The scheduler the job came from."""

    def publish(self, attributes: Mapping[str, ClassAdValue]) -> None:
        """Write attributes into the job ad; failing to is logged, never raised."""


# --------------------------------------------------------------------------- submit side


class BatchStatus(StrEnum):
    """HTCondor's JobStatus, and one more for a job that the schedd does not know (any more)."""

    IDLE = "idle"
    RUNNING = "running"
    REMOVED = "removed"
    COMPLETED = "completed"
    HELD = "held"
    SUSPENDED = "suspended"
    MISSING = "missing"


@dataclass(frozen=True)
class BatchJob:
    """A job on its way to a scheduler.

    token: good for this job only; "": it is not made yet.
    kinds: what can boot its image, of what its specification allows; none: that is not known.
    architecture: whose machine code is in its image, as ``uname -m`` calls it; "": that is not known.
    cloud_init: its guest looks for NoCloud data.
    """

    id: str
    array: str
    index: int
    owner: str
    spec: JobSpec
    token: str = ""
    kinds: tuple[HypervisorKind, ...] = ()
    architecture: str = ""
    cloud_init: bool = False


@dataclass(frozen=True)
class Observation:
    """What a scheduler says about a job.

    exit_code, exit_signal: of the process the scheduler ran (``vmjobs exec``), once completed.
    """

    job_id: str
    status: BatchStatus
    ref: CondorRef
    reason: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None


class Scheduler(Protocol):
    """A batch system with jobs of ours. Every method raises ``Unavailable("schedd", …)``."""

    def submit(self, jobs: Sequence[BatchJob]) -> dict[str, CondorRef]:
        """Queue jobs, of any arrays, together; one that is queued already is found, not queued twice.

        ConfigError, InvalidRequest: none of them is taken, for what one of them asks for.
        """

    def act(self, action: JobAction, refs: Sequence[CondorRef], why: str) -> None:
        """Do this to jobs, here and wherever they were forwarded to; unknown ones are no error."""

    def watch(self, arrays: Sequence[str]) -> list[Observation]:
        """The latest word of the event logs of these arrays; costs no query to the schedd."""

    def query(self, job_ids: Sequence[str]) -> list[Observation]:
        """Ask the schedd (queue, then history); one observation for each id."""

    def forget(self, array: str) -> None:
        """Drop the array's spool directory: all of its jobs are final."""


# --------------------------------------------------------------------------- virtual clusters


class ShareSource(Protocol):
    """The service, as an agent speaks with it about clusters. All raise ``Unavailable("api", …)``.

    ``Forbidden``: the member is not this node's, or not of that incarnation (any more).
    """

    def share(self, seen: int, wait: float) -> NodeShare:
        """What this node is to have; waits ``wait`` seconds for a revision other than ``seen``."""

    def report(self, reports: MemberReports) -> None:
        """Tell what there is."""

    def token(self, member: str, incarnation: int) -> PoolToken:
        """A token for the machine that is about to start, or runs. Older ones of it stay good."""

    def append_console(self, member: str, incarnation: int, offset: int, data: bytes) -> None:
        """Add to what the machine's console said; repeating a call does no harm."""


class SessionSource(Protocol):
    """The service, as an agent speaks with it about those who log in to its machines."""

    def answer(self, session: str, answer: SessionAnswer) -> None:
        """Say whether the machine lets them in.

        Raises:
            SessionOver: nobody waits for the answer any more.
            Unavailable: the service is out of reach.
        """

    def stream(self, session: str) -> ByteStream:
        """The machine's side of a session that was let in."""


class GuestKit(Protocol):
    """What a machine of a cluster runs: made by ``condor/``, put before the guest by the agent.

    The guest program runs ``script`` as root. It finds the other files in its directory, and asks
    ``GET /v1/token`` of its endpoint for the machine's IDTOKEN. Signals are what it is told. SIGUSR1:
    it is admitted and may take jobs. SIGUSR2: there is a new token. SIGTERM: it is to drain: to take
    no new job, let the running ones end, leave the pool, and then end with status 0.
    """

    def files(self, order: MemberOrder, incarnation: int) -> Mapping[str, bytes]:
        """Contents by name; ``script`` is one of them."""


@dataclass(frozen=True)
class PoolMachine:
    """A machine of a cluster as its pool's collector knows it.

    name: of the member; another may have had it before. incarnation: which of its machines. id: of the
    member, as no other ever had it; empty: the ad has none. busy: jobs run in it; jobs: it has run so
    many. system: name and version of its operating system, as it says.
    """

    name: str
    incarnation: int
    id: str = ""
    busy: bool = False
    jobs: int = 0
    system: str = ""


@dataclass(frozen=True)
class MachineKind:
    """What a machine of a cluster is, or would be.

    memory, disk: MiB. attributes, start: as declared. known: what ads of such machines said before;
    learn: a machine whose ad says it now; empty: there is none. up: so many are up now.
    """

    cluster: str
    cpus: int
    memory: int
    disk: int
    attributes: Mapping[str, ClassAdValue]
    start: str
    known: Mapping[str, ClassAdValue]
    learn: str = ""
    up: int = 0


@dataclass(frozen=True)
class IdleJobs:
    """What waits for one cluster.

    jobs: idle ones that no other machine of the pool could run, and no cluster before this one.
    machines: so many they would fill. known: see :class:`MachineKind`; empty: nothing was learnt.
    """

    jobs: int = 0
    machines: int = 0
    known: Mapping[str, ClassAdValue] = field(default_factory=dict)


class ProbeState(StrEnum):
    """How far a probe job is."""

    WAITING = "waiting"
    RAN = "ran"
    FAILED = "failed"


class Pool(Protocol):
    """An HTCondor pool. Every method raises ``Unavailable("pool", …)``."""

    def machines(self) -> list[PoolMachine]:
        """Machines of our clusters whose ads are in the collector now: one query."""

    def probes(self, machines: Sequence[PoolMachine]) -> Mapping[tuple[str, int], ProbeState]:
        """How the probe jobs of exactly these machines are doing, by member's id and incarnation; they
        are submitted where there are none. A few calls, however many machines."""

    def withdraw(self, machines: Sequence[PoolMachine]) -> None:
        """Exactly these machines, and no others of the same names, are no more: have the collector take
        nothing from their tokens any more and forget them, and remove their probe jobs."""

    def idle(self, kinds: Sequence[MachineKind]) -> Mapping[str, IdleJobs]:
        """What waits for each of these clusters, by name. Whom several could serve goes to the first
        that has machines, else to the first."""

    def offer(self, kinds: Sequence[MachineKind]) -> None:
        """Have the collector show one machine of each of these clusters, and of no others, as one
        that is switched off; calling it again keeps them there."""


class Minter(Protocol):
    """Makes tokens for machines."""

    def mint(self, pool: str, machine: PoolMachine, seconds: int) -> PoolToken:
        """An IDTOKEN with which exactly this machine can join the pool, and do nothing else.

        Raises:
            Unavailable: it cannot be made now.
        """


# --------------------------------------------------------------------------- gateways


class RoleKit(Protocol):
    """What a gateway's machines run, each for its role: made by ``condor/``.

    The guest program runs ``script`` as root for the machine's whole life; the other files are in its
    directory, among them three that every role gets and no kit makes: ``address`` (the private card's,
    like ``10.77.0.10/24``), ``host`` (the machine's full name) and ``hosts`` (lines for /etc/hosts, of
    all machines). /job and the root disk outlive restarts.

    The script traps its signals before anything else. It prints a line ``vmjobs-gateway: up`` once its
    service answers, ``vmjobs-gateway: down REASON`` if it no longer does. SIGUSR1: freeze what is
    on /job, print ``vmjobs-gateway: frozen``; it thaws by itself after 60 s. SIGUSR2: thaw if frozen,
    print ``vmjobs-gateway: thawed``, and then say again whether it is up or down. SIGTERM: shut down
    cleanly, end with status 0.
    """

    def secrets(self, gateway: Gateway) -> Mapping[str, bytes]:
        """Keys and the like, by file name: made once for a gateway, kept on its computer alone."""

    def files(
        self, gateway: Gateway, machine: GatewayMachine, secrets: Mapping[str, bytes]
    ) -> Mapping[str, bytes]:
        """Contents by name; ``script`` is one of them. secrets: as they were made for this gateway."""

    def token(
        self, gateway: Gateway, machine: GatewayMachine, secrets: Mapping[str, bytes]
    ) -> PoolToken:
        """A token for a machine that asks ``GET /v1/token`` of its endpoint. SIGUSR2 tells it when half
        of the token's life is over, to ask again.

        Raises:
            Forbidden: it has none.
        """
