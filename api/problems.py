"""Turns failures into problem documents (RFC 9457), without the service's internals."""

from __future__ import annotations

import logging
import secrets
from typing import Any, Final

from flask import Flask, Response
from werkzeug.exceptions import HTTPException
from werkzeug.http import HTTP_STATUS_CODES

from api.tokens import challenge
from vmjobs.errors import Forbidden, InvalidRequest, Unauthenticated, Unavailable, VMJobsError
from vmjobs.wire import Problem, ProblemFault

log = logging.getLogger(__name__)

CONTENT_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:vmjobs:error:"
RETRY_AFTER_SECONDS: Final = 5

#: Codes of failures that HTTP or the framework detects, before any view runs.
_HTTP_CODES: Final = {
    400: "BAD_REQUEST",
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    411: "LENGTH_REQUIRED",
    413: "TOO_LARGE",
    415: "UNSUPPORTED_MEDIA_TYPE",
    416: "RANGE_NOT_SATISFIABLE",
}

#: Reason phrases that changed with RFC 9110.
_TITLES: Final = {
    413: "Content Too Large",
    416: "Range Not Satisfiable",
    422: "Unprocessable Content",
}

#: Replace the framework's sentences, which address people who typed a URL by hand.
_HTTP_SENTENCES: Final = {
    404: "there is nothing at this URL",
    405: "this URL does not take this method",
}


class RoutingError(HTTPException):
    """One of our errors while a URL is matched; only HTTP exceptions pass there."""

    def __init__(self, error: VMJobsError) -> None:
        super().__init__(error.message)
        self.code = error.http_status
        self.error = error


class MalformedBody(VMJobsError):
    """The body is not JSON."""

    code = "MALFORMED_JSON"
    http_status = 400
    exit_code = 64


class BrokenBody(VMJobsError):
    """The body ended before its announced length."""

    code = "BROKEN_BODY"
    http_status = 400
    exit_code = 64


class UnsupportedMediaType(VMJobsError):
    """The body has another media type than the endpoint accepts."""

    code = "UNSUPPORTED_MEDIA_TYPE"
    http_status = 415
    exit_code = 64


class LengthRequired(VMJobsError):
    """The body needs a Content-Length."""

    code = "LENGTH_REQUIRED"
    http_status = 411
    exit_code = 64


class RangeNotSatisfiable(VMJobsError):
    """A byte range that begins beyond the end."""

    code = "RANGE_NOT_SATISFIABLE"
    http_status = 416

    def __init__(self, size: int) -> None:
        super().__init__(f"the range begins beyond the end: there are {size} bytes")
        self.size = size


class BlobDigestMismatch(InvalidRequest):
    """The bytes that a client sent do not match the digest in the URL."""

    code = "DIGEST_MISMATCH"


def install(app: Flask) -> None:
    """Answer every failure of ``app`` with a problem document."""
    app.register_error_handler(VMJobsError, on_error)
    app.register_error_handler(HTTPException, on_http_error)
    app.register_error_handler(Exception, on_unexpected_error)


def on_error(error: VMJobsError) -> Response:
    """Answer one of our own errors; internal ones become an incident."""
    if error.http_status == 500:
        return on_unexpected_error(error)
    if error.http_status >= 500:
        log.warning("%s: %s", error.code, error.message)
    response = _reply(
        error.http_status,
        error.code,
        error.message,
        hint=error.hint,
        errors=tuple(ProblemFault(**fault._asdict()) for fault in error.faults),
        service=error.service if isinstance(error, Unavailable) else "",
    )
    if isinstance(error, Unauthenticated | Forbidden):
        response.headers["WWW-Authenticate"] = challenge(error)
    if isinstance(error, RangeNotSatisfiable):
        response.headers["Content-Range"] = f"bytes */{error.size}"
    if isinstance(error, Unavailable):
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return response


def on_http_error(error: HTTPException) -> Response:
    """Answer a failure that HTTP, routing or the framework raised."""
    if isinstance(error, RoutingError):
        return on_error(error.error)
    status = error.code or 500
    if status < 400:
        return Response(error.get_response().response, status, dict(error.get_headers()))
    code = _HTTP_CODES.get(status, "INTERNAL" if status >= 500 else "BAD_REQUEST")
    detail = _HTTP_SENTENCES.get(status) or error.description or title(status)
    response = _reply(status, code, detail)
    for name, value in error.get_headers():
        if name.lower() not in {"content-type", "content-length"}:
            response.headers[name] = value
    return response


def on_unexpected_error(error: Exception) -> Response:
    """Log an unexpected error in full, and answer with an incident number to quote."""
    incident = secrets.token_hex(8)
    log.error("incident %s", incident, exc_info=error)
    return _reply(
        500,
        "INTERNAL",
        f"Something went wrong inside the service; this is incident {incident}.",
        hint="report the incident number to the people who run the service",
        instance=f"urn:vmjobs:incident:{incident}",
    )


def _reply(status: int, code: str, detail: str, **more: Any) -> Response:
    """Return a problem document as an HTTP answer."""
    document = Problem(
        type=TYPE_PREFIX + code, title=title(status), status=status, detail=detail, code=code, **more
    )
    body = document.model_dump_json(exclude_defaults=True)
    response = Response(body, status, content_type=CONTENT_TYPE)
    response.headers["Cache-Control"] = "no-store"
    return response


def title(status: int) -> str:
    """Return the status' name in RFC 9110, whatever the libraries call it."""
    return _TITLES.get(status) or HTTP_STATUS_CODES.get(status, "Error")
