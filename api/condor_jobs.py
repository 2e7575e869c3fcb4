"""Transparent jobs of HTCondor: nodes store their checkpoints and resume from them."""

from __future__ import annotations

from typing import Final

from flask import Blueprint
from werkzeug.wrappers import Response

from api.attempts import CheckpointQuery
from api.operation import (
    AccessRule,
    Operation,
    Reply,
    access_for,
    empty_reply,
    json_reply,
    read_body,
    read_query,
)
from api.ranges import BYTES, BYTES_HEADERS, send_bytes, send_object
from api.services import repository, services
from api.tokens import Scope
from repository.jobs.condor_jobs import OWNER_PREFIX
from vmjobs.model import Checkpoint
from vmjobs.wire import CondorJobClaim, CondorJobTicket

blueprint = Blueprint("condor_jobs", __name__, url_prefix="/v1/condor-jobs/<condor_job:job>")

NODE: Final = access_for(Scope.NODE)
AGENT: Final = AccessRule(job=True)


@blueprint.post("/attempts")
@Operation(
    "claimCondorJob",
    access=NODE,
    body=CondorJobClaim,
    replies={201: Reply("the attempt has the job now", CondorJobTicket)},
)
def claim(job: str) -> Response:
    """Claim a transparent job whose VM is to be saved on eviction.

    The agent derives its id from HTCondor's own. Older attempts are fenced off.
    """
    wish = read_body(CondorJobClaim)
    found = repository().condor_jobs.claim(job, wish)
    token = services().issuer.job_token(job, f"{OWNER_PREFIX}{wish.owner}")
    return json_reply(CondorJobTicket(token=token, checkpoint=found), 201)


@blueprint.put("/attempts/<attempt:attempt>/checkpoint")
@Operation(
    "keepCondorCheckpoint",
    access=AGENT,
    query=CheckpointQuery,
    body=Checkpoint,
    replies={204: Reply("the next attempt resumes from it")},
    errors=(404, 409, 422, 507),
)
def keep(job: str, attempt: str) -> Response:
    """Store the job's checkpoint, in place of an earlier one."""
    upload = read_query(CheckpointQuery).upload
    repository().condor_jobs.keep_checkpoint(job, attempt, upload, read_body(Checkpoint))
    return empty_reply()


@blueprint.post("/attempts/<attempt:attempt>/not-resumed")
@Operation(
    "tellNotResumed",
    access=AGENT,
    replies={204: Reply("accepted")},
    errors=(404, 409),
)
def not_resumed(job: str, attempt: str) -> Response:
    """Report that the attempt could not resume from the checkpoint.

    After the second report the checkpoint is deleted.
    """
    repository().condor_jobs.record_resume_failure(job, attempt)
    return empty_reply()


@blueprint.delete("/attempts/<attempt:attempt>")
@Operation(
    "endCondorJob",
    access=AGENT,
    replies={204: Reply("deleted")},
    errors=(404, 409),
)
def end(job: str, attempt: str) -> Response:
    """Report that the job is over; its checkpoint is deleted."""
    repository().condor_jobs.end(job, attempt)
    return empty_reply()


@blueprint.get("/checkpoint/contents/<content:content>/layout")
@Operation(
    "readCondorCheckpointLayout",
    access=AGENT,
    headers=BYTES_HEADERS,
    replies=BYTES,
    errors=(404, 416, 422),
)
def checkpoint_layout(job: str, content: str) -> Response:
    """Read the layout of a file of the job's checkpoint."""
    return send_bytes(repository().checkpoints.layout(job, content))


@blueprint.get("/checkpoint/segments/<segment:segment>")
@Operation(
    "readCondorCheckpointSegment",
    access=AGENT,
    headers=BYTES_HEADERS,
    replies=BYTES,
    errors=(404, 416, 422),
)
def checkpoint_segment(job: str, segment: str) -> Response:
    """Read a segment of the job's checkpoint as it is stored."""
    reader = repository().checkpoints.open_segment(job, bytes.fromhex(segment))
    return send_object(reader, etag=segment)
