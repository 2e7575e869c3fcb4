"""Every error vmjobs raises on purpose, and how each one reaches a person.

::

    VMJobsError
    ├── InvalidRequest            what the caller asked for cannot be (422)
    │   ├── InvalidSpec           a job specification with faults, all of them listed
    │   ├── ImageRejected         an image that is not taken, or not run, for what is in it
    │   └── IdempotencyConflict   same key, other body (409)
    ├── NotFound                  no such job, image, blob, node (404)
    │   └── SessionOver           a login session that has ended
    ├── Unauthenticated           no token, or not a valid one (401)
    ├── Forbidden                 a valid token without the right (403)
    ├── AmbiguousId               an id was shortened so that several begin with it (409)
    ├── Conflict                  the object is in a state that forbids this (409)
    │   ├── JobFinal              the job has ended; nobody writes to it any more
    │   ├── AttemptSuperseded     a newer attempt has taken the job
    │   ├── ImageInUse            jobs that have not ended, or clusters, need the image
    │   ├── MachineNotRunning     nobody can log in to a machine that does not run
    │   ├── NoLogin               a machine that runs lets nobody log in
    │   └── MissingBlocks         blocks that were said to be here are not (any more)
    ├── PayloadTooLarge           more bytes than the limit (413)
    │   └── QuotaExceeded         more bytes than this owner may keep
    ├── StorageFull               no room left where bytes are kept (507)
    ├── Unavailable               a service we need does not answer (503)
    ├── DigestMismatch            bytes are not what their digest says (502)
    ├── ConfigError               settings refused at start-up, all at once
    ├── HypervisorError           a driver could not do what it was asked
    │   └── NoHypervisor          no driver on this node boots anything
    └── BuildError                an image could not be built
        └── BuildTimedOut         not within its time

Foreign exceptions are translated once, at the edge where they come in. What runs beside each job of a
node imports this, so it needs no module that takes long to import.
"""

from __future__ import annotations

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


def reason_of(error: Exception) -> str:
    """Why something failed, for a sentence: the system's words without its error number."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


class VMJobsError(Exception):
    """Base of all errors vmjobs raises on purpose.

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
    """The request cannot be carried out as it stands."""

    code = "INVALID_REQUEST"
    http_status = 422
    exit_code = 64


class InvalidSpec(InvalidRequest):
    """A job specification has faults; ``faults`` lists every one of them."""

    code = "INVALID_SPEC"


class ImageRejected(InvalidRequest):
    """An image is not taken, or not booted, for what is in it; the message says why."""

    code = "IMAGE_REJECTED"
    exit_code = 65


class IdempotencyConflict(InvalidRequest):
    """An idempotency key was used again with another body."""

    code = "IDEMPOTENCY_CONFLICT"
    http_status = 409


class NotFound(VMJobsError):
    """The named object does not exist, or is not the caller's to see."""

    code = "NOT_FOUND"
    http_status = 404
    exit_code = 66


class SessionOver(NotFound):
    """A login session has ended; the message says why."""

    code = "SESSION_OVER"
    exit_code = 69


class AmbiguousId(VMJobsError):
    """Several ids of the caller's begin with what was given; the message lists them."""

    code = "AMBIGUOUS_ID"
    http_status = 409
    exit_code = 64


class Unauthenticated(VMJobsError):
    """No bearer token, or one that is malformed, expired or from elsewhere."""

    code = "UNAUTHENTICATED"
    http_status = 401
    exit_code = 77


class Forbidden(VMJobsError):
    """The token is good but does not carry the right that was needed."""

    code = "FORBIDDEN"
    http_status = 403
    exit_code = 77


class Conflict(VMJobsError):
    """The object's present state does not allow what was asked."""

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
    """Jobs that have not ended, or virtual clusters, need the image; the message names them."""

    code = "IMAGE_IN_USE"


class MachineNotRunning(Conflict):
    """A machine of a cluster does not run now, so that nobody can log in to it."""

    code = "MACHINE_NOT_RUNNING"
    exit_code = 69


class NoLogin(Conflict):
    """A machine of a cluster runs, and nobody can log in to it; the message says why."""

    code = "NO_LOGIN"
    exit_code = 69


class MissingBlocks(Conflict):
    """Blocks that were said to be here are not (any more); send them along."""

    code = "MISSING_BLOCKS"


class PayloadTooLarge(VMJobsError):
    """More bytes than the limit that applies."""

    code = "TOO_LARGE"
    http_status = 413
    exit_code = 65


class QuotaExceeded(PayloadTooLarge):
    """More bytes than this owner may keep."""

    code = "QUOTA_EXCEEDED"


class StorageFull(VMJobsError):
    """No room is left where bytes are kept; nothing of what was sent is kept half."""

    code = "STORAGE_FULL"
    http_status = 507
    exit_code = 73


class Unavailable(VMJobsError):
    """A service that is needed does not answer; trying again later is right.

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
    """Bytes read are not the bytes their digest names. They are never handed on."""

    code = "DIGEST_MISMATCH"
    http_status = 502
    exit_code = 65


class ConfigError(VMJobsError):
    """Settings were refused; ``faults`` has one entry for each, with its key."""

    code = "BAD_CONFIG"
    exit_code = 78


class HypervisorError(VMJobsError):
    """A hypervisor driver could not do what it was asked."""

    code = "HYPERVISOR_ERROR"
    exit_code = 71


class NoHypervisor(HypervisorError):
    """No hypervisor on this node can boot a guest (or not the one that was demanded)."""

    code = "NO_HYPERVISOR"


class BuildError(VMJobsError):
    """An image recipe could not be turned into an image."""

    code = "BUILD_FAILED"
    exit_code = 70


class BuildTimedOut(BuildError):
    """A build by the service was not done within the setting ``build_seconds``."""

    code = "BUILD_TIMED_OUT"
