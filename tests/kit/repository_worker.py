"""A worker process whose scheduler is a directory: ``repository_worker.py CONFIG QUEUE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from repository.db.paging import PageRequest
from repository.jobs.dispatcher import DispatchContext
from repository.service import Repository, open_repository
from repository.tasks import make_celery, worker_arguments
from vmjobs.batch import BatchJob, BatchStatus, Observation
from vmjobs.cluster.pool import IdleJobs, PoolVm, ProbeState, WorkerVmProfile
from vmjobs.config import Config
from vmjobs.model import CondorRef, JobAction


class Directory:
    """One file for each queued job; a file whose name ends in ``removed`` is a removed job."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def submit(self, jobs: Sequence[BatchJob]) -> dict[str, CondorRef]:
        for job in jobs:
            (self._root / job.id).touch()
        return {job.id: self._ref(job.index) for job in jobs}

    def _ref(self, proc: int) -> CondorRef:
        return CondorRef(schedd="directory", cluster=1, proc=proc)

    def act(self, action: JobAction, refs: Sequence[CondorRef], why: str) -> None:
        for path in self._root.iterdir():
            path.rename(path.with_suffix(".removed"))

    def watch(self, arrays: Sequence[str]) -> list[Observation]:
        return [self._see(path.stem) for path in self._root.iterdir()]

    def query(self, job_ids: Sequence[str]) -> list[Observation]:
        return [self._see(job_id) for job_id in job_ids]

    def _see(self, job_id: str) -> Observation:
        if (self._root / job_id).exists():
            return Observation(job_id, BatchStatus.IDLE, self._ref(0))
        if (self._root / f"{job_id}.removed").exists():
            return Observation(job_id, BatchStatus.REMOVED, self._ref(0))
        return Observation(job_id, BatchStatus.MISSING, self._ref(0))

    def forget(self, array: str) -> None:
        (self._root / f"{array}.forgotten").touch()


class Eager:
    """A pool that every VM joins at once, and whose probe jobs run at once."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def vms(self) -> list[PoolVm]:
        return [
            PoolVm(member.name, member.incarnation, member.id)
            for cluster in self._repository.clusters.page(PageRequest())[0]
            for member in self._repository.clusters.get(cluster.name).members
        ]

    def probes(self, vms: Sequence[PoolVm]) -> dict[tuple[str, int], ProbeState]:
        return {(vm.id, vm.incarnation): ProbeState.RAN for vm in vms}

    def withdraw(self, vms: Sequence[PoolVm]) -> None:
        """Do nothing: this pool stores nothing."""

    def idle(self, kinds: Sequence[WorkerVmProfile]) -> dict[str, IdleJobs]:
        return {kind.cluster: IdleJobs() for kind in kinds}

    def offer(self, kinds: Sequence[WorkerVmProfile]) -> None:
        """Do nothing: this pool shows no offers."""


def main(file: str, queue: str) -> None:
    config = Config.model_validate(json.loads(Path(file).read_text()))

    def factory() -> DispatchContext:
        repository = open_repository(config, migrate=False)
        return DispatchContext(
            repository,
            Directory(Path(queue)),
            lambda *_: "token",
            pools={name: Eager(repository) for name in config.pools},
        )

    make_celery(config, factory).worker_main(worker_arguments(config))


if __name__ == "__main__":
    main(*sys.argv[1:])
