"""Input files: uploaded once, by digest, used by any number of jobs."""

from __future__ import annotations

from typing import Final

from flask import Blueprint
from werkzeug.wrappers import Response

from api.operation import (
    Binary,
    Reply,
    anyone_with,
    backend,
    body_stream,
    caller,
    empty_reply,
    operation,
)
from api.problems import BadBlob
from api.tokens import Scope
from vmjobs.errors import DigestMismatch, NotFound

blueprint = Blueprint("blobs", __name__, url_prefix="/v1/blobs")

TAG: Final = "blobs"


@blueprint.route("/<digest:digest>", methods=["HEAD"])
@operation(
    "haveBlob",
    tag=TAG,
    access=anyone_with(Scope.STORAGE_CREATE, Scope.STORAGE_READ),
    replies={200: Reply("it is here")},
    errors=(404, 422),
)
def have(digest: str) -> Response:
    """Ask whether a blob is here, so that it need not be sent.

    A blob is there for those who sent it, and for owners of jobs that delivered it.
    """
    if not backend().repository.has_blob(caller().subject, digest):
        raise NotFound(f"there is no blob {digest} of yours")
    return empty_reply(200)


@blueprint.put("/<digest:digest>")
@operation(
    "putBlob",
    tag=TAG,
    access=anyone_with(Scope.STORAGE_CREATE),
    body=Binary("the bytes that the digest names"),
    replies={201: Reply("stored"), 200: Reply("you had it here already")},
    errors=(413, 422, 507),
)
def put(digest: str) -> Response:
    """Upload a blob. One that no job uses is removed when its owner has not asked for it for a day.

    The bytes are checked against the digest while they arrive; what does not match is not kept.
    """
    try:
        new = backend().repository.put_blob(caller().subject, digest, body_stream())
    except DigestMismatch as error:
        raise BadBlob(error.message, hint="the file may have changed during upload") from error
    return empty_reply(201 if new else 200)
