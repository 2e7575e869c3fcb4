"""Images: queries and changes. For their bytes see :mod:`api.image_bytes`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flask import Blueprint
from pydantic import Field, ValidationError
from werkzeug.wrappers import Response

from api.attempts import require_unfinished
from api.operation import (
    BinaryBody,
    Operation,
    Reply,
    access_for,
    caller,
    empty_reply,
    json_reply,
    read_body,
    read_limited,
    read_query,
)
from api.paging import PageQuery, requested_window
from api.services import repository
from api.tokens import Principal, Scope
from images.manifest import ImageManifest
from repository.images import Viewer
from vmjobs.errors import Fault, InvalidRequest, NotFound
from vmjobs.model import FrozenModel
from vmjobs.wire import (
    CONDOR_JOB,
    MAX_DIGESTS,
    GcReport,
    ImageChange,
    ImageDetail,
    ImageList,
    ImageTag,
    PrefetchRequest,
    PrefetchState,
    Publication,
    TagTarget,
    VerifyReport,
)

blueprint = Blueprint("images", __name__, url_prefix="/v1")

READ: Final = access_for(Scope.COMPUTE_READ, Scope.STORAGE_READ, Scope.NODE)
CREATE: Final = access_for(Scope.STORAGE_CREATE)
MODIFY: Final = access_for(Scope.STORAGE_MODIFY)
#: Size of a digest, in bytes.
DIGEST_BYTES: Final = 32
#: Segments that one request can verify: half a GiB.
MAX_VERIFIED: Final = 64
DIGESTS: Final = BinaryBody(f"digests of {DIGEST_BYTES} bytes each, at most {MAX_DIGESTS}")


class GcQuery(FrozenModel):
    """Options of a garbage collection."""

    dry_run: bool = Field(False, description="remove nothing; report what would be removed")


def current_viewer() -> Viewer:
    """Return the caller, for permissions on images; a transparent job has no image.

    Raises:
        JobFinal, NotFound: the token of a job that has ended.
    """
    who = caller()
    if who.job_id is None:
        return viewer_for(who)
    if not who.job_id.startswith(CONDOR_JOB):
        own = require_unfinished(who.job_id).image_digest
    elif repository().condor_jobs.exists(who.job_id):
        own = ""
    else:
        raise NotFound(f"there is no job {who.job_id}, or it is over")
    return replace(viewer_for(who, own), job=who.job_id)


def viewer_for(who: Principal, own: str | None = None) -> Viewer:
    """Return a principal, for permissions on images. own: image of its token's job."""
    return Viewer(
        user=who.subject,
        groups=who.groups,
        admin=Scope.ADMIN in who.scopes,
        node=Scope.NODE in who.scopes,
        image=own,
    )


def read_digests(limit: int = MAX_DIGESTS) -> list[bytes]:
    """Return the request's body as at most ``limit`` digests.

    Raises:
        InvalidRequest, PayloadTooLarge: it is not as :data:`DIGESTS` says.
    """
    data = read_limited(limit * DIGEST_BYTES)
    if not data or len(data) % DIGEST_BYTES:
        message = f"must be digests of {DIGEST_BYTES} bytes each, at least one"
        raise InvalidRequest(f"the body {message}", faults=[Fault("", "bad_digests", message)])
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]


# --------------------------------------------------------------------------- looking


@blueprint.get("/images")
@Operation(
    "listImages",
    access=READ,
    query=PageQuery,
    replies={200: Reply("a page of images", ImageList)},
)
def index() -> Response:
    """List the images that the caller may name, one entry for each name."""
    found, cursor = repository().catalog.page(current_viewer(), requested_window())
    return json_reply(ImageList(images=tuple(found), next=cursor))


@blueprint.get("/images/<image:ref>")
@Operation(
    "getImage",
    access=READ,
    replies={200: Reply("the image", ImageDetail)},
    errors=(404, 422),
)
def show(ref: str) -> Response:
    """Show one image, by name, name:tag or digest.

    A name is looked for in the caller's own namespace and then in `library`.
    """
    return json_reply(repository().catalog.detail(current_viewer(), ref))


@blueprint.get("/images/<namespace:namespace>/<tagged:name>")
@Operation(
    "getNamedImage",
    access=READ,
    replies={200: Reply("the image", ImageDetail)},
    errors=(404, 422),
)
def show_named(namespace: str, name: str) -> Response:
    """Show one image of a namespace, by name or name:tag."""
    return json_reply(repository().catalog.detail(current_viewer(), f"{namespace}/{name}"))


# --------------------------------------------------------------------------- publishing and changing


@blueprint.post("/images")
@Operation(
    "publishImage",
    access=CREATE,
    body=Publication,
    replies={
        201: Reply("published", ImageDetail, {"Location": "the image"}),
        200: Reply("it existed; it has the name now", ImageDetail, {"Location": "the image"}),
    },
    errors=(404, 409),
)
def publish() -> Response:
    """Create an image from uploaded contents, and give it a name.

    The contents are inspected first; an image that should not be booted is refused with
    IMAGE_REJECTED.
    """
    wish = read_body(Publication)
    who = current_viewer()
    there = _exists(who, wish)
    found = repository().publisher.publish(who, wish)
    return json_reply(found, 200 if there else 201, {"Location": f"/v1/images/{found.digest}"})


def _exists(who: Viewer, wish: Publication) -> bool:
    try:
        repository().catalog.detail(who, ImageManifest.model_validate(wish.manifest).digest)
    except (ValidationError, NotFound):
        return False  # publishing reports what is wrong with the manifest
    return True


@blueprint.patch("/images/<image_digest:digest>")
@Operation(
    "changeImage",
    access=MODIFY,
    body=ImageChange,
    replies={200: Reply("the changed image", ImageDetail)},
    errors=(404,),
)
def change(digest: str) -> Response:
    """Change who may see an image, how long it is kept, or its description."""
    return json_reply(repository().catalog.change(current_viewer(), digest, read_body(ImageChange)))


@blueprint.delete("/images/<image_digest:digest>")
@Operation(
    "removeImage",
    access=MODIFY,
    replies={204: Reply("removed, with all of its names")},
    errors=(404, 409, 422),
)
def remove(digest: str) -> Response:
    """Remove an image. One that a job needs stays: IMAGE_IN_USE names the jobs."""
    repository().catalog.remove(current_viewer(), digest)
    return empty_reply()


@blueprint.put("/tags/<own_namespace:namespace>/<name:name>/<tag:tag>")
@Operation(
    "setTag",
    access=MODIFY,
    body=TagTarget,
    replies={200: Reply("the name refers to this image now", ImageTag)},
    errors=(404,),
)
def set_tag(namespace: str, name: str, tag: str) -> Response:
    """Set a name, in place of its earlier meaning."""
    who = current_viewer()
    repository().catalog.tag(who, namespace, name, tag, read_body(TagTarget).digest)
    return json_reply(ImageTag(namespace=namespace or who.namespace, name=name, tag=tag))


@blueprint.delete("/tags/<own_namespace:namespace>/<name:name>/<tag:tag>")
@Operation(
    "dropTag",
    access=MODIFY,
    replies={204: Reply("the name is removed")},
    errors=(404, 409, 422),
)
def drop_tag(namespace: str, name: str, tag: str) -> Response:
    """Remove a name. The image stays."""
    repository().catalog.untag(current_viewer(), namespace, name, tag)
    return empty_reply()


# --------------------------------------------------------------------------- looking after them


@blueprint.post("/images/<image_digest:digest>/verify")
@Operation(
    "verifySegments",
    access=access_for(Scope.STORAGE_READ),
    body=BinaryBody(f"digests of {DIGEST_BYTES} bytes each, at most {MAX_VERIFIED}"),
    replies={200: Reply("the damaged segments, if any", VerifyReport)},
    errors=(404, 413, 422),
)
def verify(digest: str) -> Response:
    """Read some of an image's segments and verify every chunk."""
    return json_reply(
        repository().contents.verify(current_viewer(), digest, read_digests(MAX_VERIFIED))
    )


@blueprint.post("/images/<image_digest:digest>/prefetch")
@Operation(
    "prefetchImage",
    access=access_for(Scope.COMPUTE_CREATE),
    body=PrefetchRequest,
    replies={200: Reply("the nodes that shall have it, and those that do", PrefetchState)},
    errors=(404,),
)
def prefetch(digest: str) -> Response:
    """Have nodes fetch an image in advance. Repeating the call shows their progress."""
    return json_reply(
        repository().prefetcher.request(current_viewer(), digest, read_body(PrefetchRequest))
    )


@blueprint.post("/gc")
@Operation(
    "collectGarbage",
    access=access_for(Scope.ADMIN),
    query=GcQuery,
    replies={200: Reply("the removed objects", GcReport)},
)
def collect() -> Response:
    """Remove data that no image, job or upload needs, as the service itself does."""
    return json_reply(repository().garbage_collector.collect(dry_run=read_query(GcQuery).dry_run))
