"""A job without a repository: files of this machine in, files and a terminal out.

This is what ``vmjobs run`` hands to the same agent code that serves a grid.
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
from vmjobs.paths import below
from vmjobs.ports import ContentReceiver, ContentSource
from vmjobs.terminal import ByteSink

CHUNK = 1024 * 1024


def describe_inputs(files: Mapping[str, Path]) -> tuple[InputFile, ...]:
    """Hash the input files of a job.

    Raises:
        InvalidSpec: with a fault for every file that cannot be read, or have the name that it is given.
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
    """A :class:`vmjobs.ports.JobSource` for one job of this machine.

    sinks: where streams go, by name; a stream without sink is dropped.
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
    _written: dict[StreamName, int] = field(default_factory=dict)
    _closed: set[StreamName] = field(default_factory=set)

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """There is nobody else: the job is ours."""
        return JobTicket(
            job_id=self.job_id,
            attempt=claim.attempt,
            index=0,
            count=1,
            image_digest=self.image_digest,
            spec=self.spec,
        )

    def end(self) -> Report:
        """A local job is run once."""
        raise Conflict("the job has not ended")

    def resume(self, attempt: str) -> None:
        """A local job ends with its process."""
        raise Conflict(f"attempt {attempt} ended with the process that ran it")

    def fetch_input(self, file: InputFile, sink: BinaryIO) -> None:
        """Copy the file."""
        with self.files[file.name].open("rb") as source:
            shutil.copyfileobj(source, sink, CHUNK)

    def report(self, report: Report) -> None:
        """Pass the report on."""
        self.final = report
        self.on_report(report)

    def append(self, stream: StreamName, offset: int, data: bytes) -> None:
        """Write what is new of a stream to its sink."""
        done = self._written.get(stream, 0)
        fresh = data[max(0, done - offset) :]
        self._written[stream] = done + len(fresh)
        sink = self.sinks.get(stream)
        if sink is None or stream in self._closed:
            return
        try:
            sink.write(fresh)
            sink.flush()
        except BrokenPipeError:
            self._closed.add(stream)  # whoever read it has had enough; the job goes on

    def open_upload(self, size: int) -> ContentReceiver:
        """There is nobody who would keep it."""
        raise Conflict(f"there is no repository for {size} bytes of a saved machine")

    def keep(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        """The same."""
        raise Conflict(f"there is no repository for {checkpoint.machine} ({upload.id})")

    def saved(self) -> ContentSource:
        """A local job is run once."""
        raise Conflict("the job was not saved")

    def put_output(self, path: str, source: BinaryIO, size: int) -> Output:
        """Write an output below the output directory: whole or not at all."""
        target = below(self.output_directory, path)
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
