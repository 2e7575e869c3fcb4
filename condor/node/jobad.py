"""Read the job ad that the starter writes for the job (``$_CONDOR_JOB_AD``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import classad2

from condor import names
from vmjobs.errors import InvalidRequest, NotFound

ENVIRONMENT: Final = "_CONDOR_JOB_AD"
#: Far above any real job ad, in bytes.
MAX_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True)
class JobAd:
    """The attributes of a job ad that vmjobs reads; unverified, since users can set them."""

    job_id: str
    array: str
    index: int
    owner: str
    image: str
    cluster: int
    proc: int
    cpus: int
    memory: int
    """MiB"""


def read(environ: Mapping[str, str] | None = None) -> JobAd:
    """The ad of the job this process runs in.

    Raises:
        NotFound: this is no HTCondor job, or its ad file is missing.
        InvalidRequest: the file is no job ad.
    """
    environ = os.environ if environ is None else environ
    path = environ.get(ENVIRONMENT, "")
    if not path:
        raise NotFound(f"{ENVIRONMENT} is not set: this is not an HTCondor job")
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise NotFound(f"cannot read the job ad {path}: {error.strerror}") from error
    return parse(data, path)


def parse(data: bytes, path: str = "job ad") -> JobAd:
    """Parse a job ad; attributes that are missing or of another type become ``""`` or 0.

    Raises:
        InvalidRequest: the text is no job ad.
    """
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"{path} is larger than {MAX_BYTES} bytes")
    # The parser raises no error; it returns the part that it understood.
    ad = classad2.parseOne(data.decode("utf-8", "replace"))
    if _integer(ad, names.CLUSTER_ID) <= 0:
        raise InvalidRequest(f"{path} is not the ad of a queued job: it has no {names.CLUSTER_ID}")
    return JobAd(
        job_id=_text(ad, names.JOB_ID),
        array=_text(ad, names.JOB_ARRAY),
        index=_integer(ad, names.JOB_INDEX),
        owner=_text(ad, names.JOB_OWNER),
        image=_text(ad, names.JOB_IMAGE),
        cluster=_integer(ad, names.CLUSTER_ID),
        proc=_integer(ad, names.PROC_ID),
        cpus=_integer(ad, "RequestCpus"),
        memory=_integer(ad, "RequestMemory"),
    )


def _text(ad: Any, name: str) -> str:
    value = ad.get(name)  # an expression is returned as such, not evaluated
    return value if isinstance(value, str) else ""


def _integer(ad: Any, name: str) -> int:
    value = ad.get(name)
    return value if type(value) is int else 0  # `undefined` and booleans are sub-types
