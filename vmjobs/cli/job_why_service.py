"""What the service knows of why a job does not run: of its own jobs, and of images of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from condor import names
from condor.why import Finding, JobFacts
from condor.why_read import Explanation, Place, Reader
from vmjobs.cli.job_why_show import View
from vmjobs.cli.support import client, config
from vmjobs.client import Client
from vmjobs.errors import ConfigError, NotFound, Unavailable, VMJobsError
from vmjobs.model import Job, JobEvent, JobState
from vmjobs.wire import Visibility

#: Events of a job's that are shown, the latest ones.
EVENTS = 5


def explain(place: Place) -> Explanation:
    """Why a job of HTCondor's is where it is.

    Raises:
        ConfigError: this installation cannot talk to HTCondor.
        NotFound, Unavailable: see :meth:`condor.why_read.Reader.explain`.
    """
    if find_spec("htcondor2") is None:
        raise ConfigError(
            "this installation cannot ask HTCondor: the Python module htcondor2 is missing",
            hint="pip install 'vmjobs[server]'",
        )
    return Reader().explain(place)


def view_of_service_job(job_id: str, schedd: str, pool: str) -> View:
    """Why a job of the service's is where it is. schedd, pool: to ask in place of those that are known.

    Raises:
        NotFound: there is no such job, or it is another's.
        Unauthenticated, Unavailable: the service cannot be asked.
    """
    with client() as api:
        job = api.job(job_id)
        events = api.events(job_id)[-EVENTS:]
    facts = [*_facts(job), *map(_fact, events)]
    message = job.reason.message.partition("\n")[0] or "nobody says why"
    said = Finding(job.reason.code, message, _remedy(job))
    if job.state not in {JobState.QUEUED, JobState.HELD, JobState.PREEMPTED}:
        return View(job.id, job.state.value, [said], facts)
    explanation, findings = _asked(job, schedd, pool)
    unread = job.condor is not None and explanation is None
    found = [said, *findings] if unread else [*findings, said]
    return View(job.id, job.state.value, found, facts, explanation)


def _facts(job: Job) -> Iterator[tuple[str, str]]:
    yield "route", job.spec.route or "the service's default"
    if job.condor:
        site = f", at its site {job.condor.grid_job_id}" if job.condor.grid_job_id else ""
        yield "in HTCondor", f"{job.condor.cluster}.{job.condor.proc} at {job.condor.schedd}{site}"
    yield "attempts", str(job.attempts)


def _fact(event: JobEvent) -> tuple[str, str]:
    reason = f"{event.reason.code} {event.reason.message}".partition("\n")[0]
    return f"event {event.seq}", f"{event.time:%Y-%m-%d %H:%M:%S} {event.state} {reason}"


def _remedy(job: Job) -> str:
    if job.state in {JobState.COMPLETED, JobState.CANCELED}:
        return ""
    if job.state is JobState.FAILED:
        return f"to mend by: {job.reason.actor}; docs/troubleshooting.md goes by the code"
    return f"vmjobs job log {job.id} has its whole history"


def _asked(job: Job, schedd: str, pool: str) -> tuple[Explanation | None, Sequence[Finding]]:
    """What HTCondor says of a job that waits there."""
    if job.condor is None:
        message = "the service has not put it into its schedd's queue yet"
        return None, [
            Finding("NOT_DISPATCHED", message, "`vmjobs doctor`; is the service's worker running?")
        ]
    ref = job.condor
    place = Place(schedd or ref.schedd, pool or config().schedd_pool, ref.cluster, ref.proc)
    try:
        explanation = explain(place)
    except (ConfigError, NotFound, Unavailable) as error:
        message = f"what HTCondor knows of it could not be read from here: {error.message}"
        remedy = f"where HTCondor is: vmjobs job why {ref.cluster}.{ref.proc} --schedd {ref.schedd}"
        return None, [Finding("UNREAD", message, remedy)]
    return explanation, explanation.findings


# --------------------------------------------------------------------------- images


def of_image(explanation: Explanation) -> list[Finding]:
    """Whether everybody may use the image that an idle job of HTCondor's asks for."""
    image = explanation.job.text(names.WANTED_IMAGE)
    if not image or explanation.pool is None:
        return []
    if not config().token_file.exists():
        message = f"nobody was asked about its image {image}, as there is no token for the service here"
        return [Finding("IMAGE_UNCHECKED", f"{message}; its node will ask")]
    try:
        with client() as api:
            return _seen(api, explanation.job, image)
    except VMJobsError as error:
        return [
            Finding("IMAGE_UNCHECKED", f"the service was not asked about its image: {error.message}")
        ]


def _seen(api: Client, job: JobFacts, image: str) -> list[Finding]:
    remedy = f"`vmjobs image list`; condor_qedit {job.id} {names.WANTED_IMAGE} '\"NAME\"'"
    private = False
    # A name without a namespace is one's own image before it is the library's, which nodes get.
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
        message = f"its image {image} is not one that everybody may use, so it will be held"
        return [
            Finding("IMAGE_NOT_SHARED", message, f"vmjobs image share {image} --public, or {remedy}")
        ]
    message = f"the service shows no image {image}; without one that everybody may use it will be held"
    return [Finding("IMAGE_MISSING", message, remedy)]
