"""Transfers between local files and the API."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import requests
from pydantic import ValidationError

from vmjobs.client.request_bodies import PIECE_BYTES
from vmjobs.client.transport import ApiTransport
from vmjobs.errors import InvalidRequest, Unavailable
from vmjobs.file_transfer import ProgressCallback
from vmjobs.model import InputFile, Output, faults_of
from vmjobs.paths import safe_join


def describe_input(path: Path, name: str) -> InputFile:
    """Describe a local file as an input called ``name``, with digest and size.

    Raises:
        InvalidRequest: it is not a readable regular file, or ``name`` is not a safe path.
    """
    try:
        if not path.is_file():
            raise InvalidRequest(f"{path} is not a regular file")
        with path.open("rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
            size = source.tell()
        return InputFile(name=name, digest=f"sha256:{digest}", size=size)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        faults = faults_of(error)
        raise InvalidRequest(f"{name!r} is not a valid name of an input", faults=faults) from error


def download_output(
    http: ApiTransport, url: str, directory: Path, output: Output, progress: ProgressCallback | None
) -> Path:
    """Fetch an output into ``directory``, verified and atomically."""
    try:
        target = safe_join(directory, output.path)
    except ValueError as error:
        raise InvalidRequest(f"the output's name is refused: {error}") from error
    partial = target.with_name(f".vmjobs-{secrets.token_hex(8)}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("xb") as sink:
            http.download(url, sink.write, digest=output.digest, progress=progress)
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(target)
    except OSError as error:
        raise InvalidRequest(f"cannot write {target}: {error.strerror}") from error
    finally:
        with suppress(OSError):  # its directory may not exist
            partial.unlink(missing_ok=True)
    return target


def read_stream(http: ApiTransport, url: str, offset: int) -> Iterator[bytes]:
    """Yield the bytes from ``offset`` to the present end; none if nothing was added."""
    headers = {"Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    response = http.call("GET", url, headers=headers, stream=True, accept=frozenset({416}))
    with response:
        if response.status_code == 416:
            return
        if offset and response.status_code != 206:
            raise Unavailable("api", "the API does not serve a part of the stream")
        left = int(response.headers.get("Content-Length", "0"))
        try:
            for data in response.iter_content(PIECE_BYTES):
                left -= len(data)
                yield data
        except requests.RequestException as error:
            raise Unavailable("api", f"the transfer of {url} broke off") from error
        if left > 0:
            raise Unavailable("api", f"the transfer of {url} broke off")
