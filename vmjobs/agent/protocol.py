"""Messages between ``vmjobs exec`` and the agent, over a Unix socket.

The connection is the lease: while it is open the job is wanted. The agent identifies the client by
the kernel's credentials (``SO_PEERCRED``, unix(7)), never by what the client claims.
:mod:`vmjobs.agent.framing` has the wire format.

=============  ================================================================================
client sends   ``run``, ``hand``, ``enter``, ``console``, ``data``, ``signal``, ``taken``, ``status``
agent sends    ``progress``, ``data``, ``end``, ``error``, ``status``
=============  ================================================================================

A ``run`` names a job of the repository. A ``hand`` submits a transparent job: ``data`` of all its
channels follows at once, the job's output comes back as ``data``, and ``taken`` answers its ``end``.
The bytes of a ``data`` message directly follow its line.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, cast, get_args

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from vmjobs.agent import framing
from vmjobs.agent.framing import ACCOUNT_NAME, VERSION, DataMessage
from vmjobs.errors import InvalidRequest
from vmjobs.model import (
    FrozenModel,
    HypervisorKind,
    ImageRef,
    NetworkMode,
    Node,
    Report,
    check_checkpoint,
    check_cpus,
    faults_of,
)


class RunMessage(FrozenModel):
    """Asks the agent to run a job of the repository."""

    type: Literal["run"] = "run"
    version: int = VERSION
    job: str = Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")
    token: str = Field(max_length=8192)


class SubmitMessage(FrozenModel):
    """Submits a transparent job; START, INPUT and TREE follow.

    job: HTCondor's id. directory: its working directory, also in the guest. user, group: names.
    memory, disk: MiB. boot_seconds: time limit for its VM to become ready. chirp: the client answers
    connections to HTCondor's Chirp service, on the channel of that name. checkpoint: save the VM when
    the job is vacated. anew: the job has ended since its checkpoint: start it from the beginning.
    """

    type: Literal["hand"] = "hand"
    version: int = VERSION
    job: str = Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z@#._-]{0,127}$")
    image: ImageRef
    directory: str = Field(pattern=r"^(/[A-Za-z0-9._@+-]{1,255}){1,64}$", max_length=3072)
    user: str = Field(pattern=ACCOUNT_NAME)
    group: str = Field(pattern=ACCOUNT_NAME)
    cpus: int = Field(ge=1, le=256)
    memory: int = Field(ge=32, le=4 * 1024 * 1024)
    disk: int = Field(ge=1, le=64 * 1024 * 1024)
    hypervisor: HypervisorKind | None = None
    network: NetworkMode = NetworkMode.REPOSITORY
    boot_seconds: int = Field(default=180, ge=1, le=3600)
    chirp: bool = False
    checkpoint: bool = False
    anew: bool = False

    @field_validator("hypervisor")
    @classmethod
    def _check_cpus(cls, value: HypervisorKind | None, info: ValidationInfo) -> HypervisorKind | None:
        if why := check_cpus(value, info.data.get("cpus", 1)):
            raise ValueError(why)
        return value

    @field_validator("checkpoint")
    @classmethod
    def _check_checkpoint(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (why := check_checkpoint(info.data.get("hypervisor"))):
            raise ValueError(why)
        return value


class EnterMessage(FrozenModel):
    """Opens a shell in the VM of the client's own job; SHELL follows, both ways.

    command: runs in the job's directory and as its user; empty: a shell. term: the terminal's type
    (``TERM``), of rows and columns; empty: no terminal. mark: ends the output, with the exit status
    (:class:`vmjobs.job_shell.ExitStatusFilter`).
    """

    type: Literal["enter"] = "enter"
    version: int = VERSION
    command: str = Field(default="", max_length=64 * 1024, pattern=r"^[^\x00]*$")
    term: str = Field(default="", pattern=r"^[A-Za-z0-9._+-]{0,64}$")
    rows: int = Field(default=24, ge=1, le=9999)
    columns: int = Field(default=80, ge=1, le=9999)
    mark: str = Field(pattern=r"^[0-9a-f]{32}$")


class ConsoleMessage(FrozenModel):
    """Asks for the VM's console of the client's own job; SHELL comes back.

    offset: the first byte. follow: continue until the job ends.
    """

    type: Literal["console"] = "console"
    version: int = VERSION
    offset: int = Field(default=0, ge=0)
    follow: bool = False


class SignalMessage(FrozenModel):
    """Asks the agent to deliver a signal to the script."""

    type: Literal["signal"] = "signal"
    number: int = Field(ge=1, le=64)


class ResultsReceivedMessage(FrozenModel):
    """Confirms receipt of the job's results, so the agent may delete the job's checkpoint."""

    type: Literal["taken"] = "taken"


class StatusMessage(FrozenModel):
    """Asks for the node's state. The reply lists the jobs that the client may see."""

    type: Literal["status"] = "status"
    node: Node | None = None


class ProgressMessage(FrozenModel):
    """Reports the job's state and its resource usage so far."""

    type: Literal["progress"] = "progress"
    node: str
    report: Report


class ImageRequirements(FrozenModel):
    """What a job's image needs of a node.

    named: the image, as the job names it. kinds: hypervisors that boot it, best first. architecture: of
    processors, as ``uname -m`` prints it; empty: any.
    """

    named: ImageRef
    kinds: tuple[HypervisorKind, ...]
    architecture: str = Field(default="", pattern=r"^[A-Za-z0-9_]{0,32}$")


class EndMessage(FrozenModel):
    """Ends the run: the job is over, its VM is gone, and the client exits with this status.

    ended: of a transparent job: ``code=N`` or ``signal=N``, followed by ``starved`` if the guest ran
        out of memory; ``refused SENTENCE`` if its image cannot run it; empty for any other end.
    needs: set if no hypervisor of this node boots its image.
    """

    type: Literal["end"] = "end"
    node: str
    exit_code: int
    report: Report
    ended: str = ""
    needs: ImageRequirements | None = None


class ErrorMessage(FrozenModel):
    """The job could not be run. retry: a later request may succeed.

    faults: errors in the request, by field.
    """

    type: Literal["error"] = "error"
    code: str
    message: str
    retry: bool = False
    faults: dict[str, str] | None = None


Message = (
    RunMessage
    | SubmitMessage
    | EnterMessage
    | ConsoleMessage
    | DataMessage
    | SignalMessage
    | ResultsReceivedMessage
    | StatusMessage
    | ProgressMessage
    | EndMessage
    | ErrorMessage
)
_MESSAGE_TYPES: Final[Mapping[str, type[FrozenModel]]] = {
    kind.model_fields["type"].default: kind for kind in get_args(Message) if kind is not DataMessage
}


def send(connection: socket.socket, message: Message) -> None:
    """Send one whole message, without unset fields: an earlier release rejects new ones."""
    if isinstance(message, DataMessage):
        framing.send(connection, message)
    else:
        connection.sendall(message.model_dump_json(exclude_none=True).encode() + b"\n")


def receive(connection: socket.socket) -> Iterator[Message]:
    """Yield the peer's messages until it closes the connection.

    Raises:
        InvalidRequest: the peer sent something that is not a message; ``faults`` names the fields.
    """
    for item in framing.receive(connection):
        yield item if isinstance(item, DataMessage) else parse_message(item)


def parse_message(item: Mapping[str, object]) -> Message:
    """Parse a message from its decoded JSON object.

    Raises:
        InvalidRequest: as :func:`receive`.
    """
    kind = _MESSAGE_TYPES.get(str(item.get("type")))
    if kind is None:
        raise InvalidRequest(f"{framing.INVALID_MESSAGE}: unknown type")
    try:
        return cast("Message", kind.model_validate(item))
    except ValidationError as error:
        faults = faults_of(error)
        what = f"{framing.INVALID_MESSAGE}: {faults[0].field}: {faults[0].message}"
        raise InvalidRequest(what, faults=faults) from error


def wait_for_hang_up(connection: socket.socket, milliseconds: int | None = None) -> bool:
    """Wait until the peer hangs up, even with unread data; return whether it has hung up.

    milliseconds: the longest wait; None: without limit.
    """
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    return bool(poller.poll(milliseconds))


class PeerCredentials(NamedTuple):
    """Process, user and group id of the peer process."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    layout = struct.Struct("3i")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    return PeerCredentials(*layout.unpack(data))
