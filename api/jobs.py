"""Jobs, for their users: submit, query, read output, cancel."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from flask import Blueprint, request, url_for
from pydantic import BeforeValidator, Field
from werkzeug.wrappers import Response

from api.operation import (
    Operation,
    Reply,
    RequestHeader,
    access_for,
    caller,
    describe_fault_count,
    json_reply,
    parse_body,
    read_body,
    read_json,
    read_query,
)
from api.paging import EventQuery
from api.ranges import (
    BYTES,
    BYTES_HEADERS,
    IF_NONE_MATCH,
    STREAM_BYTES,
    STREAM_BYTES_HEADERS,
    send,
    send_blob,
)
from api.services import repository, services
from api.submission import prefix_faults, repository_faults
from api.tokens import Scope
from repository.images import Viewer
from repository.jobs.submissions import Submissions
from vmjobs.errors import Fault, InvalidRequest, InvalidSpec
from vmjobs.job_sets import JobSelection, JobStatusList
from vmjobs.model import FrozenModel, Job, JobAction, JobState, StreamName, Submission
from vmjobs.wire import EventList, JobPage, OutputList, Submitted

blueprint = Blueprint("jobs", __name__, url_prefix="/v1/jobs")
#: Requests about sets of jobs.
sets = Blueprint("job_sets", __name__, url_prefix="/v1")

MAX_PAGE: Final = 2000
_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
READ: Final = access_for(Scope.COMPUTE_READ)
IDEMPOTENCY_KEY: Final = RequestHeader(
    "Idempotency-Key",
    "repeating a request with the same key and body starts nothing new",
    {"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[\x21-\x7e]+$"},
)


def _words(value: Any) -> Any:
    return [word for word in value.split(",") if word] if isinstance(value, str) else value


class JobQuery(FrozenModel):
    """The jobs to list."""

    state: Annotated[tuple[JobState, ...], BeforeValidator(_words)] = Field(
        (), description="only jobs in these states, separated by commas", max_length=32
    )
    array: str = Field("", max_length=64, description="only jobs of this submission")
    limit: int = Field(256, ge=1, le=MAX_PAGE, description="jobs in a page")
    cursor: str = Field("", max_length=512, description="`next` of the page before")


@blueprint.post("")
@Operation(
    "submitJobs",
    access=access_for(Scope.COMPUTE_CREATE),
    body=Submission,
    headers=(IDEMPOTENCY_KEY,),
    replies={
        201: Reply("submitted", Submitted, {"Location": "the first job"}),
        200: Reply("the jobs, submitted before with the same key", Submitted),
    },
    errors=(409,),
)
def submit() -> Response:
    """Submit jobs.

    One specification runs `count` times, as an array. A tag of an image is resolved to a digest
    now; the digest is what runs.
    """
    key = idempotency_key()
    parts, who = services(), caller()
    submission = _submission(read_json(), parts.repository.submissions, Viewer(who.subject, who.groups))
    try:
        done = parts.repository.submissions.submit(
            who.subject, submission, key, parts.dispatcher.submit_array, who.groups
        )
    except InvalidSpec as error:
        faults = prefix_faults(error.faults)
        raise InvalidSpec(error.message, hint=error.hint, faults=faults) from error
    body = Submitted(array=done.array, jobs=tuple(done.jobs))
    location = url_for("jobs.show", job=done.jobs[0].id)
    return json_reply(body, 201 if done.created else 200, {"Location": location})


def _submission(body: bytes, submissions: Submissions, viewer: Viewer) -> Submission:
    try:
        return parse_body(Submission, body)
    except InvalidRequest as error:
        faults = [*error.faults, *repository_faults(body, error.faults, submissions, viewer)]
        raise InvalidSpec(describe_fault_count("the submission", faults), faults=faults) from error


def idempotency_key() -> str:
    """Return the request's idempotency key, or "".  Raises InvalidRequest."""
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return ""
    if not _KEY.fullmatch(key):
        message = "must be 1 to 255 visible ASCII characters"
        fault = Fault("Idempotency-Key", "bad_header", message)
        raise InvalidRequest(f"the header Idempotency-Key {message}", faults=[fault])
    return key


@blueprint.get("")
@Operation(
    "listJobs",
    access=READ,
    query=JobQuery,
    replies={200: Reply("a page of jobs", JobPage)},
)
def index() -> Response:
    """List the caller's jobs, newest first."""
    query = read_query(JobQuery)
    return json_reply(
        repository().jobs.page(caller().subject, query.state, query.array, query.limit, query.cursor)
    )


@blueprint.get("/<id:job>")
@Operation(
    "getJob",
    access=READ,
    headers=(IF_NONE_MATCH,),
    replies={
        200: Reply("the job", Job, {"ETag": "changes whenever the job does"}),
        304: Reply("the job has not changed since"),
    },
    errors=(404,),
)
def show(job: str) -> Response:
    """Show one job.

    Poll with the ETag of the last answer in If-None-Match: an unchanged job costs next to nothing.
    """
    jobs, owner = repository().jobs, caller().subject
    # Read before the job: if the job changes in between, the older tag only costs one more answer,
    # and no change is missed.
    etag = str(jobs.version(job, owner))
    if request.if_none_match.contains(etag):
        return Response(status=304, headers={"ETag": f'"{etag}"', "Cache-Control": "no-cache"})
    return json_reply(jobs.get(job, owner), headers={"ETag": f'"{etag}"'})


@blueprint.get("/<id:job>/events")
@Operation(
    "listEvents",
    access=READ,
    query=EventQuery,
    replies={200: Reply("events, oldest first", EventList)},
    errors=(404,),
)
def events(job: str) -> Response:
    """Show a job's history."""
    query = read_query(EventQuery)
    found = repository().jobs.events(job, query.after, caller().subject)
    return json_reply(EventList(events=tuple(found)))


@blueprint.get("/<id:job>/<stream:name>")
@Operation(
    "readStream",
    access=READ,
    headers=STREAM_BYTES_HEADERS,
    replies=STREAM_BYTES,
    errors=(404, 416),
)
def stream(job: str, name: str) -> Response:
    """Read a job's output, error output or console.

    A stream grows while the job runs. To follow it, ask for the range that begins where the last
    answer ended; 416 means that there is nothing new.
    """
    reader = repository().jobs.open_stream(job, StreamName(name), caller().subject)
    return send(reader.size, reader.chunks)


@blueprint.get("/<id:job>/outputs")
@Operation(
    "listOutputs",
    access=READ,
    replies={200: Reply("the files", OutputList)},
    errors=(404,),
)
def outputs(job: str) -> Response:
    """List the files that a job delivered, and those that were refused."""
    return json_reply(repository().jobs.outputs(job, caller().subject))


@blueprint.get("/<id:job>/outputs/<relative:path>")
@Operation(
    "readOutput",
    access=access_for(Scope.STORAGE_READ),
    headers=BYTES_HEADERS,
    replies=BYTES,
    errors=(404, 416, 422),
)
def output(job: str, path: str) -> Response:
    """Read a file that a job delivered. Its ETag is the file's digest."""
    return send_blob(repository().jobs.open_output(job, path, caller().subject))


@blueprint.delete("/<id:job>")
@Operation(
    "cancelJob",
    access=access_for(Scope.COMPUTE_CANCEL),
    replies={202: Reply("the job is being stopped", Job)},
    errors=(404, 409),
)
def cancel(job: str) -> Response:
    """Cancel a job.

    It is CANCELING until its virtual machine is known to be gone. Repeating the call is no error.
    """
    parts = services()
    return json_reply(
        parts.repository.job_actions.cancel(job, caller().subject, parts.dispatcher.change_jobs), 202
    )


@sets.post("/jobs:<action:action>")
@Operation(
    "changeJobs",
    access=access_for(Scope.COMPUTE_CANCEL),
    body=JobSelection,
    replies={202: Reply("the present states; the change is under way", JobStatusList)},
    errors=(404, 409),
)
def change(action: str) -> Response:
    """Cancel, hold or release many jobs at once, by job ids or array ids, and state.

    Jobs that have ended, and others that cannot be held or released, stay as they are: that is no
    error. If one does not exist, nothing is done.
    """
    parts, selection = services(), read_body(JobSelection)
    found = parts.repository.job_actions.change(
        JobAction(action), selection, caller().subject, parts.dispatcher.change_jobs
    )
    return json_reply(JobStatusList(jobs=tuple(found)), 202)
