"""``vmjobs job``: commands that submit jobs, manage them and fetch their outputs."""

from __future__ import annotations

import click

from vmjobs.cli.lazy_commands import LazyGroup

#: subcommand -> (module, attribute, one line of help).
SUBCOMMANDS = {
    "submit": ("vmjobs.cli.job.submit", "submit", "Submit a script as a job, or an array of jobs."),
    "status": ("vmjobs.cli.job.status", "status", "Show jobs in detail."),
    "list": ("vmjobs.cli.job.status", "list_jobs", "List your jobs."),
    "why": ("vmjobs.cli.job.why", "why", "Explain why a job does not run."),
    "wait": ("vmjobs.cli.job.wait", "wait", "Wait until jobs have ended."),
    "log": ("vmjobs.cli.job.status", "log", "Show a job's history."),
    "out": ("vmjobs.cli.job.streams", "out", "Print a job's standard output."),
    "err": ("vmjobs.cli.job.streams", "err", "Print a job's standard error."),
    "console": ("vmjobs.cli.job.streams", "console", "Print the console of a job's VM."),
    "outputs": ("vmjobs.cli.job.outputs", "outputs", "List or fetch a job's output files."),
    "cancel": ("vmjobs.cli.job.change", "cancel", "Cancel jobs."),
    "hold": ("vmjobs.cli.job.change", "hold", "Hold jobs until they are released."),
    "release": ("vmjobs.cli.job.change", "release", "Release held jobs."),
}


@click.command(cls=LazyGroup, lazy_commands=SUBCOMMANDS)
def job() -> None:
    """Submit and manage jobs.

    JOB is a job's id, or an array's id for all of its jobs. The first 6 or more characters suffice if
    they are unique among your jobs.
    """
