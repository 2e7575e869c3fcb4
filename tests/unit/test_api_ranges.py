"""Byte ranges, as RFC 9110 defines them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flask import Flask

from api.problems import RangeNotSatisfiable, install
from api.ranges import ComputedSource, MemorySource, ObjectSource, RangeReader, parse_range, send
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


class Verified:
    """Bytes that are verified once they are read to the end."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks
        self.size = sum(map(len, chunks))
        self.checked = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        self.checked = True


def test_cut_gives_every_range_and_checks_at_the_end() -> None:
    data = b"abcdefghij"
    for start in range(11):
        for stop in range(start, 11):
            whole = Verified(b"abc", b"d", b"efghi", b"j")
            assert b"".join(RangeReader(whole).chunks(start, stop)) == data[start:stop]
            assert whole.checked == (stop == 10)


def test_object_source(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    objects.put_bytes("blobs/a", bytes(range(256)) * 4096)
    source = ObjectSource(objects.open("blobs/a"))
    assert source.size == 1 << 20
    assert b"".join(source.chunks(255, 258)) == b"\xff\x00\x01"
    assert len(b"".join(source.chunks(0, 1 << 20))) == 1 << 20
    assert source.file is not None
    source.close()
    assert source.file.closed


def test_an_object_that_is_gone_is_sent_from_the_open_file(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    objects.put_bytes("blobs/a", b"0123456789")
    reader = objects.open("blobs/a")
    objects.delete("blobs/a")
    source = ObjectSource(reader)
    assert source.file is None
    assert b"".join(source.chunks(2, 5)) == b"234"
    source.close()


def test_part_source() -> None:
    source = ComputedSource(10, lambda at, length: iter([b"0123456789"[at : at + length]]))
    assert (source.size, list(source.chunks(3, 5))) == (10, [b"34"])


def test_replies() -> None:
    app = Flask(__name__)
    install(app)
    closed: list[bool] = []

    @app.get("/")
    def read() -> object:
        return send(MemorySource(b"0123456789"), etag="v1", close=lambda: closed.append(True))

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
