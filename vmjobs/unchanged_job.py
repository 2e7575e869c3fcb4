"""An unchanged job of HTCondor's as it is handed over to the agent, and how it ended.

This runs beside each job of a node, for as long as that: no module that takes long to import is needed.
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

#: The code of an end whose image cannot run such jobs.
UNSUITABLE = "IMAGE_UNSUITABLE"


class Exit:
    """How the job ended: one of ``code`` and ``signal``."""

    def __init__(self, code: int | None = None, signal: int | None = None) -> None:
        self.code = code
        self.signal = signal

    @property
    def ok(self) -> bool:
        """True for exit code 0."""
        return self.code == 0


class End:
    """How it ended: by the job's own status, or with ``code`` and ``why`` of who could not run it.

    stopped: the signal to stop that came before its end, 0 if none; ``code`` and ``why`` then say how
    the run ended, as far as that is known. starved: its machine's kernel has killed processes before,
    for want of memory. rejected: names of what it left and could not be put back, and why.
    """

    def __init__(
        self,
        exit: Exit | None = None,
        code: str = "",
        why: str = "",
        *,
        stopped: int = 0,
        starved: bool = False,
        rejected: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.exit = exit
        self.code = code
        self.why = why
        self.stopped = stopped
        self.starved = starved
        self.rejected = rejected


class Handing:
    """A job as it is handed over.

    message: the words of the ``hand`` message. fields: what users call those. start: see
    :func:`start_words`. directory: its own. chirp: answers a connection of the job's to HTCondor's
    Chirp service. settle: tells HTCondor of an end; whether that is one from which the job does not go
    on where its machine was saved last.
    """

    def __init__(
        self,
        message: Mapping[str, Any],
        start: bytes,
        directory: str,
        *,
        fields: Mapping[str, str],
        chirp: Callable[[socket.socket], object] | None = None,
        settle: Callable[[End], bool] = lambda _end: False,
    ) -> None:
        self.message = message
        self.start = start
        self.directory = directory
        self.fields = fields
        self.chirp = chirp
        self.settle = settle

    @property
    def is_saved(self) -> bool:
        """Whether its machine is to be saved where the job is vacated."""
        return bool(self.message.get("checkpoint"))

    def why_refused(self, error: Mapping[str, Any]) -> str:
        """What an ``error`` message says, in words of the job's user."""
        faults = error.get("faults") or {}
        listing = "; ".join(f"{self.fields.get(name, name)}: {why}" for name, why in faults.items())
        return listing or str(error["message"])


def start_words(environment: Iterable[bytes], command: Sequence[bytes]) -> bytes:
    """Words of a shell that become the job, or the command that is in ``$@``, in its environment.

    ``vmjobs/agent/inside/unchanged.sh`` sets their variables.
    """
    variables = [word for word in environment if b"=" in word and not word.startswith(b"=")]
    words = [
        *(b"[ $# -gt 0 ] || set --", *map(_quote, command), b"\n"),
        *(b"exec env -i $defaults --", *map(_quote, variables)),
        b'"$setpriv" --reuid "$uid" --regid "$gid" --clear-groups -- "$@"\n',
    ]
    return b" ".join(words)


def account() -> tuple[str, str]:
    """Names of this process's user and group; made from their numbers where they have none, or one
    that a guest's tables cannot hold.
    """
    uid, gid = os.getuid(), os.getgid()
    user = group = ""
    with suppress(KeyError):
        user = pwd.getpwuid(uid).pw_name
    with suppress(KeyError):
        group = grp.getgrgid(gid).gr_name
    plain = re.compile(framing.NAME)
    return (
        user if plain.fullmatch(user) else f"u{uid}",
        group if plain.fullmatch(group) else f"g{gid}",
    )


def _quote(word: bytes) -> bytes:
    return b"'" + word.replace(b"'", b"'\\''") + b"'"
