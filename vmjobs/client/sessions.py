"""One side of a login session of a cluster VM, carried by HTTP requests."""

from __future__ import annotations

from contextlib import suppress

from vmjobs.client.transport import BYTES_HEADERS, ApiTransport
from vmjobs.cluster.ssh_session import STREAM_ENDED, STREAM_HEADER, STREAM_OPEN, AppendResult
from vmjobs.errors import Unavailable, VMJobsError


class SessionStream:
    """A ``vmjobs.relay.ByteStream``. path: the session's URL path for this side."""

    def __init__(self, http: ApiTransport, path: str) -> None:
        self._http = http
        self._path = path

    def send(self, offset: int, data: bytes, end: bool) -> int:
        params = {"offset": offset, "end": "true" if end else "false"}
        path = f"{self._path}/bytes"
        answer = self._http.send(AppendResult, "POST", path, data, params=params, headers=BYTES_HEADERS)
        return answer.offset

    def receive(self, offset: int, wait: float) -> tuple[bytes, bool]:
        params = {"offset": offset, "wait": wait}
        answer = self._http.call("GET", f"{self._path}/bytes", params=params)
        state = answer.headers.get(STREAM_HEADER)
        if state not in {STREAM_OPEN, STREAM_ENDED}:
            raise Unavailable("api", "the answer about a session is not the vmjobs API's")
        return answer.content, state == STREAM_ENDED

    def close(self) -> None:
        with suppress(VMJobsError):
            self._http.call("DELETE", self._path, repeatable=False)
