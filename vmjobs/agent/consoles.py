"""The console of a running job's machine, for somebody who belongs to the job on its node."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final

from vmjobs.agent import protocol
from vmjobs.agent.framing import MAX_DATA, Channel, DataMessage
from vmjobs.agent.protocol import ConsoleMessage

#: How often a console is looked at that is followed, in seconds. The hypervisor that writes it tells
#: nobody; the job's end is an event.
TICK: Final = 0.2


def show(
    connection: socket.socket,
    path: Path | None,
    message: ConsoleMessage,
    over: Callable[[float], bool],
) -> None:
    """Send what a machine has said, and, if it is to be followed, what it says until its job is over.

    path: None where the job is not that far. over: waits, at most so many seconds, for the job's end,
    and says whether it has come. The file goes before; what was open of it is read to its end.

    Raises OSError: the other end is gone, or stands still.
    """
    with ExitStack() as held:
        console: BinaryIO | None = None
        size = 0
        while True:
            ended = over(0.0)
            if console is None and path is not None:
                with suppress(FileNotFoundError):
                    console = held.enter_context(path.open("rb"))
                    console.seek(message.offset)
            if console is not None:
                size = _send_new(connection, console, size)
            if ended or not message.follow or _has_left(connection):
                break
            over(TICK)
    protocol.send(connection, DataMessage(Channel.SHELL, last=True))


def _send_new(connection: socket.socket, console: BinaryIO, before: int) -> int:
    """Send what has come; the file's size by now. before: at the last look. One that was emptied since
    begins anew.
    """
    size = os.fstat(console.fileno()).st_size
    if size < before:
        console.seek(0)
    while data := console.read(MAX_DATA):
        protocol.send(connection, DataMessage(Channel.SHELL, data))
    return size


def _has_left(connection: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    return bool(poller.poll(0))
