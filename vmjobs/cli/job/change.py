"""``vmjobs job cancel``, ``hold`` and ``release``."""

from __future__ import annotations

import click

from vmjobs.cli.common import client, echo, json_option, print_json
from vmjobs.cli.job.table import jobs_argument
from vmjobs.model import JobAction


def _make_command(action: JobAction, text: str) -> click.Command:
    @click.command(action.value, help=text)
    @jobs_argument
    @json_option
    def change(jobs: tuple[str, ...], as_json: bool) -> None:
        seen = client().change_jobs(action, jobs)
        if as_json:
            print_json(seen)
            return
        for job in seen:
            echo(f"{job.id} {job.state}")

    return change


cancel = _make_command(JobAction.CANCEL, "Cancel JOBs. A job is CANCELED once its VM is verified gone.")
hold = _make_command(JobAction.HOLD, "Hold JOBs: they do not run until they are released.")
release = _make_command(JobAction.RELEASE, "Release held JOBs.")
