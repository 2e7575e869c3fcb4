"""Runs on the node in place of a transparent job, and has the agent run the job in a VM.

It sends the job's directory to the agent (:mod:`vmjobs.agent.protocol`), writes the job's output, and
applies the job's changes to its directory. It has only the job's rights.

If an agent loses the job, the job restarts from the same directory, which is unchanged until then:
changes are applied only after all of them have arrived.

One process runs beside each job of a node for the job's whole life, so this imports no module that
loads slowly.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import stat
import tempfile
import threading
from contextlib import contextmanager, suppress

from vmjobs import job_directory
from vmjobs.agent import framing
from vmjobs.agent.framing import Channel, DataMessage
from vmjobs.errors import InvalidRequest, Unavailable, VMJobsError, reason_of
from vmjobs.lease import RetryLater, SignalForwarder, retry_until
from vmjobs.states import JobState, ReasonCode
from vmjobs.tar_guard import escape_name
from vmjobs.transparent_job import IMAGE_UNSUITABLE, Exit, RunResult

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping
    from typing import IO, Any

    from vmjobs.agent.condor_job.stream_multiplexer import StreamMultiplexer
    from vmjobs.transparent_job import TransparentJob

    #: Takes a ``progress`` or ``end`` message of the agent (:mod:`vmjobs.agent.protocol`).
    OnProgress = Callable[[Mapping[str, Any]], None]

#: Maximum number of starts of a job on one node, if each run is lost without a reason.
MAX_STARTS = 3
#: The starter's files in a job's directory, which it has open.
STARTER_FILES = frozenset({"_condor_stdout", "_condor_stderr"})
#: Files that the guest must not change, because the starter or HTCondor's tools still use them.
PROTECTED_FILES = STARTER_FILES | {".chirp.config", ".job.ad", ".machine.ad"}
#: Limit on the bytes of all names in the directory that a job leaves.
MAX_NAMES_BYTES = 64 * 1024 * 1024
#: Signals that terminate a process by default (signal(7)).
FATAL_SIGNALS = frozenset({*range(1, 17), *range(24, 28), 29, 30, 31, *range(34, 65)})

STDIN, OUT, ERR = 0, 1, 2


def run_transparent_job(
    path: str,
    job: TransparentJob,
    on_progress: OnProgress,
    patience: float = 120.0,
) -> RunResult:
    """Have the agent run a job; the job's directory has its changes when this returns.

    path: the agent's socket.
    patience: seconds to wait for an agent that is absent or cannot run the job now.

    Raises:
        Unavailable: no agent within that time, agents lost the job repeatedly, or this node cannot
            read the job's directory or store the job's output.
        InvalidRequest: the files that the job left are unreadable.
    """
    starts = 0

    def exchange(connection: socket.socket, on_activity: Callable[[], None]) -> RunResult | None:
        nonlocal starts
        job_connection = _JobConnection(connection, job, read, on_progress, on_activity, signals)
        ended = job_connection.run()
        starts += job_connection.has_started
        if ended is None and starts >= MAX_STARTS:
            raise Unavailable("agent", f"the agent at {path} lost the job {starts} times")
        if ended is None and job_connection.refusal:
            raise RetryLater(job_connection.refusal)
        return ended

    # A signal while this reads a streamed standard input ends this process, as it would end the job.
    with _standard_input(job.directory) as read, SignalForwarder() as signals:
        try:
            return retry_until(path, exchange, signals, patience) or RunResult(stopped=signals.stopping)
        except VMJobsError:
            if signals.stopping:  # the job is stopped in any case; the error is not its result
                return RunResult(stopped=signals.stopping)
            raise


class _JobConnection:
    """One connection to the agent for a job.

    read: the job's standard input. has_started: the agent started the job; output may have arrived.
    refusal: why the agent cannot run the job now.
    """

    def __init__(
        self,
        connection: socket.socket,
        job: TransparentJob,
        read: IO[bytes] | None,
        on_progress: OnProgress,
        on_activity: Callable[[], None],
        signals: SignalForwarder,
    ) -> None:
        self.connection = connection
        self.job = job
        self.read = read
        self.on_progress = on_progress
        self.on_activity = on_activity
        self.signals = signals
        self.has_started = False
        self.refusal = ""
        self._chirps: StreamMultiplexer | None = None
        # Reentrant, because a second signal may arrive while the first one is forwarded.
        self._sending = threading.RLock()

    def run(self) -> RunResult | None:
        """Submit the job and follow it to its end; None: ask the agent again."""
        left = bytearray()
        with tempfile.TemporaryFile(dir=self.job.directory) as changed:
            try:
                sent = self._submit()
                with self.signals.forwarded_to(self._forward):
                    last = self._receive(left, changed)
            except (ConnectionError, InvalidRequest):
                return None
            finally:
                if self._chirps is not None:
                    self._chirps.close()
            if last is None or isinstance(last, RunResult):
                return last
            ended = self._finish(last, sent, left, changed)
            if ended is not None and self._is_final(ended):
                with suppress(OSError):  # the job has ended in any case
                    self._send_message({"type": "taken"})
            return ended

    def _is_final(self, ended: RunResult) -> bool:
        """Whether the job has ended for good; a job that was told to stop has not."""
        if ended.stopped or not self.job.is_checkpointed:
            return False
        return self.job.report_job_end(ended) and not self.signals.stopping

    def _submit(self) -> frozenset[str]:
        """Send the job; returns the names in its directory.

        An agent that closes the connection has sent the reason before.
        """
        try:
            return self._send()
        except ConnectionError:
            return frozenset()
        except OSError as error:
            raise Unavailable("node", f"cannot read the job's directory: {reason_of(error)}") from error

    def _send(self) -> frozenset[str]:
        framing.send(self.connection, self.job.message)
        self._send_all(Channel.START, io.BytesIO(self.job.start))
        if self.read is not None:
            self.read.seek(0)
            self._send_all(Channel.INPUT, self.read)
        sink: Any = _TreeSender(self.connection)
        sent = job_directory.pack(self.job.directory, sink, STARTER_FILES)
        framing.send(self.connection, DataMessage(Channel.TREE, last=True))
        _truncate(OUT)
        _truncate(ERR)
        return sent

    def _send_all(self, channel: Channel, source: IO[bytes]) -> None:
        for piece in framing.split_file(channel, source):
            framing.send(self.connection, piece)

    def _forward(self, number: int) -> None:
        self._send_message({"type": "signal", "number": number})

    def _send_message(self, message: DataMessage | Mapping[str, Any]) -> None:
        """Send from any thread. The main thread sends only signals by this."""
        with self._sending:
            framing.send(self.connection, message)

    def _receive(self, left: bytearray, changed: IO[bytes]) -> Mapping[str, Any] | RunResult | None:
        """Receive messages; returns the ``end`` message, or the end of a refused job."""
        for message in framing.receive(self.connection):
            if isinstance(message, DataMessage) and message.channel is Channel.CHIRP:
                self._handle_chirp(message)
            elif isinstance(message, DataMessage):
                self._handle_data(message, left, changed)
            elif message.get("type") == "progress":
                self.has_started = True
                self.on_activity()
                self.on_progress(message)
            elif message.get("type") == "end":
                self.on_progress(message)
                return message
            elif message.get("type") == "error":
                self.refusal = self.job.explain_refusal(message)
                return (
                    None if message.get("retry") else RunResult(code=message["code"], why=self.refusal)
                )
        return None

    def _handle_data(self, message: DataMessage, left: bytearray, changed: IO[bytes]) -> None:
        with _as_node_failure("store the output of the job"):
            if message.channel is Channel.OUT:
                _write(OUT, message.data)
            elif message.channel is Channel.ERR:
                _write(ERR, message.data)
            elif message.channel is Channel.LEFT and len(left) < MAX_NAMES_BYTES:
                left += message.data
            elif message.channel is Channel.CHANGED:
                changed.write(message.data)

    def _handle_chirp(self, message: DataMessage) -> None:
        """Handle a message of a Chirp connection. Few jobs need Chirp: imports it late."""
        if self._chirps is None:
            from vmjobs.agent.condor_job.stream_multiplexer import StreamMultiplexer  # noqa: PLC0415

            self._chirps = StreamMultiplexer(Channel.CHIRP, self._send_message, self.job.chirp)
        self._chirps.take(message)

    def _finish(
        self, message: Mapping[str, Any], sent: frozenset[str], left: bytearray, changed: IO[bytes]
    ) -> RunResult | None:
        report = message["report"]
        state, code = report["state"], report["reason"]["code"]
        why = report["reason"].get("message", "")
        kind, _, rest = message.get("ended", "").partition(" ")
        exit = _parse_exit(kind) if len(left) < MAX_NAMES_BYTES else None
        if self.signals.stopping and (state != JobState.COMPLETED or exit is None):
            return RunResult(code=code, why=why, stopped=self.signals.stopping)
        if state == JobState.PREEMPTED and code != ReasonCode.NOT_RESUMED:
            return None
        if state != JobState.COMPLETED:
            return RunResult(code=code, why=why)
        if kind == "refused":
            return RunResult(code=IMAGE_UNSUITABLE, why=rest)
        if exit is None:
            why = "the guest did not report how the job ended, or reported too many file names"
            return RunResult(code=ReasonCode.NO_EXIT_REPORT.value, why=why)
        with _as_node_failure("write the files that the job left"):
            refused = self._apply_changes(sent, left, changed)
        reported = [(entry["path"], entry["why"]) for entry in report.get("rejected", ())]
        rejected = reported + [(escape_name(name), why) for name, why in refused.items()]
        return RunResult(
            exit=exit,
            stopped=self.signals.stopping,
            is_out_of_memory=rest == "starved",
            rejected=rejected,
        )

    def _apply_changes(
        self, sent: frozenset[str], left: bytearray, changed: IO[bytes]
    ) -> dict[str, str]:
        """Apply the job's changes to its directory; returns refused entries and why."""
        changed.seek(0)
        directory = self.job.directory
        refused = job_directory.unpack(changed, directory, PROTECTED_FILES)
        names = bytes(left).split(b"\0")[:-1]
        there = {name.decode("utf-8", "surrogateescape").removeprefix("./") for name in names}
        job_directory.remove(directory, sent - there - PROTECTED_FILES)
        if self.job.is_checkpointed:
            there &= sent  # unchanged files that another node sent may be missing on this one
        missing = [
            name
            for name in sorted(there - PROTECTED_FILES - refused.keys())
            if not os.path.lexists(os.path.join(directory, name))
        ]
        if missing:
            raise FileNotFoundError(f"{missing[0]} and {len(missing) - 1} others are missing")
        return refused


@contextmanager
def _as_node_failure(action: str) -> Iterator[None]:
    """Raise an OSError, of a full disk for example, as a failure of this node to do ``action``."""
    try:
        yield
    except OSError as error:
        raise Unavailable("node", f"cannot {action}: {reason_of(error)}") from error


@contextmanager
def _standard_input(directory: str) -> Iterator[IO[bytes] | None]:
    """Open the job's standard input; None: it has none.

    A streamed input (``stream_input``) is first copied to an unnamed file in the job's directory,
    because each start of the job reads it from the beginning.

    Raises:
        Unavailable: this node cannot store it.
    """
    kind = os.fstat(STDIN).st_mode
    if stat.S_ISREG(kind):
        with os.fdopen(os.dup(STDIN), "rb") as file:
            yield file
    elif stat.S_ISFIFO(kind):
        with os.fdopen(os.dup(STDIN), "rb") as stream, tempfile.TemporaryFile(dir=directory) as kept:
            with _as_node_failure("store the input of the job"):
                shutil.copyfileobj(stream, kept)
                kept.flush()
            yield kept
    else:
        yield None


def _parse_exit(word: str) -> Exit | None:
    """Parse ``code=N`` or ``signal=N``; None if it is neither."""
    name, _, digits = word.partition("=")
    if not re.fullmatch("[0-9]{1,3}", digits):
        return None
    number = int(digits)
    if name == "code" and number <= 255:
        return Exit(code=number)
    return Exit(signal=number) if name == "signal" and number in FATAL_SIGNALS else None


class _TreeSender:
    """A file that sends the tar stream of the job's directory to the agent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def write(self, data: bytes) -> int:
        for part in framing.split_bytes(Channel.TREE, data):
            framing.send(self.connection, part)
        return len(data)


def _truncate(stream: int) -> None:
    """Discard the output of an earlier start of the job, if it went to a file."""
    if stat.S_ISREG(os.fstat(stream).st_mode):
        os.ftruncate(stream, 0)
        os.lseek(stream, 0, os.SEEK_SET)


def _write(stream: int, data: bytes) -> None:
    while data:
        data = data[os.write(stream, data) :]
