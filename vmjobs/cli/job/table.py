"""Tables of jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from vmjobs.cli.common import print_table
from vmjobs.errors import NotFound
from vmjobs.model import Job

if TYPE_CHECKING:
    from vmjobs.client import Client

PHASES = ("queued", "staging", "booting", "running", "collecting")
#: The argument of commands for several jobs.
jobs_argument = click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
COLUMNS = (
    "JOB",
    "STRATEGY",
    "STATE",
    "EXIT",
    "VIA",
    "NODE",
    "VM",
    *(p.upper() for p in PHASES),
    "OUTPUT",
)


def find_jobs(api: Client, names: Iterable[str]) -> list[Job]:
    """Return the jobs with these ids or prefixes; an array's id means all its jobs.

    Raises:
        NotFound: neither a job nor an array has the id.
        AmbiguousId: several ids begin with the prefix.
    """
    found: list[Job] = []
    for name in names:
        try:
            found.append(api.job(name))
        except NotFound:
            members = list(api.jobs(array=name))
            if not members:
                raise
            found.extend(sorted(members, key=lambda job: job.index))
    return found


def format_exit(job: Job) -> str:
    """Return the exit status as text; "-" if there is none."""
    if job.exit is None:
        return "-"
    return f"signal {job.exit.signal}" if job.exit.signal is not None else str(job.exit.code)


def job_row(job: Job) -> list[str]:
    phases = [f"{job.seconds[p]:.1f} s" if p in job.seconds else "-" for p in PHASES]
    digest = job.outputs[0].digest.removeprefix("sha256:")[:12] if job.outputs else "-"
    more = f" +{len(job.outputs) - 1}" if len(job.outputs) > 1 else ""
    return [
        job.id,
        job.spec.strategy.value,
        job.state.value if job.state != "FAILED" else f"{job.state} {job.reason.code}",
        format_exit(job),
        job.exit.channel.value if job.exit else "-",
        job.node or "-",
        job.hypervisor.value if job.hypervisor else "-",
        *phases,
        digest + more,
    ]


def print_jobs(jobs: Sequence[Job]) -> None:
    print_table(COLUMNS, [job_row(job) for job in jobs], ids=True)
