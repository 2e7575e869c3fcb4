"""HTCondor's Chirp service: progress into the job ad, and what a job in a machine has to say itself.

The starter of a job with ``WantIOProxy`` listens on a local port and writes address and cookie
to ``.chirp.config`` in the scratch directory. The protocol is one line a command; the answer is
a line with a number, negative for a failure.
"""

from __future__ import annotations

import io
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from condor import names
from vmjobs.ports import ClassAdValue

log = logging.getLogger(__name__)

#: The longest line that the starter takes, in bytes.
LINE_MAX: Final = 5000
#: A string is cut so that its literal has no more bytes: the starter takes 993 of what is for later,
#: and job ads are mirrored in full, again and again.
VALUE_MAX: Final = 990

#: What a job needs no leave for: attributes that begin with ``Chirp``, but for those that its policy
#: goes by. (HTCondor itself shows any attribute of the ad here, and takes names in any case.)
_GRANTED: Final = re.compile(
    rb"cookie |(?:get|set)_job_attr_delayed (?!ChirpVM)Chirp\w{0,100}[ \n]", re.IGNORECASE
)
#: Bytes of an attribute's value that a job is told.
_MAX_ANSWER: Final = 1024 * 1024
#: The answer to others (chirp_protocol.h: CHIRP_ERROR_NOT_AUTHORIZED).
NOT_AUTHORIZED: Final = b"-2\n"

_ATTRIBUTE: Final = re.compile(r"Chirp[A-Za-z0-9_]{1,60}")


@dataclass(frozen=True)
class Expression:
    """A ClassAd expression of our own making; any string of others stands in it as a literal."""

    text: str


#: What a job's ad may be told.
Told = ClassAdValue | Expression


class ChirpReporter:
    """Writes attributes into the ad of the job this process runs in.

    config: the file with address and cookie; by default the one HTCondor's environment names,
    or ``.chirp.config`` in the current directory. Without it all calls do nothing.
    timeout: seconds for the whole exchange of one call's lines, each.
    """

    def __init__(self, config: Path | None = None, timeout: float = 5.0) -> None:
        self._config = config or Path(os.environ.get("_CONDOR_CHIRP_CONFIG") or names.CHIRP_CONFIG)
        self._timeout = timeout
        self._told: dict[str, Told] = {}
        self._told_later: dict[str, Told] = {}

    def publish(self, attributes: Mapping[str, Told]) -> bool:
        """Write attributes into the job ad; failing to is logged, never raised. False: it failed.

        Only what has changed since: each attribute is an event of the job's log.
        """
        try:
            self._tell(attributes, self._told, b"set_job_attr")
        except (OSError, ValueError) as error:
            log.warning("progress did not get into the job ad: %s", error)
            return False
        return True

    def publish_later(self, attributes: Mapping[str, Told], *, last: bool = False) -> bool:
        """The same, but the starter passes them on with its own next update, or with the job's end: the
        ad has them before the job's policy is looked at. They are no events.

        last: all of them, changed or not. An update may have been lost with its connection.
        """
        try:
            self._tell(attributes, {} if last else self._told_later, b"set_job_attr_delayed")
        except (OSError, ValueError) as error:
            # A node may be set up to take none, and any to take a hundred names: the job's own count.
            log.info("the starter takes nothing for later: %s", error)
            return self.publish(attributes)
        return True

    def publish_state(self, attributes: Mapping[str, Told], *, last: bool = False) -> bool:
        """Write a state at once, and the rest later: one event of the job's log for each state."""
        state = {name: value for name, value in attributes.items() if name == names.VM_STATE}
        rest = {name: value for name, value in attributes.items() if name not in state}
        return self.publish_later(rest, last=last) & self.publish(state)

    def _tell(self, attributes: Mapping[str, Told], told: dict[str, Told], command: bytes) -> None:
        unset = object()
        fresh = {n: value for n, value in attributes.items() if told.get(n, unset) != value}
        if not fresh or not self._config.is_file():
            return
        self._send([set_command(name, value, command) for name, value in fresh.items()])
        told.update(fresh)

    def _send(self, commands: Sequence[bytes]) -> None:
        host, port, cookie = self._config.read_text("ascii").split()
        lines = [b"cookie " + _quote(cookie) + b"\n", *commands]
        with socket.create_connection((host, int(port)), self._timeout) as connection:
            connection.settimeout(self._timeout)
            with connection.makefile("rb") as answers:
                for line in lines:
                    connection.sendall(line)
                    answer = answers.readline(LINE_MAX).strip()
                    if not answer or int(answer) < 0:
                        command = line.split(b" ", 2)[:2] if line is not lines[0] else [b"cookie"]
                        what = b" ".join(command).decode("ascii", "replace").strip()
                        raise ValueError(f"the starter answered {answer!r} to {what}")


@dataclass(frozen=True)
class ChirpRelay:
    """Answers connections of a job in a machine with the starter's own service.

    config: as of :class:`ChirpReporter`.
    everything: the job asked for all of it (``WantIOProxy``): its files on the submit host, any
        attribute of its ad. Otherwise it has what HTCondor grants any job (``WantDelayedUpdates``):
        attributes that begin with ``Chirp``, later on; ``ChirpVM`` is ours. The starter does not see
        to that: it has been told to take attributes at once, for vmjobs.
    moves: its machine may come from elsewhere.
    """

    config: Path
    everything: bool
    moves: bool = False
    timeout: float = 5.0

    def __call__(self, job: socket.socket) -> None:
        """Carry a connection to its end.

        Raises:
            OSError: the service is gone.
        """
        host, port, cookie = self.config.read_text("ascii").split()
        with socket.create_connection((host, int(port)), self.timeout) as starter:
            starter.settimeout(None)
            with job.makefile("rb", buffering=0) as first:
                line = _line_of(first)
            if self.moves and line.startswith(b"cookie "):
                # Its machine may have been saved, and has the cookie of a starter that it left.
                line = b"cookie " + _quote(cookie) + b"\n"
            if self.everything:
                starter.sendall(line)
                _join(job, starter)
            else:
                _carry_granted(job, starter, line)


def _join(one: socket.socket, other: socket.socket) -> None:
    """Carry bytes both ways until both ends have said all."""

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(64 * 1024):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    back = threading.Thread(target=carry, args=(other, one), daemon=True)
    back.start()
    carry(one, other)
    back.join()


def _line_of(stream: io.RawIOBase) -> bytes:
    """The first line of a connection, and not a byte more."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE_MAX and (byte := stream.read(1)):
        line += byte
    return line


def _carry_granted(job: socket.socket, starter: socket.socket, first: bytes) -> None:
    """Carry commands that any job may give, each with its answer.  first: of them."""
    with job.makefile("rb") as commands, starter.makefile("rb") as answers:
        for line in chain((first,), iter(lambda: commands.readline(LINE_MAX), b"")):
            if not line.endswith(b"\n"):
                return
            if not _GRANTED.match(line):
                job.sendall(NOT_AUTHORIZED)
                continue
            starter.sendall(line)
            answer = answers.readline(LINE_MAX)
            if not answer:
                return
            if line.startswith(b"get_") and answer.strip().isdigit():
                size = int(answer)
                if size > _MAX_ANSWER:
                    return
                answer += answers.read(size)
            job.sendall(answer)


def set_command(name: str, value: Told, command: bytes = b"set_job_attr") -> bytes:
    """The line that sets an attribute. command: now, or later (``set_job_attr_delayed``).

    Raises:
        ValueError: the name is not one that is mirrored (``Chirp…``), or the line is too long.
    """
    if not _ATTRIBUTE.fullmatch(name):
        raise ValueError(f"{name!r} is not an attribute that travels back")
    text = value.text if isinstance(value, Expression) else literal(value)
    line = command + b" " + _quote(name) + b" " + _quote(text) + b"\n"
    if len(line) > LINE_MAX:
        raise ValueError(f"the value of {name} is too long")
    return line


def literal(value: ClassAdValue, limit: int = VALUE_MAX) -> str:
    """A value as a ClassAd literal: never an expression, whatever a string contains.

    limit: bytes to which a longer string's literal is cut; 0 for no limit.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else "undefined"
    # Control characters have no place in a queue's listing, `$$(` means something to a schedd
    # wherever it stands, and a backslash means one thing in the old syntax (starter, startd)
    # and another in the new one: before a quote it is an escape in both.
    text = "".join(c if c.isprintable() else " " for c in value[: limit or None])
    pieces = text.replace("$$", "$ $").replace("\\", "/").replace('"', '\\"')
    if limit:
        pieces = pieces.encode()[: limit - 2].decode(errors="ignore")
        if pieces.endswith("\\"):  # what it stood before is cut off
            pieces = pieces[:-1]
    return f'"{pieces}"'


def _quote(word: str) -> bytes:
    return re.sub(r"([\\ \t\r\n])", r"\\\1", word).encode("utf-8")
