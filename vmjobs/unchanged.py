"""What takes the place of an unchanged job of HTCondor's on its node, and has it run in a machine.

It hands the job's directory over to the agent (:mod:`vmjobs.agent.protocol`), passes on what the job
prints, and puts what it has changed in its directory back. It has no rights but the job's own.

A job that an agent lost is begun again from the same directory, which nothing of it has touched by
then: changes are put back only when all of them have come.
"""

from __future__ import annotations

import grp
import io
import logging
import os
import pwd
import re
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from vmjobs import tree
from vmjobs.agent import protocol
from vmjobs.agent.outputs import rejected_entry
from vmjobs.agent.protocol import Channel, DataMessage, EndMessage, ErrorMessage, ProgressMessage
from vmjobs.agent.streams import Streams
from vmjobs.errors import InvalidRequest, Unavailable, VMJobsError, reason_of
from vmjobs.execute import NotNow, Signals, insist
from vmjobs.model import ExitChannel, ExitStatus, JobState, ReasonCode, RejectedEntry

log = logging.getLogger(__name__)

#: How often a job is begun on one node, as long as nobody says why it did not end there.
MAX_BEGINNINGS = 3
#: Files of the starter's own in a job's directory, which it has open.
KEPT = frozenset({"_condor_stdout", "_condor_stderr"})
#: The same on the way back: those that the node itself goes on to read are not the guest's to change.
SAFE = KEPT | {".chirp.config", ".job.ad", ".machine.ad"}
#: Bytes of the names that a job may leave.
MAX_LEFT = 64 * 1024 * 1024
#: Signals that end a process which does nothing about them (signal(7)).
ENDING = frozenset({*range(1, 17), *range(24, 28), 29, 30, 31, *range(34, 65)})

#: The code of an end whose image cannot run such jobs.
UNSUITABLE = "IMAGE_UNSUITABLE"

STDIN, OUT, ERR = 0, 1, 2


@dataclass(frozen=True)
class End:
    """How it ended: by the job's own status, or with ``code`` and ``why`` of who could not run it.

    stopped: the signal to stop that came before its end, 0 if none; ``code`` and ``why`` then say how
    the run ended, as far as that is known. starved: its machine's kernel has killed processes before,
    for want of memory. rejected: what it left and could not be put back.
    """

    exit: ExitStatus | None = None
    code: str = ""
    why: str = ""
    stopped: int = 0
    starved: bool = False
    rejected: tuple[RejectedEntry, ...] = ()


@dataclass(frozen=True)
class Handing:
    """A job as it is handed over. start: see :func:`start_words`. directory: its own.

    chirp: answers a connection of the job's to HTCondor's Chirp service. settle: tells HTCondor of an
    end; whether that is one from which the job does not go on where its machine was saved last.
    """

    message: protocol.HandMessage
    start: bytes
    directory: Path
    chirp: Callable[[socket.socket], object] | None = None
    settle: Callable[[End], bool] = lambda _end: False


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
    plain = re.compile(protocol.NAME)
    return (
        user if plain.fullmatch(user) else f"u{uid}",
        group if plain.fullmatch(group) else f"g{gid}",
    )


def run_handed(
    path: Path,
    handing: Handing,
    on_progress: Callable[[ProgressMessage | EndMessage], None],
    patience: float = 120.0,
) -> End:
    """Have the agent at ``path`` run a job; what the job left is in its directory when this returns.

    patience: seconds to wait for an agent that is not there (any more), or will not run the job now.

    Raises:
        Unavailable: no agent for longer than that, it lost the job time and again, or this node cannot
            read the job's directory or keep what the job writes.
        InvalidRequest: what the job left is not to be read.
    """
    beginnings = 0

    def converse(connection: socket.socket, heard: Callable[[], None]) -> End | None:
        nonlocal beginnings
        conversation = _Conversation(connection, handing, read, on_progress, heard, signals)
        ended = conversation.hold()
        beginnings += conversation.begun
        if ended is None and beginnings >= MAX_BEGINNINGS:
            raise Unavailable("agent", f"the agent at {path} lost the job {beginnings} times")
        if ended is None and conversation.refusal:
            raise NotNow(conversation.refusal)
        return ended

    # (Who waits for a stream is ended by a signal, as the job would be.)
    with _standard_input(handing.directory) as read, Signals() as signals:
        try:
            return insist(path, converse, signals, patience) or End(stopped=signals.stopping)
        except VMJobsError:
            if signals.stopping:  # it leaves in any case, and nobody is to take this for its end
                return End(stopped=signals.stopping)
            raise


@dataclass
class _Conversation:
    """One connection's worth of a job.

    read: what it reads. begun: it was taken, and what it prints may have come. refusal: why it does
    not run now.
    """

    connection: socket.socket
    handing: Handing
    read: IO[bytes] | None
    on_progress: Callable[[ProgressMessage | EndMessage], None]
    heard: Callable[[], None]
    signals: Signals
    begun: bool = False
    refusal: str = ""
    #: One that a second signal does not wait for while the first is passed on.
    _sending: threading.RLock = field(default_factory=threading.RLock)

    def hold(self) -> End | None:
        """Hand the job over and hear of it to its end; None: it has to be asked for again."""
        left = bytearray()
        with tempfile.TemporaryFile(dir=self.handing.directory) as changed:
            try:
                sent = self._hand_over()
                with self._chirping() as chirps, self.signals.forwarded_to(self._say):
                    last = self._listen(left, changed, chirps)
            except (ConnectionError, InvalidRequest) as error:
                log.warning("%s", error)
                return None
            if not isinstance(last, EndMessage):
                return last
            ended = self._end(last, sent, left, changed)
            if ended is not None and self._is_final(ended):
                with suppress(OSError):  # it is over all the same
                    self._say(protocol.TakenMessage())
            return ended

    def _is_final(self, ended: End) -> bool:
        """One that was told to leave is not at its end, however it left."""
        if ended.stopped or not self.handing.message.checkpoint:
            return False
        return self.handing.settle(ended) and not self.signals.stopping

    def _hand_over(self) -> frozenset[str]:
        """Send the job; the names in its directory. An agent that hangs up has said why."""
        try:
            return self._send()
        except BrokenPipeError:
            return frozenset()
        except ConnectionError:
            raise
        except OSError as error:
            raise Unavailable(
                "node", f"the job's directory cannot be read: {reason_of(error)}"
            ) from error

    def _send(self) -> frozenset[str]:
        protocol.send(self.connection, self.handing.message)
        self._send_all(Channel.START, io.BytesIO(self.handing.start))
        if self.read is not None:
            self.read.seek(0)
            self._send_all(Channel.INPUT, self.read)
        sink = cast("IO[bytes]", _Sender(self.connection))
        sent = tree.pack(self.handing.directory, sink, KEPT)
        protocol.send(self.connection, DataMessage(channel=Channel.TREE, size=0, last=True))
        _empty(OUT)
        _empty(ERR)
        return sent

    def _send_all(self, channel: Channel, source: IO[bytes]) -> None:
        for piece in protocol.pieces(channel, source):
            protocol.send(self.connection, piece)

    @contextmanager
    def _chirping(self) -> Iterator[Streams]:
        streams = Streams(Channel.CHIRP, self._say, self.handing.chirp)
        try:
            yield streams
        finally:
            streams.close()

    def _say(self, message: protocol.Message) -> None:
        """Send from any thread. The main one says nothing but what signals it gets."""
        with self._sending:
            protocol.send(self.connection, message)

    def _listen(self, left: bytearray, changed: IO[bytes], chirps: Streams) -> EndMessage | End | None:
        for message in protocol.receive(self.connection):
            if isinstance(message, DataMessage) and message.channel is Channel.CHIRP:
                chirps.take(message)
            elif isinstance(message, DataMessage):
                self._take(message, left, changed)
            elif isinstance(message, ProgressMessage):
                self.begun = True
                self.heard()
                self.on_progress(message)
            elif isinstance(message, EndMessage):
                self.on_progress(message)
                return message
            elif isinstance(message, ErrorMessage):
                log.warning("%s", message.message)
                self.refusal = message.message
                return None if message.retry else End(code=message.code, why=message.message)
        return None

    def _take(self, message: DataMessage, left: bytearray, changed: IO[bytes]) -> None:
        try:
            if message.channel is Channel.OUT:
                _write(OUT, message.data)
            elif message.channel is Channel.ERR:
                _write(ERR, message.data)
            elif message.channel is Channel.LEFT and len(left) < MAX_LEFT:
                left += message.data
            elif message.channel is Channel.CHANGED:
                changed.write(message.data)
        except OSError as error:  # a full disk, for one: no word about the agent
            raise Unavailable(
                "node", f"what the job writes cannot be kept: {reason_of(error)}"
            ) from error

    def _end(
        self, message: EndMessage, sent: frozenset[str], left: bytearray, changed: IO[bytes]
    ) -> End | None:
        reason, state = message.report.reason, message.report.state
        kind, _, rest = message.ended.partition(" ")
        exit = _exit_of(kind) if len(left) < MAX_LEFT else None
        if self.signals.stopping and (state is not JobState.COMPLETED or exit is None):
            return End(code=reason.code.value, why=reason.message, stopped=self.signals.stopping)
        if state is JobState.PREEMPTED and reason.code is not ReasonCode.NOT_RESUMED:
            return None
        if state is not JobState.COMPLETED:
            return End(code=reason.code.value, why=reason.message)
        if kind == "refused":
            return End(code=UNSUITABLE, why=rest)
        if exit is None:
            why = "the guest did not say how the job ended, or names more files than any job leaves"
            return End(code=ReasonCode.NO_EXIT_REPORT.value, why=why)
        try:
            refused = self._put_back(sent, left, changed)
        except OSError as error:
            raise Unavailable(
                "node", f"what the job left cannot be put back: {reason_of(error)}"
            ) from error
        rejected = (*message.report.rejected, *(rejected_entry(*found) for found in refused.items()))
        return End(
            exit=exit,
            stopped=self.signals.stopping,
            starved=rest == "starved",
            rejected=rejected,
        )

    def _put_back(self, sent: frozenset[str], left: bytearray, changed: IO[bytes]) -> dict[str, str]:
        """What of it is refused, and why."""
        changed.seek(0)
        directory = self.handing.directory
        refused = tree.unpack(changed, directory, SAFE)
        names = bytes(left).split(b"\0")[:-1]
        there = {name.decode("utf-8", "surrogateescape").removeprefix("./") for name in names}
        tree.remove(directory, sent - there - SAFE)
        if self.handing.message.checkpoint:
            there &= sent  # what another node sent, and the job never touched, this one need not have
        missing = [
            name
            for name in sorted(there - SAFE - refused.keys())
            if not os.path.lexists(directory / name)
        ]
        if missing:
            raise FileNotFoundError(f"{missing[0]} and {len(missing) - 1} others did not come")
        return refused


@contextmanager
def _standard_input(directory: Path) -> Iterator[IO[bytes] | None]:
    """What the job is to read; None for nothing.

    What HTCondor streams (``stream_input``) is taken in whole, out of sight in the job's directory:
    each beginning of the job reads it anew.

    Raises:
        Unavailable: this node cannot keep it.
    """
    kind = os.fstat(STDIN).st_mode
    if stat.S_ISREG(kind):
        with os.fdopen(os.dup(STDIN), "rb") as file:
            yield file
    elif stat.S_ISFIFO(kind):
        with os.fdopen(os.dup(STDIN), "rb") as stream, tempfile.TemporaryFile(dir=directory) as kept:
            try:
                shutil.copyfileobj(stream, kept)
                kept.flush()
            except OSError as error:
                raise Unavailable(
                    "node", f"what the job reads cannot be kept: {reason_of(error)}"
                ) from error
            yield kept
    else:
        yield None


def _exit_of(word: str) -> ExitStatus | None:
    """``code=N`` or ``signal=N``."""
    name, _, number = word.partition("=")
    try:
        if name == "signal" and int(number) not in ENDING:
            return None
        return ExitStatus.model_validate({name: int(number), "channel": ExitChannel.ENDPOINT})
    except ValueError:
        return None


@dataclass(frozen=True)
class _Sender:
    """The job's directory on its way to the agent."""

    connection: socket.socket

    def write(self, data: bytes) -> int:
        for part in protocol.parts(Channel.TREE, data):
            protocol.send(self.connection, part)
        return len(data)


def _quote(word: bytes) -> bytes:
    return b"'" + word.replace(b"'", b"'\\''") + b"'"


def _empty(stream: int) -> None:
    """Forget what an earlier beginning printed, where that went to a file."""
    if stat.S_ISREG(os.fstat(stream).st_mode):
        os.ftruncate(stream, 0)
        os.lseek(stream, 0, os.SEEK_SET)


def _write(stream: int, data: bytes) -> None:
    while data:
        data = data[os.write(stream, data) :]
