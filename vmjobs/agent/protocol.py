"""The messages between ``vmjobs exec`` and the agent, over a Unix socket (:mod:`vmjobs.agent.framing`).

The connection is the lease: while it is open the job is wanted. The agent knows from the kernel
who is at the other end (``SO_PEERCRED``, unix(7)); nothing a client says about itself counts.

=============  ================================================================================
client sends   ``run``, ``hand``, ``enter``, ``console``, ``data``, ``signal``, ``taken``, ``status``
agent sends    ``progress``, ``data``, ``end``, ``error``, ``status``
=============  ================================================================================

A ``run`` names a job of the repository. A ``hand`` brings a job along: ``data`` of all its channels
follows at once, what the job writes comes back as ``data``, and ``taken`` answers its ``end``. The
bytes of a ``data`` message stand right behind its line.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, cast, get_args

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from vmjobs.agent import framing
from vmjobs.agent.framing import NAME, VERSION, DataMessage
from vmjobs.errors import InvalidRequest
from vmjobs.model import (
    Frozen,
    HypervisorKind,
    ImageRef,
    NetworkMode,
    Node,
    Report,
    cannot_have,
    cannot_save,
    faults_of,
)


class RunMessage(Frozen):
    """Run this job for me."""

    type: Literal["run"] = "run"
    version: int = VERSION
    job: str = Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")
    token: str = Field(max_length=8192)


class SubmitMessage(Frozen):
    """Run this job of HTCondor's for me; START, INPUT and TREE follow.

    job: what HTCondor calls it. directory: where it was to run, and will. user, group: their names.
    memory, disk: MiB. boot_seconds: that its machine has to be ready. chirp: connections to HTCondor's
    Chirp service will be answered, on the channel of that name. checkpoint: its machine is to be saved
    where the job is vacated. anew: the job has come to an end since it was saved: it begins at its
    beginning.
    """

    type: Literal["hand"] = "hand"
    version: int = VERSION
    job: str = Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z@#._-]{0,127}$")
    image: ImageRef
    directory: str = Field(pattern=r"^(/[A-Za-z0-9._@+-]{1,255}){1,64}$", max_length=3072)
    user: str = Field(pattern=NAME)
    group: str = Field(pattern=NAME)
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
    def _has_so_many(cls, value: HypervisorKind | None, info: ValidationInfo) -> HypervisorKind | None:
        if why := cannot_have(value, info.data.get("cpus", 1)):
            raise ValueError(why)
        return value

    @field_validator("checkpoint")
    @classmethod
    def _can_be_saved(cls, value: bool, info: ValidationInfo) -> bool:
        if value and (why := cannot_save(info.data.get("hypervisor"))):
            raise ValueError(why)
        return value


class EnterMessage(Frozen):
    """Let me into the machine of the job that I belong to; SHELL follows, both ways.

    command: what to run there, in the job's directory and as its user; empty for a shell. term: the
    terminal's name (``TERM``), of rows and columns; empty where there is none. mark: stands at the
    end of what comes back, with the exit status (:class:`vmjobs.enter.Tail`).
    """

    type: Literal["enter"] = "enter"
    version: int = VERSION
    command: str = Field(default="", max_length=64 * 1024, pattern=r"^[^\x00]*$")
    term: str = Field(default="", pattern=r"^[A-Za-z0-9._+-]{0,64}$")
    rows: int = Field(default=24, ge=1, le=9999)
    columns: int = Field(default=80, ge=1, le=9999)
    mark: str = Field(pattern=r"^[0-9a-f]{32}$")


class ConsoleMessage(Frozen):
    """Show me the console of the machine of the job that I belong to; SHELL comes back.

    offset: the first byte. follow: go on until the job is over.
    """

    type: Literal["console"] = "console"
    version: int = VERSION
    offset: int = Field(default=0, ge=0)
    follow: bool = False


class SignalMessage(Frozen):
    """Pass this signal on to the script."""

    type: Literal["signal"] = "signal"
    number: int = Field(ge=1, le=64)


class TakenMessage(Frozen):
    """What the job left is mine, and it does not go on: what was saved of it is not needed any more."""

    type: Literal["taken"] = "taken"


class StatusMessage(Frozen):
    """How are you? In reply: the node, with those of its jobs that the asker may see."""

    type: Literal["status"] = "status"
    node: Node | None = None


class ProgressMessage(Frozen):
    """The job has come this far, and has used so much by now."""

    type: Literal["progress"] = "progress"
    node: str
    report: Report


class ImageNeeds(Frozen):
    """What boots an image for a job, best first, and on what processors, as ``uname -m`` calls them;
    empty: any. named: the image, as the job names it.
    """

    named: ImageRef
    kinds: tuple[HypervisorKind, ...]
    architecture: str = Field(default="", pattern=r"^[A-Za-z0-9_]{0,32}$")


class EndMessage(Frozen):
    """The job is over, its machine gone; exit with this status.

    ended: of a job that was handed over: ``code=N`` or ``signal=N``, with ``starved`` behind it where
        the machine had no memory left; or ``refused SENTENCE`` where its image cannot run it; empty
        where it did not come to an end of its own.
    needs: where no hypervisor of this node's boots its image.
    """

    type: Literal["end"] = "end"
    node: str
    exit_code: int
    report: Report
    ended: str = ""
    needs: ImageNeeds | None = None


class ErrorMessage(Frozen):
    """The job could not be run. ``retry``: asking again later may help. ``faults``: what is wrong with
    the message that asked for it, by field.
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
    | TakenMessage
    | StatusMessage
    | ProgressMessage
    | EndMessage
    | ErrorMessage
)
_KINDS: Final[Mapping[str, type[Frozen]]] = {
    kind.model_fields["type"].default: kind for kind in get_args(Message) if kind is not DataMessage
}


def send(connection: socket.socket, message: Message) -> None:
    """Send one message, whole. What says nothing is left out: the other end may be of an earlier
    release, and know nothing of it.
    """
    if isinstance(message, DataMessage):
        framing.send(connection, message)
    else:
        connection.sendall(message.model_dump_json(exclude_none=True).encode() + b"\n")


def receive(connection: socket.socket) -> Iterator[Message]:
    """The messages that come in, until the other end closes.

    Raises:
        InvalidRequest: something came that is no message; ``faults`` says which of its fields.
    """
    for said in framing.receive(connection):
        yield said if isinstance(said, DataMessage) else parsed(said)


def parsed(said: Mapping[str, object]) -> Message:
    """What an object says.

    Raises:
        InvalidRequest: see :func:`receive`.
    """
    kind = _KINDS.get(str(said.get("type")))
    if kind is None:
        raise InvalidRequest(f"{framing.NO_MESSAGE}: it is of no type that there is")
    try:
        return cast("Message", kind.model_validate(said))
    except ValidationError as error:
        faults = faults_of(error)
        what = f"{framing.NO_MESSAGE}: {faults[0].field}: {faults[0].message}"
        raise InvalidRequest(what, faults=faults) from error


class Peer(NamedTuple):
    """Process, user and group id of who is at the other end."""

    pid: int
    uid: int
    gid: int


def peer(connection: socket.socket) -> Peer:
    """Who is at the other end, from the kernel."""
    layout = struct.Struct("3i")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    return Peer(*layout.unpack(data))
