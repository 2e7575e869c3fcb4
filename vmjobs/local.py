"""A job without a repository: local input and output files, streams to a terminal.

``vmjobs run`` passes it to the agent code that also runs grid jobs.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from vmjobs.errors import Conflict, Fault, InvalidSpec, reason_of
from vmjobs.file_transfer import ContentReceiver, ContentSource
from vmjobs.model import (
    AttemptClaim,
    Checkpoint,
    InputFile,
    JobSpec,
    JobTicket,
    Output,
    Report,
    StreamName,
    faults_of,
)
from vmjobs.paths import safe_join
from vmjobs.terminal import ByteSink

CHUNK = 1024 * 1024


def describe_inputs(files: Mapping[str, Path]) -> tuple[InputFile, ...]:
    """Hash the input files of a job.

    Raises:
        InvalidSpec: with a fault for every file that is unreadable or has an invalid name.
    """
    found, faults = [], []
    for name, path in files.items():
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()
        except OSError as error:
            why = f"{path}: {reason_of(error)}"
            faults.append(Fault(f"inputs.{name}", "missing_input", why))
            continue
        try:
            found.append(InputFile(name=name, digest=f"sha256:{digest}", size=size))
        except ValidationError as error:
            faults += [
                Fault(f"inputs.{name}", fault.code, f"{name!r}: {fault.message}")
                for fault in faults_of(error)
            ]
    if faults:
        listing = "; ".join(fault.message for fault in faults)
        raise InvalidSpec(f"cannot use the input files: {listing}", faults=faults)
    return tuple(found)


@dataclass
class LocalJob:
    """A :class:`vmjobs.agent.job_source.JobSource` for one local job.

    sinks: destinations of streams, by name; a stream without a sink is dropped.
    """

    job_id: str
    spec: JobSpec
    image_digest: str
    files: Mapping[str, Path]
    output_directory: Path
    on_report: Callable[[Report], None]
    sinks: Mapping[StreamName, ByteSink]
    outputs: list[Output] = field(default_factory=list)
    final: Report | None = None
    _written_bytes: dict[StreamName, int] = field(default_factory=dict)
    _closed_streams: set[StreamName] = field(default_factory=set)

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """Take the job: a local job has a single claimant."""
        return JobTicket(
            job_id=self.job_id,
            attempt=claim.attempt,
            index=0,
            count=1,
            image_digest=self.image_digest,
            spec=self.spec,
        )

    def end(self) -> Report:
        """Fail: a local job runs once."""
        raise Conflict("the job has not ended")

    def resume(self, attempt: str) -> None:
        """Fail: a local job ends with its process."""
        raise Conflict(f"attempt {attempt} ended with the process that ran it")

    def fetch_input(self, file: InputFile, sink: BinaryIO) -> None:
        with self.files[file.name].open("rb") as source:
            shutil.copyfileobj(source, sink, CHUNK)

    def report(self, report: Report) -> None:
        self.final = report
        self.on_report(report)

    def append(self, stream: StreamName, offset: int, data: bytes) -> None:
        """Write the new bytes of a stream to its sink."""
        done = self._written_bytes.get(stream, 0)
        fresh = data[max(0, done - offset) :]
        self._written_bytes[stream] = done + len(fresh)
        sink = self.sinks.get(stream)
        if sink is None or stream in self._closed_streams:
            return
        try:
            sink.write(fresh)
            sink.flush()
        except BrokenPipeError:
            self._closed_streams.add(stream)  # the reader has closed its end; the job goes on

    def open_upload(self, size: int) -> ContentReceiver:
        """Fail: a local job has no repository for checkpoints."""
        raise Conflict("a job without a repository has no checkpoints")

    def save_checkpoint(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        """Fail: see :meth:`open_upload`."""
        raise Conflict("a job without a repository has no checkpoints")

    def saved(self) -> ContentSource:
        """Fail: see :meth:`open_upload`."""
        raise Conflict("the job has no checkpoint")

    def put_output(self, path: str, source: BinaryIO, size: int) -> Output:
        """Write an output below the output directory, atomically."""
        target = safe_join(self.output_directory, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as sink:
                while chunk := source.read(min(CHUNK, size - sink.tell())):
                    digest.update(chunk)
                    sink.write(chunk)
                if sink.tell() != size:
                    raise OSError(errno.EIO, f"there are {sink.tell()} bytes of {size}", path)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        output = Output(path=path, size=size, digest=f"sha256:{digest.hexdigest()}")
        self.outputs.append(output)
        return output
