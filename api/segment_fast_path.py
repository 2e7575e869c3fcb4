"""Fast path for segments: from a request to the kernel's sendfile, past the framework.

A node fetches an image in thousands of requests that differ only in one digest. If all facts about
one of them were established moments ago (the token is verified, the reader has access, the segment is
found: :mod:`repository.images.serving`), the answer is made here. The application answers all other
requests and every refusal, and defines the form of answers: a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from api.images import viewer_for
from api.operation import AccessRule, require
from api.ranges import FILE_WRAPPER, OCTET_STREAM, response_headers, select_range
from api.services import Services
from vmjobs.wire import Visibility

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_PATH: Final = re.compile(r"/v1/images/(sha256:[0-9a-f]{64})/segments/([0-9a-f]{64})")
_STATUS: Final = {200: "200 OK", 206: "206 PARTIAL CONTENT"}
#: Headers that the answer may also depend on; clients that send them take the normal path.
_CONDITIONS: Final = ("HTTP_IF_NONE_MATCH", "HTTP_IF_RANGE")


class SegmentFastPath:
    """WSGI middleware in front of ``app``, whose services are ``parts``."""

    def __init__(self, app: WSGIApplication, parts: Services, access: AccessRule) -> None:
        self._app = app
        self._parts = parts
        self._access = access

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer, or pass the request on to the application."""
        asked = _PATH.fullmatch(environ.get("PATH_INFO", ""))
        if asked is not None and _is_plain(environ):
            try:
                answer = self._answer(environ, start_response, asked[1], asked[2])
            except Exception:
                answer = None  # the application meets the error again, and reports it
            if answer is not None:
                return answer
        return self._app(environ, start_response)

    def _answer(
        self, environ: WSGIEnvironment, start: StartResponse, digest: str, segment: str
    ) -> Iterable[bytes] | None:
        principal = self._parts.principal(environ.get("HTTP_AUTHORIZATION"))
        require(self._access, principal)
        if principal.job_id is not None:
            return None  # its job may have ended
        viewer = viewer_for(principal)
        known = self._parts.repository.segment_server.cached(viewer, digest, bytes.fromhex(segment))
        if known is None:
            return None
        reader, seen_by = known
        try:
            headers = response_headers(segment, immutable=True, public=seen_by is Visibility.PUBLIC)
            chosen, status = select_range(environ.get("HTTP_RANGE"), reader.size, headers)
            assert reader.file is not None  # noqa: S101 - the store is local: see image_bytes.install
            reader.file.seek(chosen.start)
        except BaseException:
            reader.close()
            raise
        headers["Content-Type"] = OCTET_STREAM
        headers["Referrer-Policy"] = "no-referrer"
        body: Iterable[bytes] = environ[FILE_WRAPPER](reader.file)
        start(_STATUS[status], list(headers.items()))
        return body


def _is_plain(environ: WSGIEnvironment) -> bool:
    """Whether the kernel can copy the requested bytes, and no condition applies."""
    return (
        environ.get("REQUEST_METHOD") == "GET"
        and FILE_WRAPPER in environ
        and not any(name in environ for name in _CONDITIONS)
    )
