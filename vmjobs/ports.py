"""Protocols for the parts that the agent, the worker and gateways need from other folders.

``images/`` provides :class:`ImageSource`, the client library :class:`JobSource`, ``condor/``
:class:`Scheduler`; ``node/`` and ``api/`` connect them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Protocol

from vmjobs.cluster.ssh_session import SessionAnswer
from vmjobs.cluster.wire import Assignment, ClusterVmOrder, ClusterVmReports, PoolToken
from vmjobs.gateway.spec import Gateway, GatewayVm
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
ProgressCallback = Callable[[int, int], None]

#: A value that a ClassAd attribute can have.
ClassAdValue = str | int | float | bool


class CheckpointTransfer(Protocol):
    """A job's checkpoint in its repository. Raises as :class:`JobSource`."""

    def open_upload(self, size: int) -> ContentReceiver:
        """Open an upload for ``size`` bytes of a checkpoint."""

    def save_checkpoint(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        """Store the checkpoint; the repository keeps its files until the next attempt resumes."""

    def saved(self) -> ContentSource:
        """The files of the job's checkpoint."""


class JobSource(CheckpointTransfer, Protocol):
    """One job in its repository, for the agent that has the job's token.

    Every method raises :class:`vmjobs.errors.Conflict` once another attempt has claimed the job,
    and :class:`vmjobs.errors.Unavailable` if the repository stays unreachable.
    """

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """Claim the job for this attempt; the repository then refuses older attempts."""

    def end(self) -> Report:
        """The final report of a job that has ended.  Raises Conflict if it has not ended."""

    def resume(self, attempt: str) -> None:
        """Continue an attempt that an earlier process claimed."""

    def fetch_input(self, file: InputFile, sink: BinaryIO) -> None:
        """Write the file's bytes to ``sink``, and verify them against its digest."""

    def report(self, report: Report) -> None:
        """Deliver one report; reports arrive in the order of the calls."""

    def append(self, stream: StreamName, offset: int, data: bytes) -> None:
        """Append to a stream at ``offset``; repeated calls are harmless."""

    def put_output(self, path: str, source: BinaryIO, size: int) -> Output:
        """Store one output: the next ``size`` bytes of ``source``, which may have more."""


class CheckpointStore(CheckpointTransfer, Protocol):
    """Stores checkpoints of a transparent job. Raises as :class:`JobSource`."""

    def begin(self, attempt: str) -> Checkpoint | None:
        """Claim the job for this attempt; returns the checkpoint to resume from, if any.

        The repository then refuses older attempts.
        """

    def report_not_resumed(self) -> None:
        """Report that the attempt could not resume; the second report deletes the checkpoint."""

    def delete_checkpoints(self) -> None:
        """Delete all checkpoints, because the job has ended."""

    def close(self) -> None:
        """Close connections; further calls fail."""


class ContentReceiver(Protocol):
    """An open upload at a repository. Safe to share between threads."""

    @property
    def id(self) -> str:
        """Its identifier at the repository."""

    def missing_segments(self, digests: Sequence[bytes]) -> list[bool]:
        """For each of these segments: whether it must be sent."""

    def missing_chunks(self, digests: Sequence[bytes]) -> list[bool]:
        """For each of these chunks: whether it must be sent."""

    def put_segment(self, digest: bytes, body: bytearray) -> bool:
        """Send a segment. Raises MissingChunks; DigestMismatch: a wrong chunk."""

    def put_content(self, digest: str, layout: bytes) -> None:
        """Send the list of a content's segments. Raises MissingChunks."""


class ContentSource(Protocol):
    """Contents at a repository; the caller verifies their bytes."""

    def layout(self, content: str) -> bytes:
        """The layout of a content. Raises NotFound."""

    def segment(self, segment: bytes) -> bytes:
        """A stored segment, by its digest's 32 bytes. Raises NotFound."""


class FileTransfer(Protocol):
    """Transfers files to and from a repository, by chunks."""

    def send(
        self, path: Path, receiver: ContentReceiver, check_cancelled: Callable[[], None]
    ) -> tuple[str, int]:
        """Send a file; returns its content's digest, and the number of bytes sent.

        check_cancelled: called repeatedly, from any thread; an exception that it raises ends the call.

        Raises:
            InvalidRequest: the file is unreadable. Others: those of the receiver.
        """

    def fetch(
        self, file: SavedFile, source: ContentSource, target: Path, check_cancelled: Callable[[], None]
    ) -> int:
        """Fetch a file, verified and sparse; returns the number of bytes fetched.

        check_cancelled: see :meth:`send`.

        Raises:
            NotFound, Unavailable: those of the source. DigestMismatch, StorageFull.
            InvalidRequest: the file cannot be written.
        """


class ImageSource(Protocol):
    """Images on this node."""

    def prepare(self, digest: str, progress: ProgressCallback | None = None) -> BootImage:
        """Fetch the image unless it is cached, verify it, and return its files.

        Raises:
            NotFound: there is no such image.
            DigestMismatch: the received bytes do not match the digest.
            StorageFull: it does not fit onto this node.
        """

    def lease(
        self, digest: str, progress: ProgressCallback | None = None
    ) -> AbstractContextManager[BootImage]:
        """As :meth:`prepare`; the image is not evicted while the context lasts."""

    def fetched(self, digest: str) -> int:
        """Bytes of the image that were fetched so far, by all runs together."""

    def cached(self) -> list[str]:
        """Digests of the cached images."""


@dataclass(frozen=True)
class LazyImage:
    """An image that a VM can boot before its root disk is complete.

    ready: must be called once the guest is ready; then the rest of the disk is fetched.
    waiting: whether a VM waits for a part of the disk now.
    waited: seconds that VMs have waited.
    """

    image: BootImage
    ready: Callable[[], object] = lambda: None
    waiting: Callable[[], bool] = lambda: False
    waited: Callable[[], float] = lambda: 0.0


class LazyImageSource(Protocol):
    """Images that VMs boot before they are complete (setting ``lazy_start``)."""

    def live(
        self,
        digest: str,
        socket: Path,
        failed: Callable[[Exception], object],
        progress: ProgressCallback | None = None,
    ) -> AbstractContextManager[LazyImage]:
        """Lease the image while the context lasts. Raises as :meth:`ImageSource.lease`.

        socket: where to listen for readers of the root disk.
        failed: called, from any thread, with an error that makes the image unusable.
        """


class SeedWriter(Protocol):
    """Writes cloud-init data for images that use it."""

    def write(self, path: Path, ticket: JobTicket) -> None:
        """Write the disk with the job's NoCloud data.

        Raises:
            HypervisorError: the disk cannot be made.
        """


# --------------------------------------------------------------------------- submit side


class BatchStatus(StrEnum):
    """HTCondor's JobStatus, and MISSING for a job that the schedd does not know."""

    IDLE = "idle"
    RUNNING = "running"
    REMOVED = "removed"
    COMPLETED = "completed"
    HELD = "held"
    SUSPENDED = "suspended"
    MISSING = "missing"


@dataclass(frozen=True)
class BatchJob:
    """A job to submit to a scheduler.

    token: valid for this job only; "": not made yet.
    kinds: hypervisors that can boot its image and that its specification allows; empty: unknown.
    architecture: of its image, as ``uname -m`` names it; "": unknown.
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
    """A job's state at its scheduler.

    exit_code, exit_signal: of the process that the scheduler ran (``vmjobs exec``), once completed.
    """

    job_id: str
    status: BatchStatus
    ref: CondorRef
    reason: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None


class Scheduler(Protocol):
    """A batch system. Every method raises ``Unavailable("schedd", …)``."""

    def submit(self, jobs: Sequence[BatchJob]) -> dict[str, CondorRef]:
        """Queue jobs of any arrays in one transaction; jobs that are queued already are found.

        Raises:
            ConfigError, InvalidRequest: one of the jobs is not acceptable; none is queued.
        """

    def act(self, action: JobAction, refs: Sequence[CondorRef], why: str) -> None:
        """Perform an action on jobs, also at remote schedds; ignores unknown jobs."""

    def watch(self, arrays: Sequence[str]) -> list[Observation]:
        """The latest states from the event logs of these arrays; does not query the schedd."""

    def query(self, job_ids: Sequence[str]) -> list[Observation]:
        """Query the schedd (queue, then history); one observation for each id."""

    def forget(self, array: str) -> None:
        """Remove the spool directory of an array whose jobs are all final."""


# --------------------------------------------------------------------------- virtual clusters


class AssignmentSource(Protocol):
    """The service's API about the cluster VMs of a node. Raises ``Unavailable("api", …)``.

    ``Forbidden``: the VM does not belong to this node, or has another incarnation now.
    """

    def share(self, seen: int, wait: float) -> Assignment:
        """The node's assignment; waits ``wait`` seconds for a revision other than ``seen``."""

    def report(self, reports: ClusterVmReports) -> None:
        """Report the states of cluster VMs."""

    def token(self, member: str, incarnation: int) -> PoolToken:
        """A token for a VM that starts or runs. Its older tokens stay valid."""

    def append_console(self, member: str, incarnation: int, offset: int, data: bytes) -> None:
        """Append to the VM's console; repeated calls are harmless."""


class SessionSource(Protocol):
    """The service's API about login sessions of a node's cluster VMs."""

    def answer(self, session: str, answer: SessionAnswer) -> None:
        """Accept or refuse a session.

        Raises:
            SessionEnded: the client no longer waits for the answer.
            Unavailable: the service is unreachable.
        """

    def stream(self, session: str) -> ByteStream:
        """The VM's side of an accepted session."""


class GuestFiles(Protocol):
    """Files for the guest of a cluster VM: made by ``condor/``, delivered by the agent.

    The guest program runs ``script`` as root. The script finds the other files in its directory, and
    requests the VM's IDTOKEN with ``GET /v1/token`` from its guest endpoint. It receives signals.
    SIGUSR1: the VM is admitted and may run jobs. SIGUSR2: there is a new token. SIGTERM: drain:
    accept no new job, let the running ones end, leave the pool, and then end with status 0.
    """

    def files(self, order: ClusterVmOrder, incarnation: int) -> Mapping[str, bytes]:
        """Contents by name; ``script`` is one of them."""


@dataclass(frozen=True)
class PoolVm:
    """A cluster VM, as its pool's collector advertises it.

    name: may be reused. incarnation: counts the VMs started for this id. id: unique, never reused;
    empty: the ad has none. busy: jobs run in it. jobs: number of jobs that it has run. system: name and
    version of its operating system.
    """

    name: str
    incarnation: int
    id: str = ""
    busy: bool = False
    jobs: int = 0
    system: str = ""


@dataclass(frozen=True)
class WorkerVmProfile:
    """The properties of a cluster's VMs, present or future.

    memory, disk: MiB. attributes, start: as declared. known: attributes of earlier ads of such VMs.
    learn: name of a VM whose present ad shows them; empty: none. up: number of VMs that are up.
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
    """The idle jobs that need one cluster.

    jobs: number of idle jobs that no other slot of the pool and no earlier cluster could run.
    machines: number of VMs that they would fill. known: new value for :class:`WorkerVmProfile`; empty:
    unchanged.
    """

    jobs: int = 0
    machines: int = 0
    known: Mapping[str, ClassAdValue] = field(default_factory=dict)


class ProbeState(StrEnum):
    """The state of a probe job."""

    WAITING = "waiting"
    RAN = "ran"
    FAILED = "failed"


class Pool(Protocol):
    """An HTCondor pool. Every method raises ``Unavailable("pool", …)``."""

    def machines(self) -> list[PoolVm]:
        """The cluster VMs whose ads are in the collector now, by one query."""

    def probes(self, machines: Sequence[PoolVm]) -> Mapping[tuple[str, int], ProbeState]:
        """The states of the probe jobs of exactly these VMs, by id and incarnation.

        Submits missing probe jobs. The number of calls does not depend on the number of VMs.
        """

    def withdraw(self, machines: Sequence[PoolVm]) -> None:
        """Revoke exactly these VMs, and no others of the same names.

        The collector rejects their tokens and drops their ads, and their probe jobs are removed.
        """

    def idle(self, kinds: Sequence[WorkerVmProfile]) -> Mapping[str, IdleJobs]:
        """The idle jobs for each of these clusters, by name.

        A job that fits several clusters counts for the first one with VMs, else for the first one.
        """

    def offer(self, kinds: Sequence[WorkerVmProfile]) -> None:
        """Advertise one offline ad for each of these clusters, and for no others.

        Repeated calls keep the ads in the collector.
        """


class TokenIssuer(Protocol):
    """Issues pool tokens for VMs."""

    def mint(self, pool: str, machine: PoolVm, seconds: int) -> PoolToken:
        """An IDTOKEN that lets exactly this VM join the pool, and allows nothing else.

        Raises:
            Unavailable: it cannot be made now.
        """


# --------------------------------------------------------------------------- gateways


class RoleFiles(Protocol):
    """Files for the guests of a gateway's VMs, by role: made by ``condor/``.

    The guest program runs ``script`` as root for the VM's whole life. The other files are in its
    directory, with three that every role gets from the supervisor: ``address`` (of the private network
    interface, like ``10.77.0.10/24``), ``host`` (the VM's full host name) and ``hosts`` (lines for
    /etc/hosts, of all VMs). /job and the root disk survive restarts.

    The script traps its signals first. It prints a line ``vmjobs-gateway: up`` once its service
    answers, ``vmjobs-gateway: down REASON`` when it no longer does. SIGUSR1: freeze the data on /job,
    print ``vmjobs-gateway: frozen``; it thaws by itself after 60 s. SIGUSR2: thaw if frozen, print
    ``vmjobs-gateway: thawed``, and then again whether it is up or down. SIGTERM: shut down cleanly, end
    with status 0.
    """

    def secrets(self, gateway: Gateway) -> Mapping[str, bytes]:
        """Keys and other secrets, by file name: made once, stored only on the gateway's host."""

    def files(
        self, gateway: Gateway, machine: GatewayVm, secrets: Mapping[str, bytes]
    ) -> Mapping[str, bytes]:
        """Contents by name; ``script`` is one of them. secrets: those of this gateway."""

    def token(self, gateway: Gateway, machine: GatewayVm, secrets: Mapping[str, bytes]) -> PoolToken:
        """A token for a VM, which it requests with ``GET /v1/token`` from its guest endpoint.

        The VM gets SIGUSR2 after half of the token's lifetime, to request a new one.

        Raises:
            Forbidden: VMs of this role have no token.
        """
