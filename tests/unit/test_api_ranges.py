"""Byte ranges, as RFC 9110 defines them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from gunicorn.http.wsgi import FileWrapper

from api.problems import RangeNotSatisfiable, install
from api.ranges import FILE_WRAPPER, parse_range, part_of_verified, send, send_object
from repository.storage.objects.local import LocalObjects


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None),
        ("", None),
        ("bytes=0-0", range(0, 1)),
        ("bytes=0-9", range(0, 10)),
        ("bytes=2-", range(2, 10)),
        ("bytes=2-100", range(2, 10)),
        ("bytes=-3", range(7, 10)),
        ("bytes=-100", range(0, 10)),
        ("Bytes= 2-3 ", range(2, 4)),
        ("bytes=5-4", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("bytes=٣-٤", None),
        ("bytes=" + "9" * 30 + "-", None),
    ],
)
def test_parse(header: str | None, span: range | None) -> None:
    assert parse_range(header, 10) == span


@pytest.mark.parametrize(
    ("header", "size"),
    [(header, 10) for header in ("bytes=10-", "bytes=10-12", "bytes=-0")]
    + [(header, 0) for header in ("bytes=0-", "bytes=0-5", "bytes=-5")],
)
def test_behind_the_end(header: str, size: int) -> None:
    with pytest.raises(RangeNotSatisfiable):
        parse_range(header, size)


def test_a_part_of_verified_bytes_is_checked_at_the_end() -> None:
    data, chunks = b"abcdefghij", (b"abc", b"d", b"efghi", b"j")
    checked: list[bool] = []

    def verified() -> Iterator[bytes]:
        yield from chunks
        checked.append(True)

    for start in range(11):
        for stop in range(start, 11):
            checked.clear()
            assert b"".join(part_of_verified(verified(), 10, start, stop)) == data[start:stop]
            assert bool(checked) == (stop == 10)


@pytest.mark.parametrize("server", [{}, {FILE_WRAPPER: FileWrapper}], ids=["plain", "sendfile"])
def test_an_object_is_sent_from_its_open_file(tmp_path: Path, server: dict[str, Any]) -> None:
    objects = LocalObjects(tmp_path)
    data = bytes(range(256)) * 4096
    objects.put_bytes("blobs/a", data)
    app = Flask(__name__)
    for span in (range(len(data)), range(255, 258), range(1 << 19, 1 << 20)):
        reader = objects.open("blobs/a")
        objects.put_bytes("blobs/a", b"other bytes")  # the reader still has the former ones
        asked = {"Range": f"bytes={span.start}-{span.stop - 1}"}
        with app.test_request_context(headers=asked, environ_overrides=server):
            answer = send_object(reader, etag="v1")
            assert answer.content_length == len(span)
            assert b"".join(answer.response)[: len(span)] == data[span.start : span.stop]
            answer.close()
        assert reader.file.closed
        objects.put_bytes("blobs/a", data)


def test_replies() -> None:
    app = Flask(__name__)
    install(app)
    closed: list[bool] = []

    @app.get("/")
    def read() -> object:
        data = b"0123456789"
        return send(
            10,
            lambda start, stop: [data[start:stop]],
            etag="v1",
            close=lambda: closed.append(True),
        )

    def get(**headers: str) -> tuple[int, bytes, str | None]:
        answer = app.test_client().get(
            "/", headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        data = answer.data
        answer.close()
        return answer.status_code, data, answer.headers.get("Content-Range")

    assert get() == (200, b"0123456789", None)
    assert get(Range="bytes=2-4") == (206, b"234", "bytes 2-4/10")
    assert get(Range="bytes=-2") == (206, b"89", "bytes 8-9/10")
    assert get(Range="bytes=2-4", If_Range='"v1"') == (206, b"234", "bytes 2-4/10")
    assert get(Range="bytes=2-4", If_Range='"v0"') == (200, b"0123456789", None)
    assert get(If_None_Match='"v1"') == (304, b"", None)
    status, _, place = get(Range="bytes=10-")
    assert (status, place) == (416, "bytes */10")
    assert len(closed) == 7
