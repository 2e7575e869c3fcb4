"""Parses the setting ``storage_url``: where a server stores blobs and images."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"([a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*)?")
_REGION: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_MAX_PREFIX: Final = 200
_PARAMETERS: Final = ("endpoint", "region")


@dataclass(frozen=True)
class S3Location:
    """A prefix in an S3 bucket.

    prefix: without slashes around it; ``""``: the whole bucket. endpoint: empty: Amazon's. region:
    empty: boto3's configured region.
    """

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""


def parse_storage_url(text: str) -> S3Location | Path | None:
    """Parse a setting: a bucket, a directory, or ``None`` if it is empty.

    Raises:
        ValueError: the message lists all faults.
    """
    if not text:
        return None
    if not text.startswith("s3:"):
        path = Path(text)
        if "://" in text or not path.is_absolute():
            raise ValueError("must be empty, an absolute path or s3://BUCKET/PREFIX?endpoint=URL")
        return path
    try:
        url = urlsplit(text)
        given = parse_qsl(url.query, keep_blank_values=True)
    except ValueError as error:
        raise ValueError(f"is not a URL: {error}") from None
    faults = list(_faults(url, given))
    if faults:
        raise ValueError("; ".join(faults))
    named = dict(given)
    return S3Location(
        url.netloc, _prefix(url), named.get("endpoint", "").rstrip("/"), named.get("region", "")
    )


def _prefix(url: SplitResult) -> str:
    return unquote(url.path).removeprefix("/").removesuffix("/")


def _faults(url: SplitResult, given: list[tuple[str, str]]) -> Iterator[str]:
    if "@" in url.netloc:
        yield "must not contain keys: configure them where boto3 looks for them"
    elif not _BUCKET.fullmatch(url.netloc):
        yield f"{url.netloc!r} is not a valid bucket name"
    prefix = _prefix(url)
    if not _PREFIX.fullmatch(prefix) or len(prefix) > _MAX_PREFIX:
        yield "the prefix may have lower-case letters, digits, '.', '_', '-' and single slashes"
    if url.fragment:
        yield "must not contain '#'"
    names = [name for name, _ in given]
    for name in sorted(set(names)):
        if name not in _PARAMETERS:
            yield f"unknown parameter {name!r} (expected endpoint or region)"
        elif names.count(name) > 1:
            yield f"{name} is given more than once"
    for name, value in given:
        if name == "endpoint" and not _is_endpoint(value):
            yield "endpoint must be http(s)://HOST[:PORT], without keys or query"
        if name == "region" and not _REGION.fullmatch(value):
            yield f"{value!r} is not a valid region name"


def _is_endpoint(text: str) -> bool:
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        return False
    plain = not (url.query or url.fragment or "@" in url.netloc)
    return url.scheme in ("http", "https") and bool(url.hostname) and port != 0 and plain
