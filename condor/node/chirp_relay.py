"""Relay Chirp connections of a job in a VM to the starter's Chirp service."""

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

from condor.node.chirp import LINE_MAX, quote, read_chirp_config

#: Commands that every job may use: on attributes that begin with ``Chirp``, except ``ChirpVM*``, which
#: the job's policy uses. (HTCondor itself returns any attribute, and ignores the case of names.)
_ALLOWED_COMMAND: Final = re.compile(
    rb"cookie |(?:get|set)_job_attr_delayed (?!ChirpVM)Chirp\w{0,100}[ \n]", re.IGNORECASE
)
#: The longest value of an attribute that is sent to a job, in bytes.
_MAX_ANSWER: Final = 1024 * 1024
#: The answer to all other commands (chirp_protocol.h: CHIRP_ERROR_NOT_AUTHORIZED).
NOT_AUTHORIZED: Final = b"-2\n"


@dataclass(frozen=True)
class ChirpRelay:
    """Relays connections of a job in a VM to the starter's Chirp service.

    config: as for :class:`ChirpReporter`.
    has_full_access: the job has ``WantIOProxy``: it may use its files on the submit host and all
        attributes of its ad. Otherwise it has the rights of every job (``WantDelayedUpdates``): delayed
        updates of attributes that begin with ``Chirp``, except ``ChirpVM*``. The starter does not
        enforce that, because it accepts immediate updates for vmjobs.
    is_checkpointable: the VM may have been restored from a checkpoint made on another node.
    """

    config: str | Path
    has_full_access: bool
    is_checkpointable: bool = False
    timeout: float = 5.0

    def __call__(self, job: socket.socket) -> None:
        """Relay one connection until it ends.

        Raises:
            OSError: the Chirp service is gone.
        """
        host, port, cookie = read_chirp_config(self.config)
        with socket.create_connection((host, int(port)), self.timeout) as starter:
            starter.settimeout(None)
            with job.makefile("rb", buffering=0) as first:
                line = _read_line(first)
            if self.is_checkpointable and line.startswith(b"cookie "):
                # A restored VM sends the cookie of the starter that it ran under before.
                line = b"cookie " + quote(cookie) + b"\n"
            if self.has_full_access:
                starter.sendall(line)
                _copy_both_ways(job, starter)
            else:
                _relay_allowed_commands(job, starter, line)


def _copy_both_ways(one: socket.socket, other: socket.socket) -> None:
    """Copy bytes both ways until both ends have closed."""

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


def _read_line(stream: io.RawIOBase) -> bytes:
    """Read the first line of a connection, and no byte after it."""
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE_MAX and (byte := stream.read(1)):
        line += byte
    return line


def _relay_allowed_commands(job: socket.socket, starter: socket.socket, first: bytes) -> None:
    """Relay the commands that every job may use, with their answers. first: the first command."""
    with job.makefile("rb") as commands, starter.makefile("rb") as answers:
        for line in chain((first,), iter(lambda: commands.readline(LINE_MAX), b"")):
            if not line.endswith(b"\n"):
                return
            if not _ALLOWED_COMMAND.match(line):
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
