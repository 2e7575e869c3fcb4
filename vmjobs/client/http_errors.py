"""Converts HTTP errors to the errors of :mod:`vmjobs.errors`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import requests
from pydantic import ValidationError

from vmjobs.errors import (
    Conflict,
    Fault,
    Forbidden,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    StorageFull,
    Unauthenticated,
    Unavailable,
    VMJobsError,
)
from vmjobs.wire import Problem

_BY_STATUS: Final[dict[int, type[VMJobsError]]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: PayloadTooLarge,
    507: StorageFull,
}
#: Maximum size of a problem document.
MAX_PROBLEM_BYTES: Final = 4 * 1024 * 1024


class ServiceError(VMJobsError):
    """An internal error of the service. ``hint`` says what to report to its operators."""


def error_from_response(response: requests.Response) -> VMJobsError:
    """Convert a response with a status of 300 or more to an error."""
    status = response.status_code
    problem = _problem(response)
    if problem is None:
        if status in {429, 502, 503, 504}:
            return Unavailable("api", f"the API at {_origin(response)} answered with HTTP {status}")
        if status < 400:
            return Unavailable("api", f"the API at {_origin(response)} answered with a redirect")
        problem = Problem(title="", status=status, detail=f"the API answered with HTTP {status}")
    message = problem.detail or problem.title or f"the API answered with HTTP {status}"
    if status in {429, 503}:
        return Unavailable(problem.service or "api", message, hint=problem.hint)
    faults = [Fault(f.field, f.code, f.message) for f in problem.errors]
    kind = _class_of(problem.code) or _BY_STATUS.get(problem.status)
    kind = kind or (ServiceError if problem.status >= 500 else InvalidRequest)
    error = kind(message, hint=problem.hint, faults=faults)
    if problem.code:
        # A newer service may use codes for which this client has no classes.
        vars(error)["code"] = problem.code
    return error


def root_cause(error: requests.RequestException) -> str:
    """The reason in the innermost of the wrapped exceptions."""
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    cause: BaseException = error
    seen: set[int] = set()
    while id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno and cause.strerror:
            return cause.strerror
        inner = [getattr(cause, "reason", None), *cause.args, cause.__cause__, cause.__context__]
        cause = next((i for i in inner if isinstance(i, BaseException)), cause)
    return str(cause) or type(cause).__name__


def error_from_code(code: str, message: str, hint: str = "") -> VMJobsError:
    """Convert a failure in a resource, such as a failed build, to an error."""
    error = (_class_of(code) or ServiceError)(message, hint=hint)
    vars(error)["code"] = code
    return error


def _class_of(code: str) -> type[VMJobsError] | None:
    kinds = (k for k in _error_classes(VMJobsError) if k.code == code and k is not Unavailable)
    return next(kinds, None)


def _error_classes(base: type[VMJobsError]) -> Iterator[type[VMJobsError]]:
    for kind in base.__subclasses__():
        if kind.__module__ == "vmjobs.errors":
            yield kind
            yield from _error_classes(kind)


def _problem(response: requests.Response) -> Problem | None:
    if response.headers.get("Content-Type", "").partition(";")[0] != "application/problem+json":
        return None
    try:
        # The content has been read (a plain call), or is still to be received (a download).
        data = next(response.iter_content(MAX_PROBLEM_BYTES), b"")
        return Problem.model_validate_json(data)
    except (ValidationError, requests.RequestException):
        return None


def _origin(response: requests.Response) -> str:
    scheme, _, rest = response.url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"
