"""A transparent job as it is submitted to the agent, and how it ended.

The program beside each job of a node imports this, so it imports no module that loads slowly.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
from contextlib import suppress

from vmjobs.agent import framing

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

#: The code of an end because the image cannot run transparent jobs.
IMAGE_UNSUITABLE = "IMAGE_UNSUITABLE"


class Exit:
    """How the job ended: one of ``code`` and ``signal``."""

    def __init__(self, code: int | None = None, signal: int | None = None) -> None:
        self.code = code
        self.signal = signal

    @property
    def ok(self) -> bool:
        return self.code == 0


class RunResult:
    """How a run ended: by the job's exit, or with ``code`` and ``why`` of a failure.

    stopped: the signal that stopped the job, 0 if none; ``code`` and ``why`` then say how the run
    ended, if known. is_out_of_memory: the guest's kernel killed processes for lack of memory. rejected:
    names of refused files that the job left, and the reasons.
    """

    def __init__(
        self,
        exit: Exit | None = None,
        code: str = "",
        why: str = "",
        *,
        stopped: int = 0,
        is_out_of_memory: bool = False,
        rejected: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.exit = exit
        self.code = code
        self.why = why
        self.stopped = stopped
        self.is_out_of_memory = is_out_of_memory
        self.rejected = rejected


class TransparentJob:
    """A transparent job to submit to the agent.

    message: the fields of the ``hand`` message. fields: the users' names of these fields. start: see
    :func:`start_script`. directory: the job's. chirp: serves a connection of the job to HTCondor's
    Chirp service. report_job_end: reports an end to HTCondor; returns whether it is final, so that the
    job will not resume from its last checkpoint.
    """

    def __init__(
        self,
        message: Mapping[str, Any],
        start: bytes,
        directory: str,
        *,
        fields: Mapping[str, str],
        chirp: Callable[[socket.socket], object] | None = None,
        report_job_end: Callable[[RunResult], bool] = lambda _end: False,
    ) -> None:
        self.message = message
        self.start = start
        self.directory = directory
        self.fields = fields
        self.chirp = chirp
        self.report_job_end = report_job_end

    @property
    def is_checkpointed(self) -> bool:
        """Whether the agent saves its VM when the job is vacated."""
        return bool(self.message.get("checkpoint"))

    def explain_refusal(self, error: Mapping[str, Any]) -> str:
        """The text of an ``error`` message, with the users' names of fields."""
        faults = error.get("faults") or {}
        listing = "; ".join(f"{self.fields.get(name, name)}: {why}" for name, why in faults.items())
        return listing or str(error["message"])


def start_script(environment: Iterable[bytes], command: Sequence[bytes]) -> bytes:
    """A shell script that executes the job, or the command in ``$@``, in its environment.

    ``vmjobs/agent/condor_job/inside/unchanged.sh`` sets the script's variables.
    """
    variables = [word for word in environment if b"=" in word and not word.startswith(b"=")]
    words = [
        *(b"[ $# -gt 0 ] || set --", *map(_quote, command), b"\n"),
        *(b"exec env -i $defaults --", *map(_quote, variables)),
        b'"$setpriv" --reuid "$uid" --regid "$gid" --clear-groups -- "$@"\n',
    ]
    return b" ".join(words)


def account_names() -> tuple[str, str]:
    """The names of this process's user and group.

    Without a name, or with one that a guest's user database cannot hold: made from the number.
    """
    uid, gid = os.getuid(), os.getgid()
    user = group = ""
    with suppress(KeyError):
        user = pwd.getpwuid(uid).pw_name
    with suppress(KeyError):
        group = grp.getgrgid(gid).gr_name
    plain = re.compile(framing.ACCOUNT_NAME)
    return (
        user if plain.fullmatch(user) else f"u{uid}",
        group if plain.fullmatch(group) else f"g{gid}",
    )


def _quote(word: bytes) -> bytes:
    return b"'" + word.replace(b"'", b"'\\''") + b"'"
