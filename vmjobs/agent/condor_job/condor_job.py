"""Transparent jobs, which arrive on the agent's socket with all their files.

Each becomes an ordinary script job. Its script is ``unchanged.sh``, its inputs are the files that were
sent, and its outputs are sent back over the same connection. So it takes the steps of any other run.

Its files lie in one directory, which is removed when the connection ends. A killed agent leaves the
directory; the next agent removes it at its start (:func:`remove_leftovers`).
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

from vmjobs.agent import framing, protocol
from vmjobs.agent.condor_job.checkpoints import CheckpointedJob, StartPoint
from vmjobs.agent.condor_job.job_access import JobAccess
from vmjobs.agent.framing import Channel, DataMessage
from vmjobs.agent.protocol import PeerCredentials, SubmitMessage
from vmjobs.agent.run.outputs import rejected_entry
from vmjobs.errors import DISK_FULL_ERRNOS, InvalidRequest, PayloadTooLarge, StorageFull, reason_of
from vmjobs.local import LocalJob, describe_inputs
from vmjobs.model import MIB, JobSpec, RejectedEntry, Strategy, StreamName
from vmjobs.tar_guard import MAX_REJECTED

#: Files that are sent, and their names as inputs of the script. They come in any order.
_INPUTS = {Channel.START: "start", Channel.INPUT: "input", Channel.TREE: "tree.tar"}
_REQUIRED = frozenset({Channel.START, Channel.TREE})
#: Another input, written by the agent: address, port and token of the SSH relay.
_RELAY_INPUT = "ssh_relay"
#: Programs that run in the VM.
_INSIDE = Path(__file__).with_name("inside")
_SCRIPT = _INSIDE / "unchanged.sh"
_PROGRAMS = {name: _INSIDE / name for name in ("ssh_session.sh", "condor_chirp.sh", "links.sh")}
#: Outputs that are sent back at the end.
_OUTPUTS = {Channel.LEFT: "left", Channel.CHANGED: "changed.tar"}
_OUTCOME_OUTPUT = "ended"
#: Most bytes of the list of files that cannot be sent back.
_MAX_REJECTED = 64 * 1024
_STREAMS = {StreamName.OUT: Channel.OUT, StreamName.ERR: Channel.ERR}
#: The longest run time in seconds; HTCondor's own limits stop a job earlier.
_RUN_SECONDS = 30 * 86400


@dataclass(frozen=True)
class _Sink:
    """Sends a stream of the job to the client."""

    channel: Channel
    send: Callable[[protocol.Message], None]

    def write(self, data: bytes) -> None:
        for part in framing.split_bytes(self.channel, data):
            self.send(part)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


@dataclass
class CondorJob:
    """A transparent job whose files are below ``directory``.

    name: of the job on this node. owner, group: user and group id of the client.
    """

    message: SubmitMessage
    name: str
    owner: int
    group: int
    directory: Path
    files: dict[str, Path] = field(default_factory=dict)

    def receive(self, messages: Iterator[protocol.Message]) -> None:
        """Receive the job's files.

        Raises:
            InvalidRequest: another message came, or a file is missing or incomplete.
            PayloadTooLarge: the files do not fit on the job's disk.
        """
        left, missing = self.message.disk * MIB, set(_REQUIRED)
        sinks: dict[Channel, IO[bytes]] = {}
        try:
            while missing:
                piece = next(messages, None)
                if not isinstance(piece, DataMessage) or piece.channel not in _INPUTS:
                    raise InvalidRequest("the job's files arrived incomplete")
                left -= len(piece.data)
                if left < 0:
                    raise PayloadTooLarge(
                        f"the job's files need more than its disk of {self.message.disk} MiB",
                        hint="ask for more with request_disk",
                    )
                if piece.channel not in sinks:
                    name = _INPUTS[piece.channel]
                    self.files[name] = self.directory / name
                    sinks[piece.channel] = self.files[name].open("xb")
                sinks[piece.channel].write(piece.data)
                if piece.last:
                    missing.discard(piece.channel)
        finally:
            for sink in sinks.values():
                sink.close()

    def source(
        self, start_point: StartPoint, send: Callable[[protocol.Message], None], job_access: JobAccess
    ) -> LocalJob:
        """Return the job as a run takes it; its output is sent to the client.

        access: interactive sessions and Chirp of its VM.
        """
        if job_access.relay_parameters:
            # A file, because every process in the guest can list a script's arguments.
            self.files[_RELAY_INPUT] = self.directory / _RELAY_INPUT
            self.files[_RELAY_INPUT].write_text(f"{job_access.relay_parameters}\n", "ascii")
        outputs = self.directory / "outputs"
        outputs.mkdir()
        make: Callable[..., LocalJob] = LocalJob
        if (store := start_point.store) is not None:
            vm_spec = start_point.vm_spec(job_access.token)
            make = partial(CheckpointedJob, store=store, vm_spec=vm_spec, found=start_point.found)
        return make(
            job_id=self.name,
            spec=self._spec(start_point.message, job_access.chirp),
            image_digest=start_point.image,
            files=self.files | _PROGRAMS,
            output_directory=outputs,
            on_report=lambda _report: None,  # there is no repository
            sinks={name: _Sink(channel, send) for name, channel in _STREAMS.items()},
        )

    def ended(self) -> str:
        """Return how the job ended, as its script reports it.

        ``code=N`` or ``signal=N``, and ``starved`` if the guest ran out of memory; or ``refused WHY``.
        """
        return self._read_outcome()[0].decode("utf-8", "replace").strip()

    def rejected(self) -> tuple[RejectedEntry, ...]:
        """Return the files that cannot be sent back."""
        words = self._read_outcome()[1].decode("utf-8", "surrogateescape").split("\0")[:-1]
        pairs = zip(words[::2], words[1::2], strict=False)
        return tuple(rejected_entry(name, why) for name, why in islice(pairs, MAX_REJECTED))

    def _read_outcome(self) -> tuple[bytes, bytes]:
        """Return how the job ended, and the files that cannot be sent back; empty: there is no outcome.

        Each of these files has a name and a reason, both terminated by NULs.
        """
        path = self.directory / "outputs" / _OUTCOME_OUTPUT
        with suppress(FileNotFoundError), path.open("rb") as file:
            return file.readline(512), file.read(_MAX_REJECTED)
        return b"", b""

    def send_outputs(self, send: Callable[[protocol.Message], None]) -> None:
        """Send the job's output files to the client, if they exist yet."""
        for channel, name in _OUTPUTS.items():
            path = self.directory / "outputs" / name
            if path.exists():
                with path.open("rb") as file:
                    for piece in framing.split_file(channel, file):
                        send(piece)

    def _spec(self, message: SubmitMessage, chirp: str) -> JobSpec:
        arguments = (message.user, self.owner, message.group, self.group, message.directory, chirp)
        return JobSpec(
            strategy=Strategy.SCRIPT,
            image=message.image,
            script=_SCRIPT.read_text("utf-8"),
            arguments=tuple(map(str, arguments)),
            inputs=describe_inputs(self.files | _PROGRAMS),
            outputs=(_OUTCOME_OUTPUT, *_OUTPUTS.values()),
            cpus=message.cpus,
            memory=message.memory,
            # Once for the job's directory, and once for the tar of the changed files.
            disk=2 * message.disk,
            hypervisor=message.hypervisor,
            network=message.network,
            boot_seconds=message.boot_seconds,
            run_seconds=_RUN_SECONDS,
            checkpoint=message.checkpoint,
        )


@contextmanager
def receive_job(
    message: SubmitMessage,
    name: str,
    peer: PeerCredentials,
    spool: Path,
    messages: Iterator[protocol.Message],
) -> Iterator[CondorJob]:
    """Receive a transparent job; its files exist while the context lasts.

    name: of the job on this node. peer: the client.

    Raises:
        InvalidRequest, PayloadTooLarge: see :meth:`CondorJob.receive`; or the client is root.
        StorageFull: this node has no room for the job's disk.
    """
    if peer.uid == 0:
        raise InvalidRequest("root cannot start a job: HTCondor runs no job as root")
    directory = spool / uuid.uuid4().hex
    directory.mkdir(parents=True, mode=0o700)
    if (free := shutil.disk_usage(spool).free) < message.disk * MIB:
        directory.rmdir()
        raise StorageFull(
            f"the job's disk needs {message.disk} MiB, and this node has {free // MIB} MiB free"
        )
    try:
        job = CondorJob(message, name, peer.uid, peer.gid, directory)
        try:
            job.receive(messages)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            raise StorageFull(
                f"this node has no room for the job's files: {reason_of(error)}"
            ) from error
        yield job
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_leftovers(spool: Path) -> None:
    shutil.rmtree(spool, ignore_errors=True)
