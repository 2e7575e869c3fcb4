"""Objects in S3 when the server dies, is full, or rejects our credentials."""

from __future__ import annotations

import hashlib
import io
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import boto3
import pytest

from repository.storage.objects import ObjectStore, open_objects
from repository.storage.objects.base import CHUNK
from repository.storage.objects.s3 import PART_BYTES
from tests.kit.full_disk import small_disk
from tests.kit.object_store import LARGE, held
from tests.kit.s3_server import S3Server
from vmjobs.config import Config
from vmjobs.errors import ConfigError, NotFound, StorageFull, Unavailable


def open_url(url: str) -> ObjectStore:
    return open_objects(Config(storage_url=url))


def unavailable(words: str, *calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(Unavailable, match=words) as told:
            call()
        assert told.value.service == "storage"


def everything(objects: ObjectStore) -> list[Callable[[], object]]:
    """Return a call of each operation of a store."""
    return [
        objects.check,
        objects.clean,
        lambda: objects.open("a"),
        lambda: objects.size("a"),
        lambda: objects.delete("a"),
        lambda: list(objects.keys("a")),
        lambda: objects.put_bytes("a", b"x"),
        lambda: objects.put("a", io.BytesIO(bytes(LARGE)), LARGE),
    ]


class Killing(io.BytesIO):
    """Data; the server dies when half of it is read."""

    def __init__(self, server: S3Server, size: int) -> None:
        super().__init__(bytes(size))
        self._server = server
        self._middle = size // 2

    def read(self, size: int | None = -1, /) -> bytes:
        """Kills the server once half the data is read."""
        if self.tell() >= self._middle:
            self._server.kill()
        return super().read(size)


@pytest.mark.parametrize("size", [PART_BYTES, LARGE])
def test_a_server_that_dies_in_mid_put_and_comes_back(
    own_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    objects = open_url(own_s3_server.url(own_s3_server.bucket()))
    objects.put_bytes("a", b"old")
    for key in ("a", "b"):
        with pytest.raises(Unavailable, match="does not answer"):
            objects.put(key, Killing(own_s3_server, size), size)
        unavailable(
            "does not answer", objects.check, lambda: objects.open("a"), lambda: objects.size("b")
        )
        own_s3_server.start()
        objects.check()
        assert held(objects) == [("a", 3)]
    assert objects.get("a") == b"old"
    monkeypatch.setattr("repository.storage.objects.s3.STALE_AFTER", timedelta(seconds=-60))
    assert objects.clean() == (2 if size > PART_BYTES else 0)
    objects.put("b", io.BytesIO(bytes(size)), size)
    assert objects.size("b") == size


def test_reading_goes_on_where_the_server_left_off(own_s3_server: S3Server) -> None:
    objects = open_url(own_s3_server.url(own_s3_server.bucket()))
    data = bytes(range(256)) * (PART_BYTES // 256)
    objects.put_bytes("a", data)
    with objects.open("a") as reader:
        got = reader.read(CHUNK)
        own_s3_server.kill()
        own_s3_server.start()
        assert got + reader.read() == data
    with objects.open("a") as reader:
        reader.read(CHUNK)
        own_s3_server.kill()
        unavailable("does not answer", reader.read)


def test_a_full_server(s3_keys: None, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 24) as disk:
        server = S3Server(tmp_path, disk)
        server.start()
        try:
            objects = open_url(server.url(server.bucket()))
            objects.put_bytes("a", b"1" * PART_BYTES)
            for size in (PART_BYTES, LARGE):
                with pytest.raises(StorageFull):
                    objects.put("b", io.BytesIO(bytes(size)), size)
            assert held(objects) == [("a", PART_BYTES)]
            objects.put_bytes("b", bytes(4 * CHUNK))  # the uploaded parts were aborted
        finally:
            server.kill()


def test_wrong_keys(s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "not the right one"
    for name, value in [("AWS_SECRET_ACCESS_KEY", secret), ("AWS_ACCESS_KEY_ID", "nobody")]:
        # This server answers an unknown user's HEAD as if there were no bucket.
        words = "refuses us" if value == secret else "refuses us|has no such bucket"
        monkeypatch.setenv(name, value)
        objects = open_url(s3_url)
        unavailable(words, *everything(objects))
        with pytest.raises(Unavailable) as told:
            objects.check()
        assert secret not in told.value.message
        assert "AWS_ACCESS_KEY_ID" in told.value.hint


def test_no_keys(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    unavailable("no keys are set up", open_url(s3_url).check)


def test_a_profile_that_is_not_there(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="nobody"):
        open_url(s3_url)


def test_no_such_bucket(s3_server: S3Server) -> None:
    objects = open_url(s3_server.url("never-made"))
    unavailable("has no such bucket", *everything(objects))
    unavailable("never-made", objects.check)


def test_no_server(s3_keys: None) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # nothing else may listen there
        port = unheard.getsockname()[1]
        objects = open_url(f"s3://bucket?endpoint=http://127.0.0.1:{port}")
        unavailable("does not answer", objects.check)
        unavailable(str(port), objects.check)  # for the operator
        unavailable("does not answer$", lambda: objects.put_bytes("a", b"x"))  # for users


@pytest.mark.parametrize("size", [1, LARGE])
def test_bytes_that_change_on_their_way_are_refused(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    objects, other = open_url(s3_url), hashlib.md5(b"other bytes", usedforsecurity=False)
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "md5", lambda *_, **__: other)
        unavailable("fails", lambda: objects.put("a", io.BytesIO(bytes(size)), size))
    assert held(objects) == []


def test_more_objects_than_one_answer_lists(s3_url: str) -> None:
    objects = open_url(s3_url)
    keys = sorted(f"a/{n:x}" for n in range(1100))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: objects.put_bytes(key, b"x"), keys))
    assert held(objects) == [(key, 1) for key in keys]


def test_prefixes_keep_apart_and_foreign_names_are_passed_over(s3_server: S3Server) -> None:
    bucket = s3_server.bucket()
    one, other = (open_url(s3_server.url(bucket, prefix)) for prefix in ("one", "one2"))
    whole = open_url(s3_server.url(bucket))
    one.put_bytes("a", b"1")
    other.put_bytes("a", b"2")
    client = boto3.client("s3", endpoint_url=s3_server.endpoint, region_name="us-east-1")
    for name in ("one/Not a key", "one/folder/", "one/ä"):
        client.put_object(Bucket=bucket, Key=name, Body=b"")
    assert held(one) == held(other) == [("a", 1)]
    assert (one.get("a"), other.get("a")) == (b"1", b"2")
    assert held(whole) == [("one/a", 1), ("one2/a", 1)]
    one.delete("a")
    with pytest.raises(NotFound):
        one.open("a")
    assert other.get("a") == b"2"
