"""Input files: uploaded once, by digest, for any number of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flask import Blueprint
from werkzeug.wrappers import Response

from api.operation import (
    BinaryBody,
    Operation,
    Reply,
    access_for,
    body_stream,
    caller,
    empty_reply,
)
from api.problems import BlobDigestMismatch
from api.services import repository
from api.tokens import Scope
from vmjobs.errors import DigestMismatch, NotFound

blueprint = Blueprint("blobs", __name__, url_prefix="/v1/blobs")


@contextmanager
def digest_errors() -> Iterator[None]:
    """Report damaged data as a fault of the upload that brings it."""
    try:
        yield
    except DigestMismatch as error:
        hint = "the file may have changed during upload"
        raise BlobDigestMismatch(error.message, hint=hint) from error


@blueprint.route("/<digest:digest>", methods=["HEAD"])
@Operation(
    "haveBlob",
    access=access_for(Scope.STORAGE_CREATE, Scope.STORAGE_READ),
    replies={200: Reply("the blob exists")},
    errors=(404, 422),
)
def have(digest: str) -> Response:
    """Check whether a blob exists, so that it need not be sent.

    A blob exists for users who sent it, and for owners of jobs that delivered it.
    """
    if not repository().blob_owners.has(caller().subject, digest):
        raise NotFound(f"you have no blob {digest}")
    return empty_reply(200)


@blueprint.put("/<digest:digest>")
@Operation(
    "putBlob",
    access=access_for(Scope.STORAGE_CREATE),
    body=BinaryBody("the bytes that the digest names"),
    replies={201: Reply("stored"), 200: Reply("you had stored it before")},
    errors=(413, 422, 507),
)
def put(digest: str) -> Response:
    """Upload a blob. An unused blob is removed a day after its owner last asked for it.

    The bytes are checked against the digest while they arrive; a mismatch is discarded.
    """
    with digest_errors():
        new = repository().blob_owners.put(caller().subject, digest, body_stream())
    return empty_reply(201 if new else 200)
