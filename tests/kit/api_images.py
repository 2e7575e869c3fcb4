"""Images over the REST interface, in process: a client's requests, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from images.content import SEGMENT_BYTES, ContentLayout
from images.manifest import ImageManifest, Part
from tests.kit.api_site import Caller
from tests.kit.segments import compute_layout_of_bytes, encode_segment

OCTETS = "application/octet-stream"
#: A disk of different segments: a full one, a hole, and a part of one.
DISK = b"".join([b"A" * SEGMENT_BYTES, bytes(SEGMENT_BYTES), bytes(range(256)) * 1024])


def open_upload(who: Caller) -> str:
    answer = who("POST", "/v1/uploads", json={"size": 1 << 30})
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"].endswith(answer.get_json()["id"])
    return str(answer.get_json()["id"])


def ask(who: Caller, upload: str, what: str, digests: Sequence[bytes]) -> list[bool]:
    """Ask which of these segments or chunks are missing."""
    path = f"/v1/uploads/{upload}/missing-{what}"
    answer = who("POST", path, data=b"".join(digests), content_type=OCTETS)
    assert answer.status_code == 200, answer.text
    assert set(answer.data) <= {0, 1}
    return [flag == 1 for flag in answer.data]


def put_segment(who: Caller, upload: str, digest: bytes, body: bytes) -> Any:
    path = f"/v1/uploads/{upload}/segments/{digest.hex()}"
    return who("PUT", path, data=body, content_type=OCTETS)


def pieces(data: bytes) -> dict[bytes, bytes]:
    """The content's segments that are not all zeros, by digest."""
    layout = compute_layout_of_bytes(data)
    return {
        digest: data[number * SEGMENT_BYTES : (number + 1) * SEGMENT_BYTES]
        for number, digest in layout.stored()
    }


def put_content(who: Caller, upload: str, data: bytes, *, segments: bool = True) -> ContentLayout:
    layout = compute_layout_of_bytes(data)
    for digest, piece in pieces(data).items() if segments else ():
        assert put_segment(who, upload, digest, encode_segment(piece)).status_code in {200, 201}
    path = f"/v1/uploads/{upload}/contents/{layout.digest}"
    answer = who("PUT", path, data=layout.to_bytes(), content_type=OCTETS)
    assert answer.status_code == 201, answer.text
    return layout


def publication(layout: ContentLayout, upload: str, **wish: Any) -> dict[str, Any]:
    """The request body that publishes an image of one content."""
    part = Part(digest=layout.digest, size=layout.size)
    manifest = ImageManifest(root=part, **wish.pop("manifest", {}))
    return {"manifest": manifest.model_dump(mode="json", by_alias=True), "upload": upload, **wish}


def push(who: Caller, name: str = "muons", data: bytes = DISK, **wish: Any) -> dict[str, Any]:
    """Push a disk; returns the image as the service shows it."""
    upload = open_upload(who)
    layout = put_content(who, upload, data)
    answer = who("POST", "/v1/images", json=publication(layout, upload, name=name, **wish))
    assert answer.status_code in {200, 201}, answer.text
    found: dict[str, Any] = answer.get_json()
    return found
