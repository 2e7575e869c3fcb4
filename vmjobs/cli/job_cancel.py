"""``vmjobs job cancel``."""

from __future__ import annotations

import click

from vmjobs.cli.job_table import expand
from vmjobs.cli.support import client, json_option, print_json


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@json_option
def cancel(jobs: tuple[str, ...], as_json: bool) -> None:
    """Cancel JOBs. A job is CANCELED once its VM is known to be gone."""
    api = client()
    canceled = [api.cancel(job.id) for job in expand(api, jobs) if not job.state.final]
    if as_json:
        print_json(canceled)
        return
    for job in canceled:
        click.echo(f"{job.id} {job.state}")
