"""Helpers for tests of the image repository."""

from __future__ import annotations

from typing import Any

from images.content import CHUNK_BYTES, SEGMENT_BYTES, ContentLayout, digest_chunks, segment_digest
from images.manifest import ImageManifest, Part
from repository.images import Viewer
from repository.service import Repository
from tests.kit.noise import noise
from tests.kit.segments import compute_layout_of_bytes, encode_segment
from vmjobs.wire import ImageDetail

ADA, BOB, EVE = Viewer("ada"), Viewer("bob"), Viewer("eve")
MIB = 1024 * 1024
#: A content of two segments.
TWO = noise(SEGMENT_BYTES + 3 * CHUNK_BYTES + 17)


def begin(images: Repository, viewer: Viewer = ADA, size: int = 64 * MIB) -> str:
    return images.uploads.begin(viewer, size).id


def pieces(data: bytes) -> list[tuple[bytes, bytes]]:
    """The segments of a content: digest and bytes."""
    cut = [data[begin : begin + SEGMENT_BYTES] for begin in range(0, len(data), SEGMENT_BYTES)]
    return [(segment_digest(digest_chunks(memoryview(piece))), piece) for piece in cut]


def packed(piece: bytes, absent: list[int] | None = None) -> bytes:
    """Encode a segment as it is sent."""
    return encode_segment(piece, absent=absent or [])


def manifest_of(layout: ContentLayout, **more: Any) -> dict[str, Any]:
    image = ImageManifest(root=Part(digest=layout.digest, size=layout.size), **more)
    return image.model_dump(mode="json", by_alias=True)


def read(repository: Repository, viewer: Viewer, detail: ImageDetail, part: str = "root") -> bytes:
    content = detail.manifest[part]["digest"]
    data = repository.contents.layout(viewer, detail.digest, content)
    return b"".join(repository.contents.read(ContentLayout.parse(data, content)))


def sweeper(
    repository: Repository, patience: float = 0, orphans: float = 0, **settings: object
) -> Repository:
    """The same repository, with these limits in seconds for uploads and orphans."""
    config = repository.config.model_copy(update={"upload_seconds": patience, **settings})
    return Repository(config, repository.database, repository.objects, orphan_seconds=orphans)


def stored(repository: Repository) -> list[str]:
    """Keys of all segments' objects."""
    return [info.key for info in repository.objects.keys("segments")]


def layout(data: bytes) -> ContentLayout:
    """The layout of some bytes."""
    return compute_layout_of_bytes(data)
