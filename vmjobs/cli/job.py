"""``vmjobs job``: submit jobs, look after them, get what they leave."""

from __future__ import annotations

import click

from vmjobs.cli.verbs import Verbs

#: verb -> (module, attribute, one line of help).
VERBS = {
    "submit": ("vmjobs.cli.job_submit", "submit", "Submit a script as a job, or an array of jobs."),
    "status": ("vmjobs.cli.job_status", "status", "Show jobs in detail."),
    "list": ("vmjobs.cli.job_status", "list_jobs", "List your jobs."),
    "why": ("vmjobs.cli.job_why", "why", "Say why a job does not run."),
    "wait": ("vmjobs.cli.job_wait", "wait", "Wait until jobs have ended."),
    "log": ("vmjobs.cli.job_status", "log", "Show a job's history."),
    "out": ("vmjobs.cli.job_streams", "out", "Print a job's standard output."),
    "err": ("vmjobs.cli.job_streams", "err", "Print a job's standard error."),
    "console": ("vmjobs.cli.job_streams", "console", "Print the console of a job's VM."),
    "outputs": ("vmjobs.cli.job_outputs", "outputs", "List or fetch the files a job delivered."),
    "cancel": ("vmjobs.cli.job_change", "cancel", "Cancel jobs."),
    "hold": ("vmjobs.cli.job_change", "hold", "Have jobs wait until they are released."),
    "release": ("vmjobs.cli.job_change", "release", "Let jobs that are held go on."),
}


@click.command(cls=Verbs, verbs=VERBS)
def job() -> None:
    """Submit jobs and look after them.

    JOB is a job's id, or an array's id for all of its jobs. 6 or more of its first characters are
    enough where no other of yours begins with them.
    """
