"""The bytes of images: all identified by digest, so that any client may cache them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flask import Blueprint, Flask
from werkzeug.wrappers import Response

from api.images import current_viewer
from api.operation import Operation, access_for
from api.ranges import BYTES, BYTES_HEADERS, send, send_bytes, send_object
from api.segment_fast_path import SegmentFastPath
from api.services import repository, services
from api.tokens import Scope
from images.content import ContentLayout
from repository.images import Viewer
from vmjobs.wire import Visibility

blueprint = Blueprint("image_bytes", __name__, url_prefix="/v1/images/<image_digest:digest>")

FETCH: Final = access_for(Scope.STORAGE_READ, Scope.NODE, job=True)
ERRORS: Final = (404, 409, 416, 422)


def install(app: Flask) -> None:
    """Answer requests for segments before the framework, if these are local files."""
    parts = services(app)
    if parts.repository.objects.local:  # other stores have no files to send
        app.wsgi_app = SegmentFastPath(app.wsgi_app, parts, FETCH)  # type: ignore[method-assign]


def _public(who: Viewer, digest: str) -> bool:
    return repository().catalog.visibility(who, digest) is Visibility.PUBLIC


@blueprint.get("/manifest")
@Operation("readManifest", access=FETCH, headers=BYTES_HEADERS, replies=BYTES, errors=ERRORS)
def manifest(digest: str) -> Response:
    """Read an image's manifest: the bytes that its digest covers."""
    who = current_viewer()
    data = repository().catalog.manifest(who, digest)
    return send_bytes(data, etag=digest, immutable=True, public=_public(who, digest))


@blueprint.get("/signature")
@Operation("readSignature", access=FETCH, headers=BYTES_HEADERS, replies=BYTES, errors=ERRORS)
def signature(digest: str) -> Response:
    """Read an image's signatures, separated by spaces; nothing if it has none.

    The node that boots the image verifies them with its own keys.
    """
    return send_bytes(
        repository().catalog.signature(current_viewer(), digest).encode("ascii", "ignore")
    )


@blueprint.get("/contents/<content:content>/layout")
@Operation("readLayout", access=FETCH, headers=BYTES_HEADERS, replies=BYTES, errors=ERRORS)
def layout(digest: str, content: str) -> Response:
    """Read a content's layout: the bytes of its digest, with its segments' digests."""
    who = current_viewer()
    data = repository().contents.layout(who, digest, content)
    etag = f"{content}/layout"
    return send_bytes(data, etag=etag, immutable=True, public=_public(who, digest))


@blueprint.get("/contents/<content:content>")
@Operation("readContent", access=FETCH, headers=BYTES_HEADERS, replies=BYTES, errors=ERRORS)
def content(digest: str, content: str) -> Response:
    """Read a content as plain bytes: a disk, a kernel or an initial RAM disk.

    Clients that support segments should fetch those: they are compressed and cost the service less.
    """
    who, contents = current_viewer(), repository().contents
    parts = ContentLayout.parse(contents.layout(who, digest, content), content)

    def read(start: int, stop: int) -> Iterator[bytes]:
        return contents.read(parts, start, stop - start)

    return send(parts.size, read, etag=content, immutable=True, public=_public(who, digest))


@blueprint.get("/segments/<segment:segment>")
@Operation("readSegment", access=FETCH, headers=BYTES_HEADERS, replies=BYTES, errors=ERRORS)
def segment(digest: str, segment: str) -> Response:
    """Read a segment as stored: a header with each chunk's digest, then the chunks."""
    reader, seen_by = repository().segment_server.open(current_viewer(), digest, bytes.fromhex(segment))
    return send_object(reader, etag=segment, immutable=True, public=seen_by is Visibility.PUBLIC)
