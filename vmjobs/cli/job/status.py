"""``vmjobs job status``, ``list`` and ``log``."""

from __future__ import annotations

from itertools import islice

import click

from vmjobs.cli.common import client, format_age, json_option, print_json, print_table
from vmjobs.cli.job.table import PHASES, find_jobs, format_exit, jobs_argument
from vmjobs.model import BYTE_COUNTERS, Job, JobState


@click.command()
@jobs_argument
@json_option
def status(jobs: tuple[str, ...], as_json: bool) -> None:
    """Show JOBs in detail."""
    found = find_jobs(client(), jobs)
    if as_json:
        print_json(found)
        return
    for job in found:
        print_table(("", ""), _details(job))


def _details(job: Job) -> list[tuple[str, str]]:
    condor = f"{job.condor.cluster}.{job.condor.proc} at {job.condor.schedd}" if job.condor else "-"
    rows = [
        ("job", job.id),
        ("array", f"{job.array} ({job.index + 1} of {job.count})"),
        ("state", f"{job.state} since {format_age(job.updated)}"),
        ("reason", f"{job.reason.code}: {job.reason.message} (action needed by: {job.reason.actor})"),
        ("exit", f"{format_exit(job)}" + (f", reported by {job.exit.channel}" if job.exit else "")),
        ("image", f"{job.spec.image} = {job.image_digest}"),
        ("node", f"{job.node or '-'} ({job.hypervisor or 'no hypervisor yet'})"),
        ("condor", condor),
        ("attempts", str(job.attempts)),
        ("seconds", ", ".join(f"{p} {job.seconds[p]:.1f}" for p in PHASES if p in job.seconds) or "-"),
        ("processor", f"{job.cpu_seconds:.1f} s" if job.cpu_seconds else "-"),
        ("bytes", ", ".join(f"{a} {job.bytes[a]}" for a in BYTE_COUNTERS if a in job.bytes) or "-"),
    ]
    rows += [("output", f"{o.path}  {o.size} bytes  {o.digest}") for o in job.outputs]
    rows += [("rejected", f"{r.path}: {r.why}") for r in job.rejected]
    return rows


@click.command("list")
@click.option("--state", "states", multiple=True, type=click.Choice([s.value for s in JobState]))
@click.option("--array", default="", help="Only the jobs of this array.")
@click.option("--limit", type=click.IntRange(1, 2000), default=50, show_default=True)
@json_option
def list_jobs(states: tuple[str, ...], array: str, limit: int, as_json: bool) -> None:
    """List your jobs, newest first."""
    found = list(islice(client().jobs([JobState(s) for s in states], array), limit))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            j.id,
            j.spec.name,
            j.state,
            format_exit(j),
            j.node or "-",
            format_age(j.created),
            j.reason.code,
        )
        for j in found
    ]
    print_table(("JOB", "NAME", "STATE", "EXIT", "NODE", "SUBMITTED", "REASON"), rows, ids=True)


@click.command()
@click.argument("job")
@json_option
def log(job: str, as_json: bool) -> None:
    """Show the history of JOB."""
    events = client().events(job)
    if as_json:
        print_json(list(events))
        return
    rows = [
        (
            e.seq,
            e.time.astimezone().isoformat(" ", "milliseconds"),
            e.state,
            e.reason.code,
            e.reason.message,
        )
        for e in events
    ]
    print_table(("#", "TIME", "STATE", "REASON", ""), rows)
