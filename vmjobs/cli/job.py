"""``vmjobs job``: submit jobs, look after them, get what they leave."""

from __future__ import annotations

import importlib

import click

#: verb -> (module, attribute, one line of help).
VERBS = {
    "submit": ("vmjobs.cli.job_submit", "submit", "Submit a script as a job, or an array of jobs."),
    "status": ("vmjobs.cli.job_status", "status", "Show jobs in detail."),
    "list": ("vmjobs.cli.job_status", "list_jobs", "List your jobs."),
    "wait": ("vmjobs.cli.job_wait", "wait", "Wait until jobs have ended."),
    "log": ("vmjobs.cli.job_status", "log", "Show a job's history."),
    "out": ("vmjobs.cli.job_streams", "out", "Print a job's standard output."),
    "err": ("vmjobs.cli.job_streams", "err", "Print a job's standard error."),
    "console": ("vmjobs.cli.job_streams", "console", "Print the console of a job's VM."),
    "outputs": ("vmjobs.cli.job_outputs", "outputs", "List or fetch the files a job delivered."),
    "cancel": ("vmjobs.cli.job_cancel", "cancel", "Cancel jobs."),
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, attribute, _ = VERBS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in VERBS.items()])


@click.command(cls=_Verbs)
def job() -> None:
    """Submit jobs and look after them.

    JOB is a job's id, or an array's id for all of its jobs.
    """
