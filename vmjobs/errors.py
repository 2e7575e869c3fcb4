"""All errors that vmjobs raises deliberately, with their API codes and exit statuses.

::

    VMJobsError
    ├── InvalidRequest            the request is invalid (422)
    │   ├── InvalidSpec           a job specification with faults, all of them listed
    │   ├── ImageRejected         image inspection refused an image, or it cannot boot
    │   └── IdempotencyConflict   same key, other body (409)
    ├── NotFound                  no such job, image, blob, node (404)
    │   └── SessionEnded          a login session has ended
    ├── Unauthenticated           no token, or an invalid one (401)
    ├── Forbidden                 a valid token without the required right (403)
    ├── AmbiguousId               several ids begin with the given one (409)
    ├── Conflict                  the object's state forbids the request (409)
    │   ├── JobFinal              the job has ended and accepts no more data
    │   ├── AttemptSuperseded     a newer attempt has claimed the job
    │   ├── ImageInUse            unfinished jobs or clusters need the image
    │   ├── VmNotRunning          login to a cluster VM that does not run
    │   ├── LoginUnavailable      a running cluster VM accepts no logins
    │   └── MissingChunks         chunks that a segment or content refers to are missing
    ├── PayloadTooLarge           more bytes than the limit (413)
    │   └── QuotaExceeded         more bytes than the owner's quota
    ├── StorageFull               the storage is full (507)
    ├── Unavailable               a required service does not answer (503)
    ├── DigestMismatch            bytes do not match their digest (502)
    ├── ConfigError               invalid settings, all of them listed
    ├── HypervisorError           a hypervisor driver failed
    │   └── NoHypervisor          no driver on this node can boot the guest
    └── BuildError                an image could not be built
        └── BuildTimedOut         the build exceeded its time limit

Foreign exceptions are translated once, where they enter vmjobs. The program beside each job of a node
imports this, so it imports no module that loads slowly.
"""

from __future__ import annotations

import errno
from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import ClassVar


class Fault(namedtuple("Fault", ("field", "code", "message"))):
    """One thing wrong with a request.

    field: dotted path of the offending field, ``""`` for the request as a whole.
    code: stable machine-readable code, lower case with underscores.
    message: one sentence for a person.
    """

    __slots__ = ()
    field: str
    code: str
    message: str


#: Error numbers that mean a full disk.
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


def reason_of(error: Exception) -> str:
    """The text of an error for a message; of an OSError, without its number."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


class VMJobsError(Exception):
    """Base of all errors that vmjobs raises deliberately.

    code: stable identifier, part of the API.
    http_status: status of the problem document (RFC 9457) that reports it.
    exit_code: exit status of the command line (sysexits.h where one fits).
    hint: what the reader can do about it, or ``""``.
    """

    code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str = "", faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.faults = tuple(faults)


class InvalidRequest(VMJobsError):
    """The request is invalid."""

    code = "INVALID_REQUEST"
    http_status = 422
    exit_code = 64


class InvalidSpec(InvalidRequest):
    """A job specification has faults; ``faults`` lists all of them."""

    code = "INVALID_SPEC"


class ImageRejected(InvalidRequest):
    """Image inspection refused an image, or it cannot boot; the message says why."""

    code = "IMAGE_REJECTED"
    exit_code = 65


class IdempotencyConflict(InvalidRequest):
    """An idempotency key was reused with another body."""

    code = "IDEMPOTENCY_CONFLICT"
    http_status = 409


class NotFound(VMJobsError):
    """The named object does not exist, or the caller may not see it."""

    code = "NOT_FOUND"
    http_status = 404
    exit_code = 66


class SessionEnded(NotFound):
    """A login session has ended; the message says why."""

    code = "SESSION_OVER"
    exit_code = 69


class AmbiguousId(VMJobsError):
    """Several of the caller's ids begin with the given one; the message lists them."""

    code = "AMBIGUOUS_ID"
    http_status = 409
    exit_code = 64


class Unauthenticated(VMJobsError):
    """No bearer token, or one that is malformed, expired or from another issuer."""

    code = "UNAUTHENTICATED"
    http_status = 401
    exit_code = 77


class Forbidden(VMJobsError):
    """The token is valid but lacks the required right."""

    code = "FORBIDDEN"
    http_status = 403
    exit_code = 77


class Conflict(VMJobsError):
    """The object's present state does not allow the request."""

    code = "CONFLICT"
    http_status = 409
    exit_code = 65


class JobFinal(Conflict):
    """The job has ended: its record and its streams are closed."""

    code = "JOB_FINAL"


class AttemptSuperseded(Conflict):
    """A newer attempt has claimed the job; this one must stop and leave nothing behind."""

    code = "ATTEMPT_SUPERSEDED"


class ImageInUse(Conflict):
    """Unfinished jobs or virtual clusters need the image; the message names them."""

    code = "IMAGE_IN_USE"


class VmNotRunning(Conflict):
    """A cluster VM does not run now, so that logins to it are impossible."""

    code = "MACHINE_NOT_RUNNING"
    exit_code = 69


class LoginUnavailable(Conflict):
    """A cluster VM runs but accepts no logins; the message says why."""

    code = "NO_LOGIN"
    exit_code = 69


class MissingChunks(Conflict):
    """Chunks of a segment or content are missing; the client must send all of them."""

    code = "MISSING_BLOCKS"


class PayloadTooLarge(VMJobsError):
    """More bytes than the limit that applies."""

    code = "TOO_LARGE"
    http_status = 413
    exit_code = 65


class QuotaExceeded(PayloadTooLarge):
    """More bytes than the owner's quota."""

    code = "QUOTA_EXCEEDED"


class StorageFull(VMJobsError):
    """The storage is full; no partial data is kept."""

    code = "STORAGE_FULL"
    http_status = 507
    exit_code = 73


class Unavailable(VMJobsError):
    """A required service does not answer; the caller may try again later.

    ``service`` names it: ``database``, ``storage``, ``broker``, ``schedd``, ``pool``, ``api``,
    ``agent``.
    """

    code = "UNAVAILABLE"
    http_status = 503
    exit_code = 69

    def __init__(self, service: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.service = service


class DigestMismatch(VMJobsError):
    """Bytes do not match their digest. They are never passed on."""

    code = "DIGEST_MISMATCH"
    http_status = 502
    exit_code = 65


class ConfigError(VMJobsError):
    """Settings are invalid; ``faults`` has one entry for each, with its key."""

    code = "BAD_CONFIG"
    exit_code = 78


class HypervisorError(VMJobsError):
    """A hypervisor driver failed."""

    code = "HYPERVISOR_ERROR"
    exit_code = 71


class NoHypervisor(HypervisorError):
    """No hypervisor on this node can boot the guest, or the demanded one cannot."""

    code = "NO_HYPERVISOR"


class BuildError(VMJobsError):
    """An image recipe could not be turned into an image."""

    code = "BUILD_FAILED"


class BuildTimedOut(BuildError):
    """A build by the service exceeded the setting ``build_seconds``."""

    code = "BUILD_TIMED_OUT"
