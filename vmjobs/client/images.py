"""The API of the image repository, for users and their programs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Final

from vmjobs.client.transport import (
    BYTES_HEADERS,
    FIRST_POLL_SECONDS,
    JSON_HEADERS,
    ApiClient,
    Retries,
    next_poll_pause,
)
from vmjobs.client.uploads import UploadClient, quote_path
from vmjobs.wire import (
    Build,
    BuildList,
    BuildRequest,
    GcReport,
    ImageChange,
    ImageDetail,
    ImageInfo,
    ImageList,
    ImageTag,
    PrefetchRequest,
    PrefetchState,
    Publication,
    TagTarget,
    Upload,
    UploadRequest,
    VerifyReport,
)

#: Long, so that transfers survive a restart of the repository.
TRANSFER_RETRIES: Final = Retries(deadline=120.0, ceiling=5.0)


class Images(ApiClient):
    """The images of a service that one user may see.

    Methods raise the error that the service answers with: ``NotFound``, ``Forbidden``,
    ``QuotaExceeded``, ``ImageRejected``, ``ImageInUse`` …, and ``Unavailable`` if it does not answer
    in time.
    """

    default_retries = TRANSFER_RETRIES

    # -- reading

    def list(self) -> list[ImageInfo]:
        """The tagged images, one entry for each tag."""
        pages = self._http.pages(ImageList, "/v1/images")
        return [image for page in pages for image in page.images]

    def detail(self, ref: str) -> ImageDetail:
        """One image with its manifest, by digest, name, name:tag or namespace/name:tag."""
        return self._http.get(ImageDetail, f"/v1/images/{quote_path(ref, '/:')}")

    # -- changing

    def publish(self, publication: Publication) -> ImageDetail:
        """Make an image of uploaded contents, and tag it."""
        return self._http.send(ImageDetail, "POST", "/v1/images", publication)

    def change(self, digest: str, change: ImageChange) -> ImageDetail:
        """Change an image's visibility, lifetime, deprecation or signature."""
        body = change.model_dump_json(exclude_unset=True).encode()
        path = f"/v1/images/{quote_path(digest)}"
        return self._http.send(ImageDetail, "PATCH", path, body, headers=JSON_HEADERS)

    def remove(self, digest: str) -> None:
        """Remove an image with all of its tags.

        Raises:
            ImageInUse: jobs need it; the message names them.
        """
        self._http.call("DELETE", f"/v1/images/{quote_path(digest)}")

    def tag(self, namespace: str, name: str, tag: str, digest: str) -> ImageTag:
        """Set a tag, new or existing, to an image. namespace: empty: the caller's own."""
        target = TagTarget(digest=digest)
        return self._http.send(ImageTag, "PUT", _tag_path(namespace, name, tag), target)

    def untag(self, namespace: str, name: str, tag: str) -> None:
        """Remove a tag."""
        self._http.call("DELETE", _tag_path(namespace, name, tag))

    # -- building

    def build(self, request: BuildRequest, *, key: str = "") -> Build:
        """Have the service build an image. ``key`` makes repeating the call harmless.

        Raises:
            InvalidRequest: with every fault of the recipe.
        """
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return self._http.send(Build, "POST", "/v1/builds", request, headers=headers)

    def builds(self, limit: int = 100) -> Sequence[Build]:
        """The caller's builds, newest first."""
        return self._http.get(BuildList, "/v1/builds", {"limit": limit}).builds

    def build_state(self, build: str) -> Build:
        """The state of a build."""
        return self._http.get(Build, f"/v1/builds/{quote_path(build)}")

    def cancel_build(self, build: str) -> Build:
        """Cancel a build; its image is not published.

        Raises:
            Conflict: it has ended, or its image is being published.
        """
        return self._http.send(Build, "DELETE", f"/v1/builds/{quote_path(build)}")

    def follow_build(self, build: str, on_change: Callable[[Build], None] | None = None) -> Build:
        """Wait for the end of a build; returns it. on_change: called whenever it changes."""
        last, pause = None, FIRST_POLL_SECONDS
        while True:
            found = self.build_state(build)
            changed = found != last
            if changed and on_change:
                on_change(found)
            if found.state.final:
                return found
            last, pause = found, next_poll_pause(pause, changed=changed)
            self._http.pause(pause)

    # -- uploads

    def open_upload(self, size: int) -> UploadClient:
        """Open an upload for ``size`` bytes of content."""
        request = UploadRequest(size=size)
        return UploadClient(self._http, self._http.send(Upload, "POST", "/v1/uploads", request))

    def upload(self, upload_id: str) -> UploadClient:
        """An upload that was opened earlier.

        Raises:
            NotFound: there is no such upload, or it has expired.
        """
        found = self._http.get(Upload, f"/v1/uploads/{quote_path(upload_id)}")
        return UploadClient(self._http, found)

    # -- maintenance

    def verify(self, digest: str, segments: Sequence[bytes]) -> VerifyReport:
        """Have the service read and check some stored segments of an image."""
        path = f"/v1/images/{quote_path(digest)}/verify"
        body = b"".join(segments)
        return self._http.send(VerifyReport, "POST", path, body, headers=BYTES_HEADERS)

    def prefetch(self, digest: str, request: PrefetchRequest) -> PrefetchState:
        """Have nodes fetch an image; repeating the call reports their progress."""
        path = f"/v1/images/{quote_path(digest)}/prefetch"
        return self._http.send(PrefetchState, "POST", path, request)

    def collect(self, *, dry_run: bool = False) -> GcReport:
        """Run a garbage collection, which removes unreferenced data."""
        wish = {"dry_run": str(dry_run).lower()}
        return self._http.send(GcReport, "POST", "/v1/gc", b"", params=wish)


def _tag_path(namespace: str, name: str, tag: str) -> str:
    return f"/v1/tags/{quote_path(namespace or '_')}/{quote_path(name)}/{quote_path(tag)}"
