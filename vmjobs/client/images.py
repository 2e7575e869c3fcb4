"""The image repository as people and their programs use it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import requests
from pydantic import BaseModel

from vmjobs.client.agent import JSON_HEADERS, encoded
from vmjobs.client.transport import Retries, Transport, parse
from vmjobs.client.uploads import BYTES_HEADERS, UploadClient, part_of
from vmjobs.closing import Closing
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

#: A repository that is restarted in the middle of a long transfer is no reason to give it up.
TRANSFER_RETRIES: Final = Retries(deadline=120.0, ceiling=5.0)
#: Seconds between two looks at a build: after a change, and at most.
FIRST_POLL: Final = 0.3
LAST_POLL: Final = 2.0


_Model = TypeVar("_Model", bound=BaseModel)


class Images(Closing):
    """One person's view of the images of a service.

    Methods raise what the service answers with: ``NotFound``, ``Forbidden``, ``QuotaExceeded``,
    ``ImageRejected``, ``ImageInUse`` …, and ``Unavailable`` where it does not answer in time.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        session: requests.Session | None = None,
        retries: Retries = TRANSFER_RETRIES,
    ) -> None:
        self._http = Transport(url, token, session=session, retries=retries)

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._http.close()

    # -- looking

    def list(self) -> list[ImageInfo]:
        """The images that can be named, one entry for each name."""
        pages = self._http.pages(ImageList, "/v1/images")
        return [image for page in pages for image in page.images]

    def detail(self, ref: str) -> ImageDetail:
        """One image with its manifest, by digest, name, name:tag or namespace/name:tag."""
        return self._http.get(ImageDetail, f"/v1/images/{part_of(ref, '/:')}")

    # -- changing

    def publish(self, publication: Publication) -> ImageDetail:
        """Make an image of contents that are there, and give it a name."""
        return self._send(ImageDetail, "POST", "/v1/images", encoded(publication))

    def change(self, digest: str, change: ImageChange) -> ImageDetail:
        """Change who may see an image, how long it is kept, or what is said of it."""
        body = change.model_dump_json(exclude_unset=True).encode()
        return self._send(ImageDetail, "PATCH", f"/v1/images/{part_of(digest)}", body)

    def remove(self, digest: str) -> None:
        """Remove an image with all of its names.

        Raises:
            ImageInUse: jobs need it; the message names them.
        """
        self._http.call("DELETE", f"/v1/images/{part_of(digest)}")

    def tag(self, namespace: str, name: str, tag: str, digest: str) -> ImageTag:
        """Have a name mean an image, whatever it meant before. namespace: empty: one's own."""
        body = encoded(TagTarget(digest=digest))
        return self._send(ImageTag, "PUT", _tag(namespace, name, tag), body)

    def untag(self, namespace: str, name: str, tag: str) -> None:
        """Take a name away."""
        self._http.call("DELETE", _tag(namespace, name, tag))

    def _send(self, model: type[_Model], method: str, path: str, body: bytes) -> _Model:
        answer = self._http.call(method, path, body=body, headers=JSON_HEADERS, repeatable=True)
        return parse(model, answer)

    # -- building

    def build(self, request: BuildRequest, *, key: str = "") -> Build:
        """Have the service build an image. ``key`` makes repeating the call harmless.

        Raises:
            InvalidRequest: with every fault of the recipe.
        """
        headers = {**JSON_HEADERS, "Idempotency-Key": key or uuid.uuid4().hex}
        body = encoded(request)
        answer = self._http.call("POST", "/v1/builds", body=body, headers=headers, repeatable=True)
        return parse(Build, answer)

    def builds(self, limit: int = 100) -> Sequence[Build]:
        """One's own builds, newest first."""
        return self._http.get(BuildList, "/v1/builds", {"limit": limit}).builds

    def build_state(self, build: str) -> Build:
        """How far a build is."""
        return self._http.get(Build, f"/v1/builds/{part_of(build)}")

    def cancel_build(self, build: str) -> Build:
        """End a build; its image is not published.

        Raises:
            Conflict: it has ended, or its image is being published.
        """
        return parse(Build, self._http.call("DELETE", f"/v1/builds/{part_of(build)}"))

    def follow_build(self, build: str, on_change: Callable[[Build], None] | None = None) -> Build:
        """Wait until a build has ended; as it is then. on_change: called whenever it has changed."""
        last, pause = None, FIRST_POLL
        while True:
            found = self.build_state(build)
            changed = found != last
            if changed and on_change:
                on_change(found)
            if found.state.final:
                return found
            last, pause = found, FIRST_POLL if changed else min(LAST_POLL, pause * 1.5)
            self._http.pause(pause)

    # -- uploads

    def open_upload(self, size: int) -> UploadClient:
        """Room for ``size`` bytes of content."""
        body = encoded(UploadRequest(size=size))
        return UploadClient(self._http, self._send(Upload, "POST", "/v1/uploads", body))

    def upload(self, upload_id: str) -> UploadClient:
        """An upload that was opened earlier.

        Raises:
            NotFound: there is none, or it was given up.
        """
        found = self._http.get(Upload, f"/v1/uploads/{part_of(upload_id)}")
        return UploadClient(self._http, found)

    # -- looking after them

    def verify(self, digest: str, segments: Sequence[bytes]) -> VerifyReport:
        """Have some of an image's segments read and checked where they are stored."""
        path = f"/v1/images/{part_of(digest)}/verify"
        body = b"".join(segments)
        answer = self._http.call("POST", path, body=body, headers=BYTES_HEADERS, repeatable=True)
        return parse(VerifyReport, answer)

    def prefetch(self, digest: str, request: PrefetchRequest) -> PrefetchState:
        """Have nodes fetch an image; asking again tells how far they are."""
        path = f"/v1/images/{part_of(digest)}/prefetch"
        return self._send(PrefetchState, "POST", path, encoded(request))

    def collect(self, *, dry_run: bool = False) -> GcReport:
        """Have removed what nothing needs any more."""
        wish = {"dry_run": str(dry_run).lower()}
        answer = self._http.call("POST", "/v1/gc", params=wish, body=b"", repeatable=True)
        return parse(GcReport, answer)


def _tag(namespace: str, name: str, tag: str) -> str:
    return f"/v1/tags/{part_of(namespace or '_')}/{part_of(name)}/{part_of(tag)}"
