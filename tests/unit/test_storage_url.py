"""The setting ``storage_url``: valid values, and all errors reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from vmjobs.config import load
from vmjobs.errors import ConfigError
from vmjobs.storage_url import S3Location, parse_storage_url

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", None),
        ("/srv/vmjobs", Path("/srv/vmjobs")),
        ("s3://bucket", S3Location("bucket")),
        ("s3://bucket/", S3Location("bucket")),
        ("s3://my.bucket/a/b-c/", S3Location("my.bucket", "a/b-c")),
        (
            "s3://bucket/a?endpoint=https://s3.example.org:9000/&region=eu-west-1",
            S3Location("bucket", "a", "https://s3.example.org:9000", "eu-west-1"),
        ),
        ("s3://bucket?endpoint=http://[::1]:80", S3Location("bucket", "", "http://[::1]:80")),
    ],
)
def test_places(text: str, meant: S3Location | Path | None) -> None:
    assert parse_storage_url(text) == meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("objects", ["absolute path"]),
        ("~/objects", ["absolute path"]),
        ("file:///srv", ["absolute path"]),
        ("http://s3.example.org/bucket", ["s3://BUCKET"]),
        ("s3:bucket", ["'' is not a valid bucket name"]),
        ("s3://", ["'' is not a valid bucket name"]),
        ("s3://Bucket", ["not a valid bucket name"]),
        ("s3://[bucket", ["is not a URL"]),
        (f"s3://key:{SECRET}@bucket", ["must not contain keys"]),
        ("s3://bucket/../other", ["the prefix"]),
        ("s3://bucket/a//b", ["the prefix"]),
        ("s3://bucket/%2e%2e", ["the prefix"]),
        ("s3://bucket/a#b", ["'#'"]),
        ("s3://bucket?endpoint=s3.example.org", ["endpoint must be"]),
        (f"s3://bucket?endpoint=http://key:{SECRET}@host", ["endpoint must be"]),
        ("s3://bucket?endpoint=http://host:99999", ["endpoint must be"]),
        ("s3://bucket?endpoint=", ["endpoint must be"]),
        ("s3://bucket?region=", ["'' is not a valid region name"]),
        ("s3://bucket?region=a&region=b", ["region is given more than once"]),
        (
            "s3://B/A?endpoint=x&region=_&secret=y#z",
            ["bucket name", "the prefix", "endpoint", "region name", "'secret'", "'#'"],
        ),
    ],
)
def test_all_that_is_wrong_is_said_at_once(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load({"VMJOBS_CONFIG": "/dev/null", "VMJOBS_STORAGE_URL": text, "VMJOBS_LISTEN": "x"})
    told = {fault.field: fault.message for fault in refused.value.faults}
    assert set(told) == {"listen", "storage_url"}
    for word in words:
        assert word in told["storage_url"]
    assert SECRET not in f"{refused.value}{told}"
