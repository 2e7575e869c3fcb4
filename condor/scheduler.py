"""HTCondor as the batch system of the submit side."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from condor import names
from condor.call import Ad
from condor.eventlog import EventLogs
from condor.jobstatus import PROJECTION, observe
from condor.schedd import Schedd
from condor.submit import Program, array_dir, checked_id, describe, job_dir
from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.model import CondorRef
from vmjobs.ports import BatchJob, BatchStatus, Observation

#: Ids in one constraint, and in one removal.
CHUNK: Final = 500


class CondorScheduler:
    """Implements :class:`vmjobs.ports.Scheduler`.

    Job directories and event logs are on a volume that this process and the schedd's host share
    under the same path, both working on it as the same user.

    program: what the execute node runs for a job.
    timeout: seconds for each exchange with the schedd.
    """

    def __init__(
        self, config: Config, *, program: Program | None = None, timeout: float = 60.0
    ) -> None:
        self._config = config
        self._program = program or Program()
        self._name = config.schedd_name or socket.getfqdn()
        self._schedd = Schedd(config.schedd_name, config.schedd_pool, timeout)
        self._logs = EventLogs(lambda array: array_dir(config, array) / names.EVENT_LOG, self._name)

    def submit(self, jobs: Sequence[BatchJob]) -> dict[str, CondorRef]:
        """Queue jobs of one array; a job that is queued already is found, not queued twice.

        A marker on disk says that a submission was begun. Only where one is found, after a crash
        or a repeated call, is the schedd asked what it has of the array.
        """
        if not jobs:
            return {}
        describe(jobs, self._config, self._program)  # refuses before anything is written
        directory = array_dir(self._config, jobs[0].array)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(directory / names.LOCK):
                return self._submit_once(jobs, directory)
        except OSError as error:
            message = f"cannot prepare spool directory {directory}: {error.strerror or error}"
            raise Unavailable("schedd", message, hint="look at spool_dir and its owner") from error

    def _submit_once(self, jobs: Sequence[BatchJob], directory: Path) -> dict[str, CondorRef]:
        marker = directory / names.SUBMIT_MARKER
        found = self._known([job.id for job in jobs]) if marker.exists() else {}
        left = [job for job in jobs if job.id not in found]
        refs = {job_id: observation.ref for job_id, observation in found.items()}
        if not left:
            return refs
        self._write_tokens(left)
        _write(marker, b"")
        _flush([marker, directory])
        cluster, first = self._schedd.submit(describe(left, self._config, self._program))
        for proc, job in enumerate(left, first):
            refs[job.id] = CondorRef(schedd=self._name, cluster=cluster, proc=proc)
        return refs

    def _write_tokens(self, jobs: Sequence[BatchJob]) -> None:
        """Each job's token into the job's directory, all of them on disk when this returns.

        Written first and flushed afterwards: a file system flushes many files in little more
        time than one.
        """
        directories = [job_dir(self._config, job.array, job.id) for job in jobs]
        for job, directory in zip(jobs, directories, strict=True):
            directory.mkdir(mode=0o700, exist_ok=True)
            _write(directory / names.TOKEN, job.token.encode())
        _flush([directory / names.TOKEN for directory in directories])
        _flush(directories)

    def remove(self, refs: Sequence[CondorRef], why: str) -> None:
        """Remove jobs here and wherever they were forwarded to; unknown ones are no error."""
        ids = [f"{ref.cluster}.{ref.proc}" for ref in refs if ref.cluster > 0]
        sentence = " ".join(why.split())[:512]
        for chunk in _chunks(ids):
            self._schedd.remove(chunk, sentence)

    def watch(self, arrays: Sequence[str]) -> list[Observation]:
        """The latest word of the event logs of these arrays; costs no query to the schedd."""
        return self._logs.latest(arrays)

    def query(self, job_ids: Sequence[str]) -> list[Observation]:
        """Ask the schedd (queue, then history); one observation for each id.

        A job that neither knows is ``MISSING``, with cluster 0.
        """
        known = self._known(job_ids)
        nowhere = CondorRef(schedd=self._name, cluster=0, proc=0)
        return [
            known.get(job_id) or Observation(job_id, BatchStatus.MISSING, nowhere)
            for job_id in dict.fromkeys(job_ids)
        ]

    def _known(self, job_ids: Sequence[str]) -> dict[str, Observation]:
        found: dict[str, Observation] = {}
        for chunk in _chunks(list(dict.fromkeys(job_ids))):
            ads = self._schedd.query(_constraint(chunk), PROJECTION)
            found |= self._observed(ads, in_queue=True)
            left = [job_id for job_id in chunk if job_id not in found]
            if left:
                ads = self._schedd.history(_constraint(left), PROJECTION, len(left))
                found |= self._observed(ads, in_queue=False)
        return found

    def _observed(self, ads: Sequence[Ad], *, in_queue: bool) -> Mapping[str, Observation]:
        seen = (observe(ad, self._name, in_queue=in_queue) for ad in ads)
        ordered = sorted(seen, key=lambda o: (o.ref.cluster, o.ref.proc))
        return {observation.job_id: observation for observation in ordered}

    def forget(self, array: str) -> None:
        """Drop the array's spool directory: all of its jobs are final."""
        self._logs.forget(array)
        directory = array_dir(self._config, array)
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            return
        except OSError as error:
            message = f"cannot remove spool directory {directory}: {error.strerror or error}"
            raise Unavailable("schedd", message) from error


def _constraint(job_ids: Sequence[str]) -> str:
    listing = ",".join(checked_id(job_id) for job_id in job_ids)
    return f'stringListMember({names.JOB_ID}, "{listing}") =?= true'


def _chunks(items: Sequence[str]) -> Iterator[Sequence[str]]:
    return (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One submission of an array at a time, over all workers; freed when its holder dies."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, data: bytes) -> None:
    """A whole file or none, readable by its owner alone."""
    temporary = path.with_name(path.name + ".new")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    temporary.replace(path)


def _flush(paths: Sequence[Path]) -> None:
    """Files and directories to disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
