"""A way into the machine of a running job, and to its console, for who belongs to it on its node.

HTCondor's ``condor_ssh_to_job`` brings people to the node as the job's user; from there this carries
them, or their command, into the machine.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmjobs.agent import protocol
from vmjobs.agent.framing import Channel, DataMessage
from vmjobs.agent.protocol import ConsoleMessage, EnterMessage, ErrorMessage
from vmjobs.errors import Unavailable, reason_of
from vmjobs.execute import Refused
from vmjobs.terminal import guest_output

IN, OUT = 0, 1
_PIECE: Final = 64 * 1024


def enter(path: Path, command: str = "") -> int:
    """Run a command, or a shell, in the machine of the job that this process belongs to.

    Standard input and output are its own; in a terminal, so is that. What it prints as errors comes on
    standard output, too.

    path: the agent's socket. command: words of a shell; empty for a shell to type at.

    Returns:
        Its exit status.

    Raises:
        Refused: no machine of this job's runs here, or it lets nobody in.
        Unavailable: there is no agent, or it went away.
    """
    mark = secrets.token_hex(16)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(path))
            protocol.send(connection, _message(command, mark))
            return _carry(connection, Tail(mark))
    except OSError as error:
        raise Unavailable("agent", f"no agent at {path}: {reason_of(error)}") from error


#: What asks for the console, in place of a command to be run in the machine.
CONSOLE: Final = re.compile(r"vmjobs-console(?: --offset ([0-9]{1,15}))?( -f)?")


def watch(path: Path, offset: int = 0, *, follow: bool = False) -> int:
    """Print the console of the machine of the job that this process belongs to; 0 in the end.

    path: the agent's socket. offset: the first byte. follow: go on until the job has ended.

    Raises:
        Refused: no machine of this job's runs here.
        Unavailable: there is no agent, or it went away.
    """
    try:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
            os.fdopen(OUT, "wb", closefd=False) as out,
        ):
            sink = guest_output(out)
            connection.connect(str(path))
            protocol.send(connection, ConsoleMessage(offset=offset, follow=follow))
            for message in protocol.receive(connection):
                if isinstance(message, ErrorMessage):
                    raise Refused(message.message)
                if isinstance(message, DataMessage):
                    sink.write(message.data)
                    sink.flush()
                    if message.last:
                        return 0
    except BrokenPipeError:
        return 0  # whoever read this has seen enough
    except OSError as error:
        raise Unavailable("agent", f"no agent at {path}: {reason_of(error)}") from error
    raise Unavailable("agent", "the agent hung up")


def _message(command: str, mark: str) -> EnterMessage:
    wanted = os.isatty(IN) and os.isatty(OUT)
    if not wanted and command:
        return EnterMessage(command=command, mark=mark)
    size = os.get_terminal_size(OUT) if wanted else os.terminal_size((80, 24))
    term = re.sub(r"[^A-Za-z0-9._+-]", "", os.environ.get("TERM", ""))[:64] or "dumb"
    return EnterMessage(
        command=command, mark=mark, term=term, rows=size.lines or 24, columns=size.columns or 80
    )


def _carry(connection: socket.socket, tail: Tail) -> int:
    with _raw_terminal():
        threading.Thread(target=_send_input, args=(connection,), daemon=True).start()
        for message in protocol.receive(connection):
            if isinstance(message, ErrorMessage):
                raise Refused(message.message)
            if isinstance(message, DataMessage) and message.channel is Channel.SHELL:
                _write(tail.take(message.data))
                if message.last:
                    break
        _write(tail.rest())
    if tail.status is None:
        raise Unavailable("agent", "the machine hung up: the job has ended, or its agent has")
    return tail.status


def _send_input(connection: socket.socket) -> None:
    with suppress(OSError):  # it is over
        while data := os.read(IN, _PIECE):
            protocol.send(connection, DataMessage(Channel.SHELL, data))
        protocol.send(connection, DataMessage(Channel.SHELL, last=True))


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(OUT, data) :]


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Every key goes to the machine as it is typed, where there is a terminal."""
    if not (os.isatty(IN) and os.isatty(OUT)):
        yield
        return
    before = termios.tcgetattr(IN)
    try:
        tty.setraw(IN)
        yield
    finally:
        termios.tcsetattr(IN, termios.TCSADRAIN, before)


@dataclass
class Tail:
    """Finds what ends all that comes out of a machine, ``vmjobs MARK STATUS``, and keeps it back.

    It begins with a character that no text has (U+001E), so that no text is kept back as a part of it.

    status: the exit status, once it has come.
    """

    mark: str
    status: int | None = None
    _held: bytes = b""

    def take(self, data: bytes) -> bytes:
        """What of the bytes so far is to be printed; it is kept back only where it may be that line."""
        head = f"\x1evmjobs {self.mark} ".encode()
        data = self._held + data
        at = data.find(head)
        if at < 0:
            most = min(len(head) - 1, len(data))
            longest = next((n for n in range(most, 0, -1) if head.startswith(data[-n:])), 0)
            at = len(data) - longest
        self._held = data[at:]
        found = re.fullmatch(re.escape(head) + rb"(\d{1,3})\n", self._held)
        if found:
            self.status = int(found[1])
        return data[:at]

    def rest(self) -> bytes:
        """What was kept back, and is no such line."""
        return b"" if self.status is not None else self._held
