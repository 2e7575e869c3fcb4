"""Framing on the agent's socket: one JSON object a line, some followed by bytes.

The program beside each job imports this, so it imports no module that takes long to load.
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
ACCOUNT_NAME = r"^[A-Za-z_][A-Za-z0-9._-]{0,63}$"
INVALID_MESSAGE = "this is not a message of the agent's protocol"
_KEYS = frozenset({"type", "channel", "stream", "size", "last"})


class Channel(StrEnum):
    """Streams to which the bytes of ``data`` messages belong.

    START: a POSIX shell command that starts the job. INPUT: its standard input, if it has one.
    TREE: its directory, a tar stream. OUT, ERR: its output. LEFT: names of all files in its directory
    at the end, each terminated by a NUL. CHANGED: files it made or changed there, a tar stream. CHIRP:
    traffic with HTCondor's Chirp service. SHELL: traffic of an interactive session, or a console.
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
    """Bytes of a channel. last: the channel ends with them.

    stream: the number of a connection, where the channel has several.
    """

    __slots__ = ("channel", "data", "last", "stream")

    def __init__(
        self, channel: Channel, data: bytes = b"", *, stream: int = 0, last: bool = False
    ) -> None:
        self.channel = channel
        self.data = data
        self.stream = stream
        self.last = last

    def encode(self) -> bytes:
        """Return the line, followed by the bytes."""
        words = {"type": "data", "channel": self.channel, "stream": self.stream}
        line = json.dumps({**words, "size": len(self.data), "last": self.last})
        return line.encode() + b"\n" + self.data


def send(connection: socket.socket, message: DataMessage | Mapping[str, object]) -> None:
    if isinstance(message, DataMessage):
        connection.sendall(message.encode())
    else:
        connection.sendall(json.dumps(message).encode() + b"\n")


def split_bytes(channel: Channel, data: bytes) -> Iterator[DataMessage]:
    """Yield ``data`` as messages; more of the channel may follow."""
    for at in range(0, len(data), MAX_DATA):
        yield DataMessage(channel, data[at : at + MAX_DATA])


def split_file(channel: Channel, source: IO[bytes]) -> Iterator[DataMessage]:
    """Yield the rest of ``source`` as messages, the last of which ends the channel."""
    while data := source.read(MAX_DATA):
        yield DataMessage(channel, data)
    yield DataMessage(channel, last=True)


def receive(connection: socket.socket) -> Iterator[DataMessage | dict[str, Any]]:
    """Yield the messages of a connection until its peer closes it.

    Raises:
        InvalidRequest: the peer sent something that is not a message.
    """
    with connection.makefile("rb") as lines:
        while line := lines.readline(MAX_LINE):
            try:
                parsed = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"{INVALID_MESSAGE}: it is not JSON") from error
            if not isinstance(parsed, dict):
                raise InvalidRequest(f"{INVALID_MESSAGE}: it is not an object")
            if parsed.get("type") != "data":
                yield parsed
                continue
            message, size = _parse_data_header(parsed)
            message.data = lines.read(size)
            if len(message.data) < size:
                return
            yield message


def _parse_data_header(parsed: dict[str, Any]) -> tuple[DataMessage, int]:
    """Return a data message without its bytes, and their number."""
    size, stream, last = parsed.get("size"), parsed.get("stream", 0), parsed.get("last", False)
    if not parsed.keys() <= _KEYS:
        raise InvalidRequest(f"{INVALID_MESSAGE}: data has {sorted(parsed.keys() - _KEYS)[0][:64]}")
    if type(size) is not int or not 0 <= size <= MAX_DATA:
        raise InvalidRequest(f"{INVALID_MESSAGE}: data has no size from 0 to {MAX_DATA}")
    if type(stream) is not int or stream < 0 or type(last) is not bool:
        raise InvalidRequest(f"{INVALID_MESSAGE}: data has no plain stream and last")
    try:
        channel = Channel(str(parsed.get("channel")))
    except ValueError as error:
        raise InvalidRequest(f"{INVALID_MESSAGE}: data of no channel that there is") from error
    return DataMessage(channel, stream=stream, last=last), size
