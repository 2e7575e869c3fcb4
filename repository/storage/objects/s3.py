"""Objects in a bucket, by boto3: Amazon S3, Ceph, MinIO and other compatible services.

S3 itself makes an object visible complete or not at all; this module bounds memory, lets the service
verify the data (Content-MD5), and aborts unfinished uploads.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final

import boto3
from botocore.config import Config as ClientConfig
from botocore.exceptions import BotoCoreError, ClientError

from repository.storage.objects.base import (
    ObjectInfo,
    ObjectReader,
    ObjectStore,
    checked_key,
    checked_prefix,
    is_key,
    read_exactly,
)
from repository.storage.objects.s3_errors import is_missing, translated
from vmjobs.errors import ConfigError, Fault, Unavailable
from vmjobs.storage_url import S3Location

log = logging.getLogger(__name__)

#: An object up to this size is sent in one request, a larger one in parts of this size (bytes).
PART_BYTES: Final = 16 * 1024 * 1024
MAX_PARTS: Final = 10_000
#: A multipart upload of this age is a leftover of a killed writer.
STALE_AFTER: Final = timedelta(days=1)
CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 5, 30, 3
CHECK_SECONDS: Final = 3
#: How often one read resumes after a broken connection.
MAX_RESUMES: Final = 3
CONNECTIONS: Final = 32
_DEFAULT_REGION: Final = "us-east-1"


class S3Objects(ObjectStore):
    """Objects in a bucket, below a prefix."""

    def __init__(self, location: S3Location) -> None:
        """Set up clients, without contact yet.  Raises ConfigError if boto3's settings are broken."""
        self._bucket = location.bucket
        self._prefix = f"{location.prefix}/" if location.prefix else ""
        try:
            session = boto3.session.Session()
            self._client = _client(session, location, READ_SECONDS, CONNECT_SECONDS, ATTEMPTS)
            self._short_timeout_client = _client(session, location, CHECK_SECONDS, CHECK_SECONDS, 1)
        except (BotoCoreError, ValueError) as error:
            message = f"boto3 cannot be set up: {error}"
            raise ConfigError(message, faults=[Fault("storage_url", "boto3", message)]) from error

    def put(self, key: str, source: BinaryIO, size: int) -> None:
        named = self._object_arguments(key)
        parts = _parts(read_exactly(source, size), max(PART_BYTES, -(-size // MAX_PARTS)))
        if size > PART_BYTES:
            self._put_parts(named, parts)
            return
        data = b"".join(parts)
        with translated(self._bucket):
            self._client.put_object(**named, Body=data, ContentMD5=_md5(data))

    def open(self, key: str) -> S3Reader:
        named = self._object_arguments(key)
        with translated(self._bucket, key):
            return S3Reader(self._client, named, self._client.get_object(**named))

    def size(self, key: str) -> int | None:
        named = self._object_arguments(key)
        with translated(self._bucket):
            try:
                return int(self._client.head_object(**named)["ContentLength"])
            except ClientError as error:
                if not is_missing(error):
                    raise
            # The bucket itself may be missing, which must not look like a missing object.
            self._client.head_bucket(Bucket=self._bucket)
        return None

    def delete(self, key: str) -> None:
        with translated(self._bucket):
            self._client.delete_object(**self._object_arguments(key))

    def keys(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See :meth:`ObjectStore.keys`; skips names in the bucket that are not valid keys."""
        folder = checked_prefix(prefix)
        start = self._prefix + (f"{folder}/" if folder else "")
        with translated(self._bucket):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=start):
                for item in page.get("Contents", ()):
                    key = item["Key"].removeprefix(self._prefix)
                    if is_key(key):
                        yield ObjectInfo(key, int(item["Size"]), item["LastModified"])

    def clean(self) -> int:
        """See :meth:`ObjectStore.clean`: aborts multipart uploads that are a day old."""
        removed, before = 0, datetime.now(UTC) - STALE_AFTER
        with translated(self._bucket):
            pages = self._client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
                for upload in page.get("Uploads", ()):
                    if upload["Initiated"] < before:
                        named = {"Bucket": self._bucket, "Key": upload["Key"]}
                        self._abort({**named, "UploadId": upload["UploadId"]})
                        removed += 1
        return removed

    def check(self) -> None:
        """See :meth:`ObjectStore.check`: tries once, with short time-outs, to list the bucket."""
        with translated(self._bucket, full=True):
            # Not HEAD: its response does not name the error.
            self._short_timeout_client.list_objects_v2(
                Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1
            )

    def _object_arguments(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + checked_key(key)}

    def _put_parts(self, named: dict[str, Any], parts: Iterator[bytes]) -> None:
        with translated(self._bucket):
            upload = {**named, "UploadId": self._client.create_multipart_upload(**named)["UploadId"]}
        try:
            done = [self._put_part(upload, n, data) for n, data in enumerate(parts, 1)]
            with translated(self._bucket):
                self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": done})
        except BaseException:
            self._abort(upload)
            raise

    def _put_part(self, upload: dict[str, Any], number: int, data: bytes) -> dict[str, Any]:
        with translated(self._bucket):
            answer = self._client.upload_part(
                **upload, PartNumber=number, Body=data, ContentMD5=_md5(data)
            )
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def _abort(self, upload: dict[str, Any]) -> None:
        """Abort an upload; if that fails, :meth:`clean` will find it."""
        try:
            self._short_timeout_client.abort_multipart_upload(**upload)
        except (BotoCoreError, ClientError) as error:
            log.warning("cannot abort an upload of %s: %s", upload["Key"], error)


class S3Reader(ObjectReader):
    """Reads an object; after a broken connection it resumes at the same offset."""

    def __init__(self, client: Any, named: dict[str, Any], answer: Any) -> None:
        super().__init__(int(answer["ContentLength"]))
        self._client = client
        # Never mix bytes of an object with bytes of its replacement.
        self._object_arguments = {**named, "IfMatch": answer["ETag"]}
        self._body: Any = answer["Body"]
        self._at = 0

    def read(self, n: int = -1) -> bytes:
        left = max(0, self.size - self._at)
        wanted = left if n < 0 else min(n, left)
        got: list[bytes] = []
        while wanted:
            chunk = self._read_some(wanted)
            self._at += len(chunk)
            wanted -= len(chunk)
            got.append(chunk)
        return b"".join(got)

    def seek(self, offset: int) -> None:
        if offset != self._at:
            self.close()
            self._at = offset

    def close(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()

    def _read_some(self, wanted: int) -> bytes:
        """Read at least one byte."""
        with translated(self._object_arguments["Bucket"]):
            for _ in range(MAX_RESUMES):
                if self._body is None:
                    rest = f"bytes={self._at}-"
                    self._body = self._client.get_object(**self._object_arguments, Range=rest)["Body"]
                try:
                    chunk = self._body.read(wanted)
                except (BotoCoreError, OSError) as error:
                    log.info("reading %s was interrupted: %s", self._object_arguments["Key"], error)
                    chunk = b""
                if chunk:
                    return bytes(chunk)
                self.close()
        raise Unavailable("storage", "the storage closed the connection in the middle of an object")


def _client(
    session: Any, location: S3Location, read_seconds: int, connect_seconds: int, attempts: int
) -> Any:
    settings: dict[str, Any] = {
        "connect_timeout": connect_seconds,
        "read_timeout": read_seconds,
        "retries": {"mode": "standard", "total_max_attempts": attempts},
        "max_pool_connections": CONNECTIONS,
    }
    if location.endpoint:
        settings["s3"] = {"addressing_style": "path"}
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        # Newer releases add checksums that some services lack; all support Content-MD5.
        if name in ClientConfig.OPTION_DEFAULTS:
            settings[name] = "when_required"
    return session.client(
        "s3",
        region_name=location.region or session.region_name or _DEFAULT_REGION,
        endpoint_url=location.endpoint or None,
        config=ClientConfig(**settings),
    )


def _parts(chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Regroup bytes into pieces of ``size`` bytes and a rest."""
    held: list[bytes] = []
    length = 0
    for chunk in chunks:
        held.append(chunk)
        length += len(chunk)
        if length >= size:
            data = b"".join(held)
            yield data[:size]
            held = [data[size:]]
            length -= size
    if length:
        yield b"".join(held)


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
