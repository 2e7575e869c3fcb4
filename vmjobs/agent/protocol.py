"""The words between ``vmjobs exec`` and the agent: one JSON object a line over a Unix socket.

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

import json
import socket
import struct
from collections.abc import Iterator
from enum import StrEnum
from typing import IO, Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from vmjobs.errors import InvalidRequest
from vmjobs.model import (
    Frozen,
    HypervisorKind,
    ImageRef,
    NetworkMode,
    Node,
    Report,
    cannot_save,
)

VERSION = 1
MAX_LINE = 1024 * 1024
#: Bytes of one ``data`` message.
MAX_DATA = 256 * 1024
#: Names of users and groups.
NAME = r"^[A-Za-z_][A-Za-z0-9._-]{0,63}$"


class RunMessage(Frozen):
    """Run this job for me."""

    type: Literal["run"] = "run"
    version: int = VERSION
    job: str = Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")
    token: str = Field(max_length=8192)


class Channel(StrEnum):
    """What the bytes of a ``data`` message belong to.

    START: how to start the job, words of a POSIX shell. INPUT: its standard input, if it has one.
    TREE: its directory, a tar stream. OUT, ERR: what it prints. LEFT: names of all that was in its
    directory at the end, each with a NUL behind it. CHANGED: what is new there, a tar stream. CHIRP:
    what it says to HTCondor's Chirp service, and the answers. SHELL: of somebody who is in its machine.
    """

    START = "start"
    INPUT = "input"
    TREE = "tree"
    OUT = "out"
    ERR = "err"
    LEFT = "left"
    CHANGED = "changed"
    CHIRP = "chirp"
    SHELL = "shell"


class HandMessage(Frozen):
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


class DataMessage(Frozen):
    """Bytes, ``size`` of them behind the line. last: there are no more of this channel.

    stream: which of several connections of the channel they belong to.
    """

    type: Literal["data"] = "data"
    channel: Channel
    stream: int = Field(default=0, ge=0)
    size: int = Field(ge=0, le=MAX_DATA)
    last: bool = False
    data: bytes = Field(default=b"", exclude=True)


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
    """The job could not be run. ``retry``: asking again later may help."""

    type: Literal["error"] = "error"
    code: str
    message: str
    retry: bool = False


Message = (
    RunMessage
    | HandMessage
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
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def send(connection: socket.socket, message: Message) -> None:
    """Send one message, whole. What says nothing is left out: the other end may be of an earlier
    release, and know nothing of it.
    """
    data = message.data if isinstance(message, DataMessage) else b""
    connection.sendall(message.model_dump_json(exclude_none=True).encode() + b"\n" + data)


def parts(channel: Channel, data: bytes) -> Iterator[DataMessage]:
    """Bytes as messages; more of the channel may follow."""
    for at in range(0, len(data), MAX_DATA):
        part = data[at : at + MAX_DATA]
        yield DataMessage(channel=channel, size=len(part), data=part)


def pieces(channel: Channel, source: IO[bytes]) -> Iterator[DataMessage]:
    """All that ``source`` holds, as messages."""
    while data := source.read(MAX_DATA):
        yield DataMessage(channel=channel, size=len(data), data=data)
    yield DataMessage(channel=channel, size=0, last=True)


def receive(connection: socket.socket) -> Iterator[Message]:
    """The messages that come in, until the other end closes.

    Raises:
        InvalidRequest: something came that is no message.
    """
    with connection.makefile("rb") as lines:
        while line := lines.readline(MAX_LINE):
            try:
                message = _ADAPTER.validate_python(_without_data(json.loads(line)))
            except (ValidationError, ValueError, RecursionError) as error:
                raise InvalidRequest(_what_is_wrong(error)) from error
            if isinstance(message, DataMessage) and message.size:
                data = lines.read(message.size)
                if len(data) < message.size:
                    return
                message = message.model_copy(update={"data": data})
            yield message


def _without_data(value: object) -> object:
    """Bytes stand behind a line, never in it: there nobody would count them."""
    if isinstance(value, dict) and "data" in value:
        raise ValueError("data in a line")
    return value


def _what_is_wrong(error: Exception) -> str:
    """One sentence, with the first thing that is wrong with the fields of a message."""
    what = "this is not a message of the agent's protocol"
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        what += f": {'.'.join(map(str, first['loc'][1:]))}: {first['msg']}"
    return what


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
