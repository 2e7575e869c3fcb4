"""Jobs of HTCondor that come with all they need over the agent's socket, not from the repository.

Such a job becomes an ordinary script job: the script is ``unchanged.sh``, its inputs are what was
handed over, its outputs go back the same way. So it takes the same steps as any other, and is undone
like any.

Everything of it lies in one directory, which goes with the connection; what a ``kill -9`` leaves of it
is removed before the next agent takes jobs (:func:`clear`).
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

from vmjobs.agent import framing, protocol
from vmjobs.agent.entrance import Entrance
from vmjobs.agent.framing import Channel, DataMessage
from vmjobs.agent.kept import Beginning, KeptJob
from vmjobs.agent.outputs import rejected_entry
from vmjobs.agent.protocol import HandMessage, Peer
from vmjobs.agent.verdict import NO_ROOM
from vmjobs.errors import InvalidRequest, PayloadTooLarge, StorageFull, reason_of
from vmjobs.local import LocalJob, describe_inputs
from vmjobs.model import MIB, JobSpec, RejectedEntry, Report, Strategy, StreamName
from vmjobs.tar_guard import MAX_REJECTED

#: What is handed over, and its name as an input of the script; in any order, each to its end.
_INPUTS = {Channel.START: "start", Channel.INPUT: "input", Channel.TREE: "tree.tar"}
_NEEDED = frozenset({Channel.START, Channel.TREE})
#: Another input, of ours.
_DOOR = "door"
#: What there is to run in its machine.
_INSIDE = Path(__file__).with_name("inside")
_SCRIPT = _INSIDE / "unchanged.sh"
_PROGRAMS = {name: _INSIDE / name for name in ("visit.sh", "condor_chirp.sh", "links.sh")}
#: What goes back at the end.
_OUTPUTS = {Channel.LEFT: "left", Channel.CHANGED: "changed.tar"}
_ENDED = "ended"
#: Bytes of what it says of things that cannot go back.
_MAX_REJECTED = 64 * 1024
_STREAMS = {StreamName.OUT: Channel.OUT, StreamName.ERR: Channel.ERR}
#: Seconds a job may run: HTCondor says when it has to stop.
_RUN_SECONDS = 30 * 86400


@dataclass(frozen=True)
class _Sink:
    """A stream of the job's on its way to whoever handed it over."""

    channel: Channel
    send: Callable[[protocol.Message], None]

    def write(self, data: bytes) -> None:
        for part in framing.parts(self.channel, data):
            self.send(part)

    def flush(self) -> None:
        """Nothing is kept back."""


@dataclass
class HandedJob:
    """A job that was handed over, below ``directory``.

    name: of the job on this node. owner, group: ids of who handed it over.
    """

    message: HandMessage
    name: str
    owner: int
    group: int
    directory: Path
    files: dict[str, Path] = field(default_factory=dict)

    def take(self, messages: Iterator[protocol.Message]) -> None:
        """Receive the job's files.

        Raises:
            InvalidRequest: something else came, or not all of them.
            PayloadTooLarge: they do not fit on the job's disk.
        """
        left, missing = self.message.disk * MIB, set(_NEEDED)
        sinks: dict[Channel, IO[bytes]] = {}
        try:
            while missing:
                piece = next(messages, None)
                if not isinstance(piece, DataMessage) or piece.channel not in _INPUTS:
                    raise InvalidRequest("the job was not handed over to its end")
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
        self, beginning: Beginning, send: Callable[[protocol.Message], None], entrance: Entrance
    ) -> LocalJob:
        """The job as the steps of a run want it; what it prints is sent on.

        entrance: the doors that there are.
        """
        if entrance.key:
            # Not an argument of the script: whoever is in the guest can list those of all processes.
            self.files[_DOOR] = self.directory / _DOOR
            self.files[_DOOR].write_text(f"{entrance.key}\n", "ascii")
        outputs = self.directory / "outputs"
        outputs.mkdir()
        make: Callable[..., LocalJob] = LocalJob
        if (shelf := beginning.shelf) is not None:
            making = beginning.making(entrance.token)
            make = partial(KeptJob, shelf=shelf, making=making, found=beginning.found)
        return make(
            job_id=self.name,
            spec=self._spec(beginning.message, entrance.chirp),
            image_digest=beginning.image,
            files=self.files | _PROGRAMS,
            output_directory=outputs,
            on_report=_nobody,
            sinks={name: _Sink(channel, send) for name, channel in _STREAMS.items()},
        )

    def ended(self) -> str:
        """What the script said of the job's end: ``code=N`` or ``signal=N``, with ``starved`` behind it
        if there was no memory left; or ``refused SENTENCE``.
        """
        try:
            with (self.directory / "outputs" / _ENDED).open("rb") as file:
                return file.readline(512).decode("utf-8", "replace").strip()
        except FileNotFoundError:
            return ""

    def rejected(self) -> tuple[RejectedEntry, ...]:
        """What the script said cannot go back: below that, a name and a reason each, with NULs."""
        try:
            with (self.directory / "outputs" / _ENDED).open("rb") as file:
                file.readline(512)
                words = file.read(_MAX_REJECTED).decode("utf-8", "surrogateescape").split("\0")[:-1]
        except FileNotFoundError:
            return ()
        pairs = zip(words[::2], words[1::2], strict=False)
        return tuple(rejected_entry(name, why) for name, why in islice(pairs, MAX_REJECTED))

    def send_back(self, send: Callable[[protocol.Message], None]) -> None:
        """Send what the job left. Does nothing where it has not come that far."""
        for channel, name in _OUTPUTS.items():
            path = self.directory / "outputs" / name
            if path.exists():
                with path.open("rb") as file:
                    for piece in framing.pieces(channel, file):
                        send(piece)

    def _spec(self, said: HandMessage, chirp: str) -> JobSpec:
        arguments = (said.user, self.owner, said.group, self.group, said.directory, chirp)
        return JobSpec(
            strategy=Strategy.SCRIPT,
            image=said.image,
            script=_SCRIPT.read_text("utf-8"),
            arguments=tuple(map(str, arguments)),
            inputs=describe_inputs(self.files | _PROGRAMS),
            outputs=(_ENDED, *_OUTPUTS.values()),
            cpus=said.cpus,
            memory=said.memory,
            # Once for the job's directory, and once for the stream of what has changed there.
            disk=2 * said.disk,
            hypervisor=said.hypervisor,
            network=said.network,
            boot_seconds=said.boot_seconds,
            run_seconds=_RUN_SECONDS,
            checkpoint=said.checkpoint,
        )


@contextmanager
def handed(
    message: HandMessage, name: str, peer: Peer, spool: Path, messages: Iterator[protocol.Message]
) -> Iterator[HandedJob]:
    """A job as it comes in, while the context lasts. name: for it on this node. peer: who brings it.

    Raises:
        InvalidRequest, PayloadTooLarge: see :meth:`HandedJob.take`; root hands over no jobs.
        StorageFull: this node has no room for the job's disk.
    """
    if peer.uid == 0:
        raise InvalidRequest("a job of HTCondor's never runs as root, so root has none to hand over")
    directory = spool / uuid.uuid4().hex
    directory.mkdir(parents=True, mode=0o700)
    if (free := shutil.disk_usage(spool).free) < message.disk * MIB:
        directory.rmdir()
        raise StorageFull(
            f"the job's disk of {message.disk} MiB is more than the {free // MIB} left here"
        )
    try:
        job = HandedJob(message, name, peer.uid, peer.gid, directory)
        try:
            job.take(messages)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise StorageFull(
                f"this node has no room for the job's files: {reason_of(error)}"
            ) from error
        yield job
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def clear(spool: Path) -> None:
    """Remove what an agent that was killed has left."""
    shutil.rmtree(spool, ignore_errors=True)


def _nobody(_report: Report) -> None:
    """There is no repository to tell."""
