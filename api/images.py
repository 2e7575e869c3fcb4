"""Images: which there are, and their bytes for the nodes that boot them."""

from __future__ import annotations

import json
from typing import Final

from flask import Blueprint
from werkzeug.wrappers import Response

from api.attempts import require_open
from api.operation import Reply, anyone_with, backend, caller, json_reply, operation
from api.ranges import BYTES, IF_NONE_MATCH, RANGE_HEADERS, FileSource, MemorySource, send
from api.tokens import Scope
from images.manifest import ImageManifest
from vmjobs.errors import Forbidden, NotFound
from vmjobs.wire import ImageDetail, ImageInfo, ImageList

blueprint = Blueprint("images", __name__, url_prefix="/v1/images")

TAG: Final = "images"
LOOK: Final = anyone_with(Scope.COMPUTE_READ, Scope.NODE)
FETCH: Final = anyone_with(Scope.STORAGE_READ, Scope.NODE, job=True)


@blueprint.get("")
@operation("listImages", tag=TAG, access=LOOK, replies={200: Reply("the images", ImageList)})
def index() -> Response:
    """List the images that jobs can name."""
    found = (ImageInfo(**vars(entry)) for entry in backend().images.list())
    return json_reply(ImageList(images=tuple(found)))


@blueprint.get("/<image:ref>")
@operation(
    "getImage",
    tag=TAG,
    access=LOOK,
    replies={200: Reply("the image", ImageDetail)},
    errors=(404, 422),
)
def show(ref: str) -> Response:
    """Show one image, by name, name:tag or digest."""
    store = backend().images
    digest = store.resolve(ref)
    entry = next((e for e in store.list() if e.digest == digest and _named(ref, e.name, e.tag)), None)
    manifest = store.manifest(digest)
    return json_reply(
        ImageDetail(
            name=manifest.name,
            tag=entry.tag if entry else "",
            digest=digest,
            size=sum(blob.size for blob in manifest.blobs()),
            manifest=json.loads(manifest.canonical()),
        )
    )


def _named(ref: str, name: str, tag: str) -> bool:
    return ref in {name, f"{name}:{tag}"} or ref.startswith("sha256:")


@blueprint.get("/<digest:digest>/manifest")
@operation(
    "readManifest",
    tag=TAG,
    access=FETCH,
    headers=(*RANGE_HEADERS, IF_NONE_MATCH),
    replies=BYTES,
    errors=(404, 409, 416, 422),
)
def manifest(digest: str) -> Response:
    """Read an image's manifest: the very bytes that its digest is made of."""
    _readable(digest)
    data = backend().images.manifest_bytes(digest)
    return send(MemorySource(data), etag=digest, immutable=True)


@blueprint.get("/<digest:digest>/blobs/<digest:blob>")
@operation(
    "readImageBlob",
    tag=TAG,
    access=FETCH,
    headers=(*RANGE_HEADERS, IF_NONE_MATCH),
    replies=BYTES,
    errors=(404, 409, 416, 422),
)
def blob(digest: str, blob: str) -> Response:
    """Read one of an image's blobs: root disk, kernel or initial RAM disk."""
    if blob not in {part.digest for part in _readable(digest).blobs()}:
        raise NotFound(f"the image {digest} has no blob {blob}")
    source = FileSource(backend().images.blob_path(blob))
    return send(source, etag=blob, immutable=True, close=source.close)


def _readable(digest: str) -> ImageManifest:
    """The manifest, if the caller may read this image: a job's token is good for its own."""
    job_id = caller().job_id
    if job_id is not None and require_open(job_id).image_digest != digest:
        raise Forbidden("a job's token is good for the job's own image only")
    return backend().images.manifest(digest)
