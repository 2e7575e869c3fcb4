"""Uploads: hold the parts of images until an image refers to them."""

from __future__ import annotations

from typing import Final

from flask import Blueprint
from werkzeug.wrappers import Response

from api.attempts import require_unfinished
from api.blobs import digest_errors
from api.images import DIGESTS, current_viewer, read_digests
from api.operation import (
    BinaryBody,
    Operation,
    Reply,
    access_for,
    empty_reply,
    json_reply,
    read_body,
    read_limited,
)
from api.services import repository, services
from api.tokens import Scope
from images.content import layout_size
from images.segment import MAX_STORED_BYTES
from vmjobs.errors import Conflict, Forbidden
from vmjobs.model import MIB, JobState
from vmjobs.wire import CONDOR_JOB, Upload, UploadRequest

blueprint = Blueprint("uploads", __name__, url_prefix="/v1/uploads")

#: A job's token permits to upload a checkpoint of its VM, but not to create an image.
UPLOAD: Final = access_for(Scope.STORAGE_CREATE, job=True)
MISSING: Final = BinaryBody("a byte for each digest: 0 it is stored, 1 it is missing")


@blueprint.post("")
@Operation(
    "openUpload",
    access=UPLOAD,
    body=UploadRequest,
    replies={201: Reply("opened", Upload, {"Location": "the upload"})},
)
def open_upload() -> Response:
    """Open an upload.

    It is dropped if nothing is added to it for a while. A job has one at a time, and only if it has
    checkpoints.
    """
    who = current_viewer()
    if who.job and not who.job.startswith(CONDOR_JOB):
        job = require_unfinished(who.job)
        if not job.spec.checkpoint:
            raise Forbidden(f"job {job.id} has no checkpoints", hint="submit it with checkpoint")
        if job.state is JobState.CANCELING:
            raise Conflict(f"job {job.id} is being canceled")
    found = repository().uploads.begin(who, read_body(UploadRequest).size)
    return json_reply(found, 201, {"Location": f"/v1/uploads/{found.id}"})


@blueprint.get("/<id:upload>")
@Operation("getUpload", access=UPLOAD, replies={200: Reply("the upload", Upload)}, errors=(404,))
def show(upload: str) -> Response:
    """Show an upload of the caller's."""
    return json_reply(repository().uploads.get(current_viewer(), upload))


@blueprint.delete("/<id:upload>")
@Operation("dropUpload", access=UPLOAD, replies={204: Reply("dropped")}, errors=(404,))
def drop(upload: str) -> Response:
    """Drop an upload. The next garbage collection removes data that only it holds."""
    repository().uploads.drop(current_viewer(), upload)
    return empty_reply()


@blueprint.post("/<id:upload>/missing-segments")
@Operation(
    "findMissingSegments",
    access=UPLOAD,
    body=DIGESTS,
    replies={200: Reply("the missing ones", MISSING)},
    errors=(404, 413, 422),
)
def missing_segments(upload: str) -> Response:
    """Find out which segments to send. The upload keeps those that are stored."""
    return _flags(repository().uploads.missing_segments(current_viewer(), upload, read_digests()))


@blueprint.post("/<id:upload>/missing-blocks")
@Operation(
    "findMissingBlocks",
    access=UPLOAD,
    body=DIGESTS,
    replies={200: Reply("the missing ones", MISSING)},
    errors=(404, 413, 422),
)
def missing_chunks(upload: str) -> Response:
    """Find out which 64 KiB chunks to send with a missing segment."""
    return _flags(repository().uploads.missing_chunks(current_viewer(), upload, read_digests()))


def _flags(missing: list[bool]) -> Response:
    response = Response(bytes(missing), content_type=MISSING.media)
    response.headers["Cache-Control"] = "no-store"
    return response


@blueprint.put("/<id:upload>/segments/<segment:segment>")
@Operation(
    "putSegment",
    access=UPLOAD,
    body=BinaryBody("the segment; chunks that are stored may be omitted"),
    replies={201: Reply("stored"), 200: Reply("it was stored already")},
    errors=(404, 409, 413, 422, 507),
)
def put_segment(upload: str, segment: str) -> Response:
    """Send a segment.

    Every chunk is verified. MISSING_BLOCKS: an omitted chunk is not stored (any more); send the
    segment again with all of them.
    """
    body = read_limited(MAX_STORED_BYTES)
    with digest_errors():
        new = repository().segments.put(current_viewer(), upload, bytes.fromhex(segment), body)
    return empty_reply(201 if new else 200)


@blueprint.put("/<id:upload>/contents/<content:content>")
@Operation(
    "putContent",
    access=UPLOAD,
    body=BinaryBody("the content's layout"),
    replies={201: Reply("all of it is stored")},
    errors=(404, 409, 413, 422),
)
def put_content(upload: str, content: str) -> Response:
    """Declare the segments of a content. MISSING_BLOCKS: some are not stored."""
    parts = services()
    body = read_limited(layout_size(parts.config.max_image_size * MIB))
    with digest_errors():
        parts.repository.uploads.put_content(current_viewer(), upload, content, body)
    return empty_reply(201)
