"""Translates the errors of boto3."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from vmjobs.errors import NotFound, StorageFull, Unavailable, VMJobsError

log = logging.getLogger(__name__)

#: HEAD has no body with an error code, so the status takes its place.
_MISSING: Final = {"NoSuchKey", "NotFound", "404"}
#: Amazon S3 is never full; other services have their own error codes for it, or the status 507.
_FULL: Final = {
    "InsufficientStorage",
    "NoSpaceLeftOnDevice",
    "QuotaExceeded",
    "XMinioAdminBucketQuotaExceeded",
    "XMinioStorageFull",
}
#: Refusals that some services send with a status other than 401 or 403.
_REFUSED: Final = {"ExpiredToken", "InvalidToken", "XAdminUserNotFound"}
_KEYS_HINT: Final = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what else boto3 reads"


@contextmanager
def translated(bucket: str, key: str = "", *, full: bool = False) -> Iterator[None]:
    """Translate errors to NotFound (only with a ``key``), StorageFull, Unavailable("storage").

    full: the message names bucket and cause, for operators. Otherwise only the log has them.
    """
    try:
        yield
    except ClientError as error:
        raise _error_of_response(error.response, bucket, key, full=full) from error
    except NoCredentialsError as error:
        raise _unavailable("refuses us", "no keys are set up", full, hint=_KEYS_HINT) from error
    except (BotoCoreError, OSError) as error:
        raise _unavailable("does not answer", str(error), full) from error


def is_missing(error: ClientError) -> bool:
    """Whether the error means that there is no such object (or, for HEAD, no such bucket)."""
    return _code(error.response) in _MISSING


def _error_of_response(response: Any, bucket: str, key: str, *, full: bool) -> VMJobsError:
    code = _code(response)
    if key and code in _MISSING:
        return NotFound(f"there is no object {key}")
    if code in _FULL or _status(response) == 507:
        return StorageFull("no room is left where blobs and images are kept")
    if code in _REFUSED or _status(response) in (401, 403):
        return _unavailable("refuses us", f"bucket {bucket}, {code}", full, hint=_KEYS_HINT)
    if code in {"NoSuchBucket", "NotFound", "404"}:
        return _unavailable("has no such bucket", bucket, full)
    return _unavailable("fails", f"it answers {code} ({_status(response)})", full)


def _unavailable(what: str, detail: str, full: bool, *, hint: str = "") -> Unavailable:
    if full:
        return Unavailable("storage", f"the storage {what}: {detail}", hint=hint)
    log.warning("the storage %s: %s", what, detail)
    return Unavailable("storage", f"the storage {what}")


def _code(response: Any) -> str:
    return str(response.get("Error", {}).get("Code", ""))


def _status(response: Any) -> int:
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
