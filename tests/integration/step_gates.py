"""Planted in a node of the grid: runs of its agent stop at each of their steps until they may go on.

It is loaded by every Python there (:mod:`steps_kit` has it named in a ``.pth`` file), and does
something in the agent alone. Where :data:`GATES` is a directory the first run of a kind that comes to a
step stops there, until there is a file ``open``; the next one goes on to the next step. So as many runs
as there are steps stand at all of them at the same time. Its machine stands still meanwhile, as soon as
it has one that can: else its guest would have done its work before all the others have come.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

GATES = Path("/run/vmjobs/gates")
#: Of unchanged jobs alone, before their runs' own steps; what all have after these; and those again.
TAKING, ENDING, GIVING = ("take over",), ("deliver", "clear away"), ("give back",)


def points(kind: str) -> tuple[str, ...]:
    """Where runs of a kind stop, in their order. kind: ``rest`` or ``unchanged``."""
    from vmjobs.agent.run.steps import STEPS

    steps = tuple(step.title for step in STEPS) + ENDING
    return TAKING + steps + GIVING if kind == "unchanged" else steps


def stop(job: str, point: str, run: Any = None) -> None:
    """Stop a job's run here, if it is the first one. run: where it may have a machine."""
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
    """Have the machine stand still; false where there is none (any more), or it cannot yet."""
    from vmjobs.errors import HypervisorError
    from vmjobs.hypervisor.base import VmState

    try:
        if run.watch is None or run.driver.state(run.machine) is not VmState.RUNNING:
            return False
        run.driver.pause(run.machine)
    except HypervisorError:
        return False
    return True


def _go_on(run: Any) -> None:
    """Let it go on, if it is still there."""
    from vmjobs.errors import HypervisorError

    with suppress(HypervisorError):
        run.driver.resume(run.machine)


def before(point: str, job_of: Callable[..., str]) -> Callable[[Any], Any]:
    """A decorator: stop where the function begins."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def stopping(*arguments: Any, **named: Any) -> Any:
            run = arguments[0] if hasattr(arguments[0], "driver") else None
            stop(job_of(*arguments), point, run)
            return function(*arguments, **named)

        return stopping

    return decorate


def plant() -> None:
    """Change this process's agent."""
    from dataclasses import replace

    from vmjobs.agent.condor_job import condor_job
    from vmjobs.agent.condor_job.condor_job import CondorJob
    from vmjobs.agent.run import steps

    def name_of(job: CondorJob, *_: object) -> str:
        return job.name

    def job_of(run: Any, *_: object) -> str:
        return str(run.job_id)

    steps.STEPS = tuple(replace(s, action=before(s.title, job_of)(s.action)) for s in steps.STEPS)
    from vmjobs.agent.run.job_run import Run  # it takes the steps when it is loaded

    deliver = before("deliver", job_of)(Run._deliver)

    def deliver_and_stop(run: Run, *arguments: Any) -> Any:
        outcome = deliver(run, *arguments)
        stop(run.job_id, "clear away")
        return outcome

    Run._deliver = deliver_and_stop  # type: ignore[method-assign]
    condor_job.CondorJob.take = before("take over", name_of)(CondorJob.take)  # type: ignore[method-assign]
    condor_job.CondorJob.send_outputs = before("give back", name_of)(CondorJob.send_outputs)  # type: ignore[method-assign]


if "agent" in sys.argv[1:2] and Path(sys.argv[0]).name == "vmjobs":
    plant()
