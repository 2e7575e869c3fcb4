"""``vmjobs job cancel``."""

from __future__ import annotations

import click

from vmjobs.cli.support import client, echo, json_option, print_json


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@json_option
def cancel(jobs: tuple[str, ...], as_json: bool) -> None:
    """Cancel JOBs. A job is CANCELED once its VM is known to be gone."""
    seen = client().cancel_jobs(jobs)
    if as_json:
        print_json(seen)
        return
    for job in seen:
        echo(f"{job.id} {job.state}")
