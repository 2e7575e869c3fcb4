"""Findings of the service for ``vmjobs job why``: on its own jobs, and on images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from condor import names
from condor.cli.why_show import JobReport
from condor.diagnose.explainer import JobExplanation, explain_job
from condor.diagnose.findings import JobFacts, JobFinding, JobLocation
from vmjobs.cli.common import client, config
from vmjobs.client import Client
from vmjobs.errors import ConfigError, NotFound, Unavailable, VMJobsError
from vmjobs.model import Job, JobEvent, JobState
from vmjobs.wire import Visibility

#: Number of a job's latest events that are shown.
MAX_EVENTS = 5


def explain(place: JobLocation) -> JobExplanation:
    """Explain the state of an HTCondor job.

    Raises:
        ConfigError: the module htcondor2 is not installed.
        NotFound, Unavailable: see :func:`condor.diagnose.explainer.explain_job`.
    """
    if find_spec("htcondor2") is None:
        raise ConfigError(
            "this installation cannot ask HTCondor: the Python module htcondor2 is missing",
            hint="pip install 'vmjobs[server]'",
        )
    return explain_job(place)


def explain_service_job(job_id: str, schedd: str, pool: str) -> JobReport:
    """Explain the state of a job of the service. schedd, pool: override its own.

    Raises:
        NotFound: the job does not exist, or belongs to another user.
        Unauthenticated, Unavailable: the service cannot be asked.
    """
    with client() as api:
        job = api.job(job_id)
        events = api.events(job_id)[-MAX_EVENTS:]
    facts = [*_job_facts(job), *map(_event_fact, events)]
    message = job.reason.message.partition("\n")[0] or "no reason is known"
    own_finding = JobFinding(job.reason.code, message, _remedy(job))
    if job.state not in {JobState.QUEUED, JobState.HELD, JobState.PREEMPTED}:
        return JobReport(job.id, job.state.value, [own_finding], facts)
    explanation, findings = _ask_condor(job, schedd, pool)
    unread = job.condor is not None and explanation is None
    found = [own_finding, *findings] if unread else [*findings, own_finding]
    return JobReport(job.id, job.state.value, found, facts, explanation)


def _job_facts(job: Job) -> Iterator[tuple[str, str]]:
    yield "route", job.spec.route or "the service's default"
    if job.condor:
        site = f", at its site {job.condor.grid_job_id}" if job.condor.grid_job_id else ""
        yield "in HTCondor", f"{job.condor.cluster}.{job.condor.proc} at {job.condor.schedd}{site}"
    yield "attempts", str(job.attempts)


def _event_fact(event: JobEvent) -> tuple[str, str]:
    reason = f"{event.reason.code} {event.reason.message}".partition("\n")[0]
    return f"event {event.seq}", f"{event.time:%Y-%m-%d %H:%M:%S} {event.state} {reason}"


def _remedy(job: Job) -> str:
    if job.state in {JobState.COMPLETED, JobState.CANCELED}:
        return ""
    if job.state is JobState.FAILED:
        return f"action needed by: {job.reason.actor}; docs/troubleshooting.md explains the code"
    return f"vmjobs job log {job.id} shows its history"


def _ask_condor(job: Job, schedd: str, pool: str) -> tuple[JobExplanation | None, Sequence[JobFinding]]:
    """Return HTCondor's explanation of a waiting job, and its findings."""
    if job.condor is None:
        message = "the service has not submitted it to its schedd yet"
        return None, [
            JobFinding("NOT_DISPATCHED", message, "`vmjobs doctor`; is the service's worker running?")
        ]
    ref = job.condor
    place = JobLocation(schedd or ref.schedd, pool or config().schedd_pool, ref.cluster, ref.proc)
    try:
        explanation = explain(place)
    except (ConfigError, NotFound, Unavailable) as error:
        message = f"HTCondor cannot be asked from this host: {error.message}"
        remedy = f"on a host of the pool: vmjobs job why {ref.cluster}.{ref.proc} --schedd {ref.schedd}"
        return None, [JobFinding("UNREAD", message, remedy)]
    return explanation, explanation.findings


def check_image(explanation: JobExplanation) -> list[JobFinding]:
    """Check that the image of an idle HTCondor job is public."""
    image = explanation.job.text(names.WANTED_IMAGE)
    if not image or explanation.pool is None:
        return []
    if not config().token_file.exists():
        message = f"its image {image} was not checked: this host has no token for the service"
        return [JobFinding("IMAGE_UNCHECKED", f"{message}; the node checks it")]
    try:
        with client() as api:
            return _image_findings(api, explanation.job, image)
    except VMJobsError as error:
        return [JobFinding("IMAGE_UNCHECKED", f"its image was not checked: {error.message}")]


def _image_findings(api: Client, job: JobFacts, image: str) -> list[JobFinding]:
    remedy = f"`vmjobs image list`; condor_qedit {job.id} {names.WANTED_IMAGE} '\"NAME\"'"
    private = False
    # A name without a namespace means the user's own image first, but nodes resolve it in the library.
    for ref in dict.fromkeys(
        [image, image if "/" in image or image.startswith("sha256:") else f"library/{image}"]
    ):
        try:
            if api.image(ref).visibility is Visibility.PUBLIC:
                return []
            private = True
        except NotFound:
            continue
    if private:
        message = f"its image {image} is not public, so the job will be held"
        return [
            JobFinding("IMAGE_NOT_SHARED", message, f"vmjobs image share {image} --public, or {remedy}")
        ]
    message = f"the service has no public image {image}; without it the job will be held"
    return [JobFinding("IMAGE_MISSING", message, remedy)]
