"""Handles one scheduler request in a grid container: JSON on stdin, JSON on stdout.

The tests copy it there together with the packages under test.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from condor.submit.description import JobProgram
from condor.submit.schedd import Schedd
from condor.submit.scheduler import CondorScheduler
from vmjobs.batch import BatchJob, BatchStatus, Observation
from vmjobs.config import Config
from vmjobs.errors import VMJobsError
from vmjobs.model import CondorRef, JobAction, JobSpec


def main() -> None:
    request = json.load(sys.stdin)
    config = Config(**request.pop("config"))
    program = JobProgram("/bin/sh", ("-c", request.pop("command", "true")))
    scheduler = CondorScheduler(config, program=program, timeout=request.pop("timeout", 90.0))
    started = time.monotonic()
    try:
        answer = VERBS[request.pop("verb")](scheduler, **request)
    except VMJobsError as error:
        service = getattr(error, "service", "")
        answer = {"error": type(error).__name__, "service": service, "message": error.message}
    json.dump({"answer": answer, "seconds": time.monotonic() - started}, sys.stdout)


def submit(
    scheduler: CondorScheduler, array: str, count: int, spec: dict[str, Any], die: str = ""
) -> Any:
    batch = [
        BatchJob(f"{array}-{i}", array, i, "alice", JobSpec.model_validate(spec), f"token-{i}")
        for i in range(count)
    ]
    if die:
        _die(die)
    return {job: ref.model_dump() for job, ref in scheduler.submit(batch).items()}


def _die(when: str) -> None:
    """Kill the process right before or right after the schedd accepts the jobs."""
    real = Schedd.submit

    def dying(self: Schedd, submission: Any, held: Any) -> int:
        if when == "after":
            real(self, submission, held)
        os._exit(9)

    Schedd.submit = dying  # type: ignore[assignment,method-assign]


def watch(scheduler: CondorScheduler, array: str, until: list[str], seconds: float = 300) -> Any:
    """Each job's observations in order, until all jobs have a status in ``until``."""
    seen: dict[str, list[Observation]] = {}
    deadline = time.monotonic() + seconds
    while True:
        for observation in scheduler.watch([array]):
            history = seen.setdefault(observation.job_id, [])
            if not history or history[-1] != observation:
                history.append(observation)
        if seen and all(history[-1].status in until for history in seen.values()):
            break
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return {job: [_plain(o) for o in history] for job, history in seen.items()}


def query(scheduler: CondorScheduler, job_ids: list[str]) -> Any:
    return [_plain(observation) for observation in scheduler.query(job_ids)]


def remove(scheduler: CondorScheduler, refs: list[dict[str, Any]], why: str) -> Any:
    scheduler.act(JobAction.CANCEL, [CondorRef.model_validate(ref) for ref in refs], why)
    return None


def forget(scheduler: CondorScheduler, array: str) -> Any:
    scheduler.forget(array)
    return None


def history(scheduler: CondorScheduler) -> Any:
    scheduler._schedd.history("true", ["ClusterId"], 1)


def read(scheduler: CondorScheduler, path: str) -> Any:
    return Path(scheduler._config.spool_dir, path).read_text()


def _plain(observation: Observation) -> dict[str, Any]:
    assert isinstance(observation.status, BatchStatus)
    return {**dataclasses.asdict(observation), "ref": observation.ref.model_dump()}


VERBS: dict[str, Callable[..., Any]] = {
    "submit": submit,
    "watch": watch,
    "query": query,
    "remove": remove,
    "forget": forget,
    "history": history,
    "read": read,
}

if __name__ == "__main__":
    main()
