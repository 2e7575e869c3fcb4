"""What a job in a machine has to say to HTCondor's Chirp service itself."""

from __future__ import annotations

import io
import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from condor.chirp import LINE_MAX, quote, service

#: What a job needs no leave for: attributes that begin with ``Chirp``, but for those that its policy
#: goes by. (HTCondor itself shows any attribute of the ad here, and takes names in any case.)
_GRANTED: Final = re.compile(
    rb"cookie |(?:get|set)_job_attr_delayed (?!ChirpVM)Chirp\w{0,100}[ \n]", re.IGNORECASE
)
#: Bytes of an attribute's value that a job is told.
_MAX_ANSWER: Final = 1024 * 1024
#: The answer to others (chirp_protocol.h: CHIRP_ERROR_NOT_AUTHORIZED).
NOT_AUTHORIZED: Final = b"-2\n"


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

    config: str | Path
    everything: bool
    moves: bool = False
    timeout: float = 5.0

    def __call__(self, job: socket.socket) -> None:
        """Carry a connection to its end.

        Raises:
            OSError: the service is gone.
        """
        host, port, cookie = service(self.config)
        with socket.create_connection((host, int(port)), self.timeout) as starter:
            starter.settimeout(None)
            with job.makefile("rb", buffering=0) as first:
                line = _line_of(first)
            if self.moves and line.startswith(b"cookie "):
                # Its machine may have been saved, and has the cookie of a starter that it left.
                line = b"cookie " + quote(cookie) + b"\n"
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
