"""``vmjobs job cancel``."""

from __future__ import annotations

import click

from vmjobs.cli.job_table import expand
from vmjobs.cli.support import client, echo, json_option, print_json
from vmjobs.errors import Conflict


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@json_option
def cancel(jobs: tuple[str, ...], as_json: bool) -> None:
    """Cancel JOBs. A job is CANCELED once its VM is known to be gone."""
    api = client()
    seen = []
    for job in expand(api, jobs):
        try:
            seen.append(api.cancel(job.id))
        except Conflict:
            seen.append(api.job(job.id))  # it has ended by itself; the others are still to cancel
        if not as_json:
            echo(f"{seen[-1].id} {seen[-1].state}")
    if as_json:
        print_json(seen)
