"""``vmjobs job wait``, and waiting for ``vmjobs job submit --wait``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console

from vmjobs.cli.common import EXIT_TIMED_OUT, client, echo, json_option, print_json
from vmjobs.cli.job.table import find_jobs, jobs_argument, print_jobs
from vmjobs.model import Job, JobState

if TYPE_CHECKING:
    from vmjobs.client import Client

#: Exit status if a job did not complete.
EXIT_NOT_COMPLETED = 1


@click.command()
@jobs_argument
@click.option("--timeout", type=float, help="Seconds to wait at most.")
@json_option
def wait(jobs: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Wait until all JOBs have ended; exit with 0 if all of them completed."""
    api = client()
    wait_and_show(api, [job.id for job in find_jobs(api, jobs)], timeout, as_json)


def wait_and_show(api: Client, ids: Sequence[str], timeout: float | None, as_json: bool) -> None:
    """Wait for jobs, show them, and exit."""
    seen: dict[str, JobState] = {}
    terminal = Console(stderr=True)
    with terminal.status("waiting") as status:

        def on_change(job: Job) -> None:
            news = seen.get(job.id) is not job.state
            seen[job.id] = job.state
            counts = ", ".join(f"{n} {state}" for state, n in _count_states(seen.values()))
            status.update(counts)
            if news and not (as_json or terminal.is_terminal):
                why = job.reason.message.partition("\n")[0]
                echo(f"{job.id} {job.state}: {why}", err=True)

        ended = api.wait(ids, timeout=timeout, on_change=on_change)
    if as_json:
        print_json(list(ended))
    else:
        print_jobs(ended)
    if any(not job.state.final for job in ended):
        sys.exit(EXIT_TIMED_OUT)
    sys.exit(0 if all(job.state is JobState.COMPLETED for job in ended) else EXIT_NOT_COMPLETED)


def _count_states(states: Iterable[JobState]) -> list[tuple[JobState, int]]:
    found = list(states)
    return [(state, found.count(state)) for state in JobState if state in found]
