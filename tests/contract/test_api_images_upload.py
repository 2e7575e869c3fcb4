"""Uploads over REST: damaged, too large, another user's, or larger than the free space."""

from __future__ import annotations

from typing import Any

from images.content import (
    CHUNK_BYTES,
    SEGMENT_BYTES,
    digest_chunks,
    zero_chunk_digest,
    zero_segment_digest,
)
from images.segment import MAX_STORED_BYTES
from tests.kit.api_images import (
    DISK,
    OCTETS,
    ask,
    open_upload,
    pieces,
    put_content,
    put_segment,
)
from tests.kit.api_site import Site
from tests.kit.noise import noise
from tests.kit.segments import compute_layout_of_bytes, encode_segment
from vmjobs.model import MIB


def test_what_is_missing(site: Site) -> None:
    ada = site.user()
    upload = open_upload(ada)
    (first, body), (second, _) = pieces(DISK).items()
    assert ask(ada, upload, "segments", [first, second, zero_segment_digest()]) == [True, True, False]
    assert ask(ada, upload, "blocks", [zero_chunk_digest(), *digest_chunks(memoryview(body))[:2]]) == [
        False,
        True,
        True,
    ]
    answer = put_segment(ada, upload, first, encode_segment(body))
    assert (answer.status_code, answer.data) == (201, b"")
    assert put_segment(ada, upload, first, encode_segment(body)).status_code == 200
    assert ask(ada, upload, "segments", [second, first]) == [True, False]
    assert not any(ask(ada, upload, "blocks", digest_chunks(memoryview(body))))
    shown = ada("GET", f"/v1/uploads/{upload}").get_json()
    assert 0 < shown["received"] < SEGMENT_BYTES
    assert ada("DELETE", f"/v1/uploads/{upload}").status_code == 204
    ada.problem(404, "GET", f"/v1/uploads/{upload}")


def test_segments_that_are_refused(site: Site) -> None:
    """Damaged, without a chunk that the service lacks, and too large to be read."""
    ada, data = site.user(), noise(2 * CHUNK_BYTES)
    upload = open_upload(ada)
    (digest,) = pieces(data)
    path = f"/v1/uploads/{upload}/segments/{digest.hex()}"
    for status, body, code in (
        (422, encode_segment(data)[:-1], "DIGEST_MISMATCH"),
        (409, encode_segment(data, absent={0}), "MISSING_BLOCKS"),
        (413, bytes(MAX_STORED_BYTES + 1), "TOO_LARGE"),
    ):
        problem = ada.problem(status, "PUT", path, data=body, content_type=OCTETS)
        assert problem["code"] == code
    assert put_segment(ada, upload, digest, encode_segment(data)).status_code == 201


def test_layouts_that_are_none(site: Site) -> None:
    ada = site.user()
    upload = open_upload(ada)
    layout = put_content(ada, upload, DISK)
    good = layout.to_bytes()
    path = f"/v1/uploads/{upload}/contents/{layout.digest}"
    for body in (b"", b"x", good[:-1], good + b"x", good[:-32], DISK[:1000]):
        ada.problem(422, "PUT", path, data=body, content_type=OCTETS)
    ada.problem(413, "PUT", path, data=bytes(8 * MIB), content_type=OCTETS)


def test_digest_lists(site: Site) -> None:
    ada = site.user()
    upload = open_upload(ada)
    for what in ("segments", "blocks"):
        path = f"/v1/uploads/{upload}/missing-{what}"
        assert ask(ada, upload, what, [bytes([i % 256]) * 32 for i in range(4096)]) == [True] * 4096
        ada.problem(422, "POST", path, data=b"", content_type=OCTETS)
        ada.problem(422, "POST", path, data=b"x" * 33, content_type=OCTETS)
        ada.problem(413, "POST", path, data=bytes(4097 * 32), content_type=OCTETS)


def test_uploads_of_others_do_not_exist(site: Site) -> None:
    upload = open_upload(site.user())
    bob = site.user("bob")
    (digest, body), *_ = pieces(DISK).items()
    layout = compute_layout_of_bytes(DISK)
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "", {}),
        ("DELETE", "", {}),
        ("POST", "/missing-segments", {"data": digest, "content_type": OCTETS}),
        ("POST", "/missing-blocks", {"data": digest, "content_type": OCTETS}),
        ("PUT", f"/segments/{digest.hex()}", {"data": encode_segment(body), "content_type": OCTETS}),
        ("PUT", f"/contents/{layout.digest}", {"data": layout.to_bytes(), "content_type": OCTETS}),
    ]
    put_content(site.user(), upload, DISK)
    for method, path, more in ways:
        for other in (upload, "f" * 32):
            bob.problem(404, method, f"/v1/uploads/{other}{path}", **more)


def test_bad_sizes(site: Site) -> None:
    for size in (0, -1, "much", None, 2**70):
        assert site.user()("POST", "/v1/uploads", json={"size": size}).status_code in {413, 422}, size
