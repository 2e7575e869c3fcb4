"""Makes runs of a node's agent stop at each of their steps until a file opens the gates.

Every Python on the node loads it (``steps.py`` names it in a ``.pth`` file), but it changes only
the agent. If :data:`GATES` is a directory, the first run of a kind to reach a step stops there until
there is a file ``open``; the next run passes on to the next step. So as many runs as there are steps
wait at all of them at the same time. A waiting run's VM is paused as soon as possible: otherwise its
guest would finish its work before all other runs have arrived.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GATES = Path("/run/vmjobs/gates")
#: First steps of transparent jobs only; last steps of all jobs; last steps of transparent jobs only.
TAKING, ENDING, GIVING = ("take over",), ("deliver", "clear away"), ("give back",)


def points(kind: str) -> tuple[str, ...]:
    """Steps at which runs of a kind stop, in order. kind: ``rest`` or ``unchanged``."""
    from vmjobs.agent.run.steps import STEPS

    steps = tuple(step.title for step in STEPS) + ENDING
    return TAKING + steps + GIVING if kind == "unchanged" else steps


def stop(job: str, point: str, run: Any = None) -> None:
    """Stop a job's run here if it is the first one. run: given if the job may have a VM."""
    kind = "unchanged" if job.startswith("condor.") else "rest"
    if not GATES.is_dir() or (GATES / "open").exists():
        return
    try:
        with (GATES / f"{kind}.{point}").open("x", encoding="utf-8") as taken:
            taken.write(job)
    except FileExistsError:
        return
    still = False
    while GATES.is_dir() and not (GATES / "open").exists():
        still = still or (run is not None and _halt(run))
        time.sleep(0.05)
    if still:
        _go_on(run)


def _halt(run: Any) -> bool:
    """Pause the VM; return false if there is none (any more), or it cannot be paused yet."""
    from vmjobs.errors import HypervisorError
    from vmjobs.hypervisor.base import VmState

    try:
        if run.running_vm is None or run.vm.driver.state(run.vm.name) is not VmState.RUNNING:
            return False
        run.vm.driver.pause(run.vm.name)
    except HypervisorError:
        return False
    return True


def _go_on(run: Any) -> None:
    """Resume the VM if it still exists."""
    from vmjobs.errors import HypervisorError

    with suppress(HypervisorError):
        run.vm.driver.resume(run.vm.name)


def before(point: str, job_of: Callable[..., str]) -> Callable[[Any], Any]:
    """Decorate a function to stop where it begins."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def stopping(*arguments: Any, **named: Any) -> Any:
            run = arguments[0] if hasattr(arguments[0], "running_vm") else None
            stop(job_of(*arguments), point, run)
            return function(*arguments, **named)

        return stopping

    return decorate


def plant() -> None:
    """Patch the agent in this process."""
    from dataclasses import replace

    from vmjobs.agent.condor_job.condor_job import CondorJob
    from vmjobs.agent.journal import Journal
    from vmjobs.agent.run import steps

    def name_of(job: CondorJob, *_: object) -> str:
        return job.name

    def job_of(run: Any, *_: object) -> str:
        return str(run.request.job_id)

    def fetch_image(run: Any) -> Any:
        run.resources.callback(stop, job_of(run), "deliver")  # the last of the calls after the steps
        return steps.fetch_image(run)

    journaled = Journal.run

    @contextmanager
    def journaled_until_stop(journal: Journal, record: Any, driver: Any) -> Iterator[Path]:
        with journaled(journal, record, driver) as directory:
            yield directory
            stop(record.job, "clear away")

    Journal.run = journaled_until_stop  # type: ignore[assignment, method-assign]
    actions = [fetch_image, *(step.action for step in steps.STEPS[1:])]
    steps.STEPS = tuple(  # type: ignore[assignment]
        replace(step, action=before(step.title, job_of)(action))
        for step, action in zip(steps.STEPS, actions, strict=True)
    )
    CondorJob.receive = before("take over", name_of)(CondorJob.receive)  # type: ignore[method-assign]
    CondorJob.send_outputs = before("give back", name_of)(CondorJob.send_outputs)  # type: ignore[method-assign]


if "agent" in sys.argv[1:2] and Path(sys.argv[0]).name == "vmjobs":
    plant()
