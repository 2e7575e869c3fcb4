"""Attempts at a job: calls of an agent, with the token of the one job that it runs."""

from __future__ import annotations

from typing import Final

from flask import Blueprint, request, url_for
from pydantic import Field
from werkzeug.wrappers import Response

from api.operation import (
    AccessRule,
    BinaryBody,
    Operation,
    Reply,
    body_stream,
    empty_reply,
    json_reply,
    read_body,
    read_limited,
    read_query,
)
from api.problems import LengthRequired
from api.ranges import BYTES, BYTES_HEADERS, send_blob, send_bytes, send_object
from api.services import repository
from vmjobs.errors import Conflict, JobFinal
from vmjobs.model import (
    AttemptClaim,
    Checkpoint,
    FrozenModel,
    Job,
    JobTicket,
    Output,
    Report,
    StreamName,
)

blueprint = Blueprint("attempts", __name__, url_prefix="/v1/jobs/<id:job>")

AGENT: Final = AccessRule(job=True)
MAX_APPEND_BYTES: Final = 8 * 1024 * 1024


class AppendQuery(FrozenModel):
    """Position of an append."""

    offset: int = Field(ge=0, le=2**53, description="position in the stream, from 0")


def require_unfinished(job_id: str) -> Job:
    """Return the job, unless it has ended, which makes its token worthless.

    Raises:
        JobFinal: the job has ended.
    """
    job = repository().jobs.get(job_id)
    if job.state.final:
        raise JobFinal(f"job {job_id} has ended: it is {job.state}")
    return job


@blueprint.post("/attempts")
@Operation(
    "claimJob",
    access=AGENT,
    body=AttemptClaim,
    replies={201: Reply("the attempt has the job now", JobTicket)},
    errors=(404, 409),
)
def claim(job: str) -> Response:
    """Claim a job for a new attempt.

    Older attempts are fenced off: from now on their calls are refused with ATTEMPT_SUPERSEDED.
    """
    wish = read_body(AttemptClaim)
    ticket = repository().attempts.claim(job, wish)
    location = url_for("attempts.report", job=job, attempt=wish.attempt)
    return json_reply(ticket, 201, {"Location": location.removesuffix("/reports")})


@blueprint.post("/attempts/<attempt:attempt>/reports")
@Operation(
    "reportAttempt",
    access=AGENT,
    body=Report,
    replies={204: Reply("accepted")},
    errors=(404, 409),
)
def report(job: str, attempt: str) -> Response:
    """Report progress or the end of an attempt. Repeating a report is no error."""
    repository().attempts.report(job, attempt, read_body(Report))
    return empty_reply()


@blueprint.post("/attempts/<attempt:attempt>/streams/<stream:name>")
@Operation(
    "appendStream",
    access=AGENT,
    query=AppendQuery,
    body=BinaryBody("the bytes to append, 8 MiB at most"),
    replies={204: Reply("appended")},
    errors=(404, 409, 413),
)
def append(job: str, attempt: str, name: str) -> Response:
    """Append to one of the job's streams.

    Bytes that are there already stay as they are, so that a call may be repeated; an offset
    beyond the end is refused with 409.
    """
    offset = read_query(AppendQuery).offset
    data = read_limited(MAX_APPEND_BYTES)
    repository().attempts.append_stream(job, attempt, StreamName(name), offset, data)
    return empty_reply()


@blueprint.put("/attempts/<attempt:attempt>/outputs/<relative:path>")
@Operation(
    "putOutput",
    access=AGENT,
    body=BinaryBody("the file"),
    replies={201: Reply("stored", Output)},
    errors=(404, 409, 411, 413, 422, 507),
)
def put_output(job: str, attempt: str, path: str) -> Response:
    """Deliver an output file. Requires Content-Length."""
    size = request.content_length
    if size is None:
        raise LengthRequired("an output file needs a Content-Length")
    stored = repository().attempts.put_output(job, attempt, path, body_stream(), size)
    return json_reply(stored, 201)


class CheckpointQuery(FrozenModel):
    """The upload that holds the checkpoint's files."""

    upload: str = Field(max_length=64, description="the upload with the files")


@blueprint.put("/attempts/<attempt:attempt>/checkpoint")
@Operation(
    "keepCheckpoint",
    access=AGENT,
    query=CheckpointQuery,
    body=Checkpoint,
    replies={204: Reply("the next attempt resumes from it")},
    errors=(404, 409, 422, 507),
)
def keep(job: str, attempt: str) -> Response:
    """Store the job's checkpoint, in place of an earlier one."""
    upload = read_query(CheckpointQuery).upload
    repository().attempts.keep_checkpoint(job, attempt, upload, read_body(Checkpoint))
    return empty_reply()


@blueprint.get("/checkpoint/contents/<content:content>/layout")
@Operation(
    "readCheckpointLayout",
    access=AGENT,
    headers=BYTES_HEADERS,
    replies=BYTES,
    errors=(404, 409, 416, 422),
)
def checkpoint_layout(job: str, content: str) -> Response:
    """Read the layout of a file of the job's checkpoint."""
    require_unfinished(job)
    return send_bytes(repository().checkpoints.layout(job, content))


@blueprint.get("/checkpoint/segments/<segment:segment>")
@Operation(
    "readCheckpointSegment",
    access=AGENT,
    headers=BYTES_HEADERS,
    replies=BYTES,
    errors=(404, 409, 416, 422),
)
def checkpoint_segment(job: str, segment: str) -> Response:
    """Read a segment of the job's checkpoint as it is stored."""
    require_unfinished(job)
    reader = repository().checkpoints.open_segment(job, bytes.fromhex(segment))
    return send_object(reader, etag=segment)


@blueprint.get("/end")
@Operation(
    "readJobEnd",
    access=AGENT,
    replies={200: Reply("how the job ended", Report)},
    errors=(404, 409),
)
def end(job: str) -> Response:
    """Show how the job ended, in any attempt.

    For a node that gets a job from a scheduler which does not know that it has ended. A job that has
    not ended is refused with 409.
    """
    found = repository().jobs.get(job)
    if not found.state.final:
        raise Conflict(f"job {job} has not ended: it is {found.state}")
    return json_reply(
        Report(
            state=found.state,
            reason=found.reason,
            time=found.updated,
            hypervisor=found.hypervisor,
            exit=found.exit,
            seconds=found.seconds,
            bytes=found.bytes,
            cpu_seconds=found.cpu_seconds,
        )
    )


@blueprint.get("/inputs/<relative:name>")
@Operation(
    "readInput",
    access=AGENT,
    headers=BYTES_HEADERS,
    replies=BYTES,
    errors=(404, 409, 416, 422),
)
def read_input(job: str, name: str) -> Response:
    """Read one of the job's input files. Its ETag is the file's digest."""
    require_unfinished(job)
    return send_blob(repository().jobs.open_input(job, name))
