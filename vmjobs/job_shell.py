"""A shell in a job's VM, and the VM's console, for processes of the job on its node.

HTCondor's ``condor_ssh_to_job`` logs people in to the node as the job's user; this module connects
them, or their command, to the guest.
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
from vmjobs.execute import JobRefused
from vmjobs.terminal import guest_output

IN, OUT = 0, 1
_CHUNK_BYTES: Final = 64 * 1024


def run_shell(path: Path, command: str = "") -> int:
    """Run a command, or a shell, in the VM of the job that this process belongs to.

    It uses this process's standard input, output and terminal; its standard error goes to standard
    output.

    path: the agent's socket. command: a shell command; empty: an interactive shell.

    Returns:
        Its exit status.

    Raises:
        JobRefused: no VM of this job runs here, or its guest refuses logins.
        Unavailable: no agent answers, or it closed the connection.
    """
    mark = secrets.token_hex(16)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(path))
            protocol.send(connection, _enter_message(command, mark))
            return _relay(connection, ExitStatusFilter(mark))
    except OSError as error:
        raise Unavailable("agent", f"no agent at {path}: {reason_of(error)}") from error


#: Requests the console, in place of a command to run in the guest.
CONSOLE_COMMAND: Final = re.compile(r"vmjobs-console(?: --offset ([0-9]{1,15}))?( -f)?")


def print_console(path: Path, offset: int = 0, *, follow: bool = False) -> int:
    """Print the VM console of the job that this process belongs to; returns 0.

    path: the agent's socket. offset: the first byte. follow: go on until the job has ended.

    Raises:
        JobRefused: no VM of this job runs here.
        Unavailable: no agent answers, or it closed the connection.
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
                    raise JobRefused(message.message)
                if isinstance(message, DataMessage):
                    sink.write(message.data)
                    sink.flush()
                    if message.last:
                        return 0
    except BrokenPipeError:
        return 0  # the reader has closed its end
    except OSError as error:
        raise Unavailable("agent", f"no agent at {path}: {reason_of(error)}") from error
    raise Unavailable("agent", "the agent closed the connection")


def _enter_message(command: str, mark: str) -> EnterMessage:
    has_terminal = os.isatty(IN) and os.isatty(OUT)
    if not has_terminal and command:
        return EnterMessage(command=command, mark=mark)
    size = os.get_terminal_size(OUT) if has_terminal else os.terminal_size((80, 24))
    term = re.sub(r"[^A-Za-z0-9._+-]", "", os.environ.get("TERM", ""))[:64] or "dumb"
    return EnterMessage(
        command=command, mark=mark, term=term, rows=size.lines or 24, columns=size.columns or 80
    )


def _relay(connection: socket.socket, output_filter: ExitStatusFilter) -> int:
    with _raw_terminal():
        threading.Thread(target=_send_input, args=(connection,), daemon=True).start()
        for message in protocol.receive(connection):
            if isinstance(message, ErrorMessage):
                raise JobRefused(message.message)
            if isinstance(message, DataMessage) and message.channel is Channel.SHELL:
                _write(output_filter.feed(message.data))
                if message.last:
                    break
        _write(output_filter.remainder())
    if output_filter.status is None:
        raise Unavailable("agent", "the VM closed the connection: the job or the agent has ended")
    return output_filter.status


def _send_input(connection: socket.socket) -> None:
    with suppress(OSError):  # the connection has ended
        while data := os.read(IN, _CHUNK_BYTES):
            protocol.send(connection, DataMessage(Channel.SHELL, data))
        protocol.send(connection, DataMessage(Channel.SHELL, last=True))


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(OUT, data) :]


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Put the terminal, if any, into raw mode: every key goes to the guest at once."""
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
class ExitStatusFilter:
    """Removes and parses the last line of a guest's output, ``vmjobs MARK STATUS``.

    That line begins with U+001E, a character that text does not contain, so that text is never held
    back as the possible start of it.

    status: the exit status, once it has arrived.
    """

    mark: str
    status: int | None = None
    _pending: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """The bytes to print now; those that may begin the status line are held back."""
        head = f"\x1evmjobs {self.mark} ".encode()
        data = self._pending + data
        at = data.find(head)
        if at < 0:
            most = min(len(head) - 1, len(data))
            longest = next((n for n in range(most, 0, -1) if head.startswith(data[-n:])), 0)
            at = len(data) - longest
        self._pending = data[at:]
        found = re.fullmatch(re.escape(head) + rb"(\d{1,3})\n", self._pending)
        if found:
            self.status = int(found[1])
        return data[:at]

    def remainder(self) -> bytes:
        """The bytes that were held back, unless they are the status line."""
        return b"" if self.status is not None else self._pending
