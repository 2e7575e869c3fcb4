"""The words between ``vmjobs exec`` and the agent: one JSON object a line over a Unix socket.

The connection is the lease: while it is open the job is wanted. The agent knows from the kernel
who is at the other end (``SO_PEERCRED``, unix(7)); nothing a client says about itself counts.

=============  =====================================================================
client sends   ``run``, ``signal``, ``status``
agent sends    ``progress``, ``end``, ``error``, ``status``
=============  =====================================================================
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from vmjobs.errors import InvalidRequest
from vmjobs.model import Frozen, Node, Report

VERSION = 1
MAX_LINE = 1024 * 1024


class RunMessage(Frozen):
    """Run this job for me."""

    type: Literal["run"] = "run"
    version: int = VERSION
    job: str = Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")
    token: str = Field(max_length=8192)


class SignalMessage(Frozen):
    """Pass this signal on to the script."""

    type: Literal["signal"] = "signal"
    number: int = Field(ge=1, le=64)


class StatusMessage(Frozen):
    """How are you? In reply: the node, with those of its jobs that the asker may see."""

    type: Literal["status"] = "status"
    node: Node | None = None


class ProgressMessage(Frozen):
    """The job has come this far."""

    type: Literal["progress"] = "progress"
    node: str
    report: Report


class EndMessage(Frozen):
    """The job is over, its machine gone; exit with this status."""

    type: Literal["end"] = "end"
    node: str
    exit_code: int
    report: Report


class ErrorMessage(Frozen):
    """The job could not be run. ``retry``: asking again later may help."""

    type: Literal["error"] = "error"
    code: str
    message: str
    retry: bool = False


Message = RunMessage | SignalMessage | StatusMessage | ProgressMessage | EndMessage | ErrorMessage
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def send(connection: socket.socket, message: Message) -> None:
    """Send one message, whole."""
    connection.sendall(message.model_dump_json().encode() + b"\n")


def receive(connection: socket.socket) -> Iterator[Message]:
    """The messages that come in, until the other end closes.

    Raises:
        InvalidRequest: something came that is no message.
    """
    with connection.makefile("rb") as lines:
        while line := lines.readline(MAX_LINE):
            try:
                yield _ADAPTER.validate_python(json.loads(line))
            except (ValidationError, ValueError, RecursionError) as error:
                raise InvalidRequest("this is not a message of the agent's protocol") from error


def peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group id of the other end, from the kernel."""
    layout = struct.Struct("3i")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    pid, uid, gid = layout.unpack(data)
    return pid, uid, gid
