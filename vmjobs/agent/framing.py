"""How messages lie on the agent's socket: one JSON object a line, and bytes right behind some lines.

What runs beside each job of a node imports this: no module that takes long to import is needed.
:mod:`vmjobs.agent.protocol` has the messages themselves.
"""

from __future__ import annotations

import json
from enum import StrEnum

from vmjobs.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping
    from typing import IO, Any

VERSION = 1
MAX_LINE = 1024 * 1024
#: Bytes of one ``data`` message.
MAX_DATA = 256 * 1024
#: Names of users and groups.
NAME = r"^[A-Za-z_][A-Za-z0-9._-]{0,63}$"
NO_MESSAGE = "this is not a message of the agent's protocol"
_KEYS = frozenset({"type", "channel", "stream", "size", "last"})


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


class DataMessage:
    """Bytes of a channel. last: there are no more of it.

    stream: which of several connections of the channel they belong to.
    """

    __slots__ = ("channel", "data", "last", "stream")

    def __init__(
        self, channel: Channel, data: bytes = b"", *, stream: int = 0, last: bool = False
    ) -> None:
        self.channel = channel
        self.data = data
        self.stream = stream
        self.last = last

    def encoded(self) -> bytes:
        """The line, and the bytes behind it."""
        words = {"type": "data", "channel": self.channel, "stream": self.stream}
        line = json.dumps({**words, "size": len(self.data), "last": self.last})
        return line.encode() + b"\n" + self.data


def send(connection: socket.socket, message: DataMessage | Mapping[str, object]) -> None:
    """Send one message, whole."""
    if isinstance(message, DataMessage):
        connection.sendall(message.encoded())
    else:
        connection.sendall(json.dumps(message).encode() + b"\n")


def parts(channel: Channel, data: bytes) -> Iterator[DataMessage]:
    """Bytes as messages; more of the channel may follow."""
    for at in range(0, len(data), MAX_DATA):
        yield DataMessage(channel, data[at : at + MAX_DATA])


def pieces(channel: Channel, source: IO[bytes]) -> Iterator[DataMessage]:
    """All that ``source`` holds, as messages."""
    while data := source.read(MAX_DATA):
        yield DataMessage(channel, data)
    yield DataMessage(channel, last=True)


def receive(connection: socket.socket) -> Iterator[DataMessage | dict[str, Any]]:
    """The messages that come in, until the other end closes: bytes, or what an object says.

    Raises:
        InvalidRequest: something came that is no message.
    """
    with connection.makefile("rb") as lines:
        while line := lines.readline(MAX_LINE):
            try:
                said = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"{NO_MESSAGE}: it is not JSON") from error
            if not isinstance(said, dict):
                raise InvalidRequest(f"{NO_MESSAGE}: it is not an object")
            if said.get("type") != "data":
                yield said
                continue
            message, size = _announced(said)
            message.data = lines.read(size)
            if len(message.data) < size:
                return
            yield message


def _announced(said: dict[str, Any]) -> tuple[DataMessage, int]:
    """A message without its bytes, and how many those are."""
    size, stream, last = said.get("size"), said.get("stream", 0), said.get("last", False)
    if not said.keys() <= _KEYS:
        raise InvalidRequest(f"{NO_MESSAGE}: data has {sorted(said.keys() - _KEYS)[0][:64]}")
    if type(size) is not int or not 0 <= size <= MAX_DATA:
        raise InvalidRequest(f"{NO_MESSAGE}: data has no size from 0 to {MAX_DATA}")
    if type(stream) is not int or stream < 0 or type(last) is not bool:
        raise InvalidRequest(f"{NO_MESSAGE}: data has no plain stream and last")
    try:
        channel = Channel(str(said.get("channel")))
    except ValueError as error:
        raise InvalidRequest(f"{NO_MESSAGE}: data of no channel that there is") from error
    return DataMessage(channel, stream=stream, last=last), size
