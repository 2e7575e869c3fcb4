"""Sends the console of a running job's VM to a client that belongs to the job."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final

from vmjobs.agent import protocol
from vmjobs.agent.framing import MAX_DATA, Channel, DataMessage
from vmjobs.agent.protocol import ConsoleMessage

#: Seconds between two reads of a followed console: the hypervisor that writes it sends no event.
POLL_SECONDS: Final = 0.2


def send_console(
    connection: socket.socket,
    path: Path | None,
    message: ConsoleMessage,
    wait_for_end: Callable[[float], bool],
) -> None:
    """Send a VM's console; if the client follows it, go on until the job ends.

    path: None if the console does not exist yet. wait_for_end: waits at most so many seconds for the
    job's end and returns whether the job has ended. If the file is removed before that, the open file
    is read to its end.

    Raises OSError: the client is gone or does not read.
    """
    with ExitStack() as held:
        console: BinaryIO | None = None
        size = 0
        while True:
            ended = wait_for_end(0.0)
            if console is None and path is not None:
                with suppress(FileNotFoundError):
                    console = held.enter_context(path.open("rb"))
                    console.seek(message.offset)
            if console is not None:
                size = _send_new(connection, console, size)
            if ended or not message.follow or protocol.wait_for_hang_up(connection, 0):
                break
            wait_for_end(POLL_SECONDS)
    protocol.send(connection, DataMessage(Channel.SHELL, last=True))


def _send_new(connection: socket.socket, console: BinaryIO, previous_size: int) -> int:
    """Send new bytes and return the file's size.

    previous_size: at the last call; a file that has become smaller is read from its beginning.
    """
    size = os.fstat(console.fileno()).st_size
    if size < previous_size:
        console.seek(0)
    while data := console.read(MAX_DATA):
        protocol.send(connection, DataMessage(Channel.SHELL, data))
    return size
