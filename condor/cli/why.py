"""``vmjobs job why``: explains why a job does not run."""

from __future__ import annotations

from importlib.util import find_spec

import click

from condor import names
from condor.cli.why_service import check_image, explain, explain_service_job
from condor.cli.why_show import JobReport, report_as_json, show
from condor.diagnose.findings import JobLocation
from condor.submit.schedd import Schedd
from vmjobs.cli.common import (
    COMPLETION_SECONDS,
    CONDOR_ID,
    client,
    completion_retries,
    json_option,
    print_json,
)
from vmjobs.errors import VMJobsError
from vmjobs.model import JobState


def complete_job(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete ids of idle and held jobs; return none if nothing answers at once."""
    return [job for job in (*_service_ids(), *_condor_ids()) if job.startswith(incomplete)]


def _service_ids() -> list[str]:
    try:
        with client(completion_retries()) as api:
            return [job.id for job in api.job_page([JobState.QUEUED, JobState.HELD]).jobs]
    except VMJobsError:
        return []


def _condor_ids() -> list[str]:
    if find_spec("htcondor2") is None:
        return []
    wanted = (names.CLUSTER_ID, names.PROC_ID)
    try:
        ads = Schedd("", "", COMPLETION_SECONDS).query("JobStatus == 1 || JobStatus == 5", wanted)
    except VMJobsError:
        return []
    return [f"{ad[names.CLUSTER_ID]}.{ad[names.PROC_ID]}" for ad in ads]


@click.command()
@click.argument("job", metavar="ID", shell_complete=complete_job)
@click.option(
    "--schedd", default="", metavar="NAME", help="Schedd of an HTCondor job; default: this host's."
)
@click.option(
    "--pool", default="", metavar="COLLECTOR", help="Collector of the schedd; default: this host's."
)
@json_option
def why(job: str, schedd: str, pool: str, as_json: bool) -> None:
    """Explain why the job ID is idle or held, or where it is.

    ID is a job's id, or CLUSTER.PROC or CLUSTER of an HTCondor job. The requirements of an HTCondor job
    are compared with the nodes of its pool, at the site if it was sent there.
    """
    if found := CONDOR_ID.fullmatch(job):
        proc = None if found[2] is None else int(found[2])
        explanation = explain(JobLocation(schedd, pool, int(found[1]), proc))
        findings = [*explanation.findings, *check_image(explanation)]
        report = JobReport(explanation.id, explanation.state, findings, explanation=explanation)
    else:
        report = explain_service_job(job, schedd, pool)
    if as_json:
        print_json(report_as_json(report))
    else:
        show(report)
