"""The submit side's batch system: HTCondor."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from condor import names
from condor.daemon_client import Ad
from condor.events.event_log import EventLogs
from condor.events.job_status import PROJECTION, observe
from condor.submit.description import JobProgram, array_dir, checked_id, describe, job_dir
from condor.submit.schedd import Schedd
from vmjobs.batch import BatchJob, BatchStatus, Observation
from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.file_lock import file_lock
from vmjobs.model import CondorRef, JobAction

#: The longest list of ids in a query of the queue: the schedd evaluates long lists slowly.
MAX_LISTED_IDS: Final = 100
#: Ids in one query of the history.
IDS_PER_HISTORY_QUERY: Final = 500
#: Files that are flushed at the same time.
MAX_PARALLEL_SYNCS: Final = 32


class CondorScheduler:
    """Implements :class:`repository.jobs.dispatcher.Scheduler`.

    Job directories and event logs are on a volume that this process and the schedd's host share
    under the same path; both use it as the same user.

    program: the program that the execute node runs for a job.
    timeout: seconds for each exchange with the schedd.
    """

    def __init__(
        self, config: Config, *, program: JobProgram | None = None, timeout: float = 60.0
    ) -> None:
        self._config = config
        self._program = program or JobProgram()
        self._name = config.schedd_name or socket.getfqdn()
        self._timeout = timeout
        self._schedd = Schedd(config.schedd_name, config.schedd_pool, timeout)
        self._logs = EventLogs(lambda array: array_dir(config, array) / names.EVENT_LOG, self._name)

    def submit(self, jobs: Sequence[BatchJob]) -> dict[str, CondorRef]:
        """Queue jobs of any arrays together.

        A marker in an array's directory shows that its submission has begun. The schedd is queried for
        an array's jobs only if there is one: after a crash or a repeated call.
        """
        if not jobs:
            return {}
        describe(jobs, self._config, self._program)  # refuses before anything is written
        spool = self._config.spool_dir
        try:
            spool.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Over all workers: the condor_submit of one that has died holds it, too.
            busy = Unavailable("schedd", "an earlier submission is still running")
            with file_lock(spool / names.LOCK, busy, self._timeout) as lock:
                return self._submit_once(jobs, lock)
        except OSError as error:
            message = f"cannot prepare spool directory {spool}: {error.strerror or error}"
            raise Unavailable("schedd", message, hint="look at spool_dir and its owner") from error

    def _submit_once(self, jobs: Sequence[BatchJob], lock: int) -> dict[str, CondorRef]:
        directories = {job.array: array_dir(self._config, job.array) for job in jobs}
        begun = [array for array, path in directories.items() if (path / names.SUBMIT_MARKER).exists()]
        known = self._find_observations([job.id for job in jobs if job.array in begun])
        refs = {job_id: observation.ref for job_id, observation in known.items()}
        left = [job for job in jobs if job.id not in refs]
        if not left:
            return refs
        self._prepare(left, directories.values())
        for submission in describe(left, self._config, self._program):
            cluster = self._schedd.submit(submission, [lock])
            for proc, item in enumerate(submission.items):
                refs[item["vmjobs_id"]] = CondorRef(schedd=self._name, cluster=cluster, proc=proc)
        return refs

    def _prepare(self, jobs: Sequence[BatchJob], arrays: Collection[Path]) -> None:
        """Write tokens into their jobs' directories, then the markers, and sync them to disk."""
        tokens = [job_dir(self._config, job.array, job.id) / names.TOKEN for job in jobs]
        for directory in [*arrays, *(token.parent for token in tokens)]:
            directory.mkdir(mode=0o700, exist_ok=True)
        for job, token in zip(jobs, tokens, strict=True):
            _write(token, job.token.encode())
        _sync_all([*tokens, *(token.parent for token in tokens)])
        for array in arrays:
            (array / names.SUBMIT_MARKER).touch(mode=0o600)
        _sync_all([*arrays, self._config.spool_dir])

    def act(self, action: JobAction, refs: Sequence[CondorRef], why: str) -> None:
        if ids := [f"{ref.cluster}.{ref.proc}" for ref in refs if ref.cluster > 0]:
            self._schedd.act(action, ids, " ".join(why.split())[:512])

    def watch(self, arrays: Sequence[str]) -> list[Observation]:
        return self._logs.latest(arrays)

    def query(self, job_ids: Sequence[str]) -> list[Observation]:
        """A job in neither queue nor history is ``MISSING``, with cluster 0."""
        known = self._find_observations(job_ids)
        nowhere = CondorRef(schedd=self._name, cluster=0, proc=0)
        return [
            known.get(job_id) or Observation(job_id, BatchStatus.MISSING, nowhere)
            for job_id in dict.fromkeys(job_ids)
        ]

    def _find_observations(self, job_ids: Sequence[str]) -> dict[str, Observation]:
        """Observations from the schedd's queue, in one query, and for other jobs from its history."""
        wanted = list(dict.fromkeys(job_ids))
        if not wanted:
            return {}
        some = _constraint(wanted) if len(wanted) <= MAX_LISTED_IDS else f"{names.JOB_ID} =!= undefined"
        queue = self._observed(self._schedd.query(some, PROJECTION), in_queue=True)
        found = {job_id: queue[job_id] for job_id in wanted if job_id in queue}
        left = [job_id for job_id in wanted if job_id not in found]
        for first in range(0, len(left), IDS_PER_HISTORY_QUERY):
            chunk = left[first : first + IDS_PER_HISTORY_QUERY]
            ads = self._schedd.history(_constraint(chunk), PROJECTION, len(chunk))
            found |= self._observed(ads, in_queue=False)
        return found

    def _observed(self, ads: Sequence[Ad], *, in_queue: bool) -> Mapping[str, Observation]:
        seen = (observe(ad, self._name, in_queue=in_queue) for ad in ads)
        ordered = sorted(seen, key=lambda o: (o.ref.cluster, o.ref.proc))
        return {observation.job_id: observation for observation in ordered}

    def forget(self, array: str) -> None:
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


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically, readable only by its owner."""
    temporary = path.with_name(path.name + ".new")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    temporary.replace(path)


def _sync_all(paths: Sequence[Path]) -> None:
    """Sync files and directories to disk, in parallel, so that the journal merges the writes."""
    with ThreadPoolExecutor(max_workers=min(len(paths), MAX_PARALLEL_SYNCS)) as pool:
        list(pool.map(_sync, paths))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
