"""API clients of an execute node: for a job, its image, the node, and its cluster VMs."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from functools import partial
from typing import BinaryIO, Final
from urllib.parse import quote

import requests
from pydantic import BaseModel

from vmjobs.client.sessions import SessionStream
from vmjobs.client.transport import ApiTransport, FileBody, Retries, Token, parse
from vmjobs.client.uploads import UploadClient
from vmjobs.cluster.ssh_session import SessionAnswer
from vmjobs.cluster.wire import Assignment, ClusterVmReports, PoolToken, TokenRequest
from vmjobs.errors import Conflict, DigestMismatch, InvalidRequest, Unavailable
from vmjobs.model import (
    AttemptClaim,
    Checkpoint,
    InputFile,
    JobTicket,
    Node,
    Output,
    Report,
    StreamName,
)
from vmjobs.paths import check_path
from vmjobs.ports import ContentReceiver
from vmjobs.wire import CondorJobClaim, CondorJobTicket, NodeWishes, UploadRequest
from vmjobs.wire import Upload as OpenUpload

#: Long, so that running jobs survive a restart or move of the repository.
AGENT_RETRIES: Final = Retries(deadline=300.0, ceiling=10.0)
#: Time for a repository to accept the upload of a checkpoint, in seconds.
UPLOAD_OPEN_SECONDS: Final = 10.0
#: Short, because an agent soon repeats requests about clusters with their then current state.
ASSIGNMENT_RETRIES: Final = Retries(deadline=15.0)
#: Maximum time that the service waits before it answers, in seconds.
MAX_WAIT_SECONDS: Final = 30.0
#: Seconds until the next request if the service answered without waiting.
CROWDED_PAUSE_SECONDS: Final = 5.0
JSON_HEADERS: Final = {"Content-Type": "application/json"}
BYTES_HEADERS: Final = {"Content-Type": "application/octet-stream"}
APPEND_BYTES: Final = 4 * 1024 * 1024
#: Maximum sizes of a manifest, a content's layout and a segment, in bytes.
MAX_MANIFEST: Final = 4 * 1024 * 1024
MAX_LAYOUT: Final = 257 * 1024 * 1024
MAX_SEGMENT: Final = 9 * 1024 * 1024


def encode_json(model: BaseModel) -> bytes:
    """A model as the body of a request."""
    return model.model_dump_json().encode()


class _CheckpointClient:
    """Uploads and fetches a job's checkpoint, with the job's token. path: of the job."""

    def __init__(self, http: ApiTransport, path: str) -> None:
        self._http = http
        self._path = path
        self._attempt = ""

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._http.close()

    def open_upload(self, size: int) -> UploadClient:
        """See :class:`vmjobs.ports.JobSource`."""
        body = encode_json(UploadRequest(size=size))
        # The VM is paused during this call. An upload whose answer is lost expires.
        answer = self._http.call(
            "POST",
            "/v1/uploads",
            body=body,
            headers=JSON_HEADERS,
            repeatable=True,
            deadline=UPLOAD_OPEN_SECONDS,
        )
        return UploadClient(self._http, parse(OpenUpload, answer))

    def save_checkpoint(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        """See :class:`vmjobs.ports.JobSource`."""
        path = f"{self._attempt_path()}/checkpoint?upload={quote(upload.id, safe='')}"
        body = encode_json(checkpoint)
        self._http.call("PUT", path, body=body, headers=JSON_HEADERS, repeatable=True)

    def saved(self) -> CheckpointSource:
        """See :class:`vmjobs.ports.JobSource`."""
        return CheckpointSource(self._http, f"{self._path}/checkpoint")

    def _attempt_path(self) -> str:
        if not self._attempt:
            raise Conflict("the job has not been claimed")
        return f"{self._path}/attempts/{self._attempt}"


class JobAgentClient(_CheckpointClient):
    """One job, with the job's own token: a ``vmjobs.ports.JobSource``."""

    def __init__(
        self,
        url: str,
        token: str,
        job_id: str,
        *,
        session: requests.Session | None = None,
        retries: Retries = AGENT_RETRIES,
    ) -> None:
        http = ApiTransport(url, token, session=session, retries=retries)
        super().__init__(http, f"/v1/jobs/{quote(job_id, safe='')}")

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """See :class:`vmjobs.ports.JobSource`."""
        path = f"{self._path}/attempts"
        ticket = self._post(path, encode_json(claim), JSON_HEADERS)
        self._attempt = claim.attempt
        return parse(JobTicket, ticket)

    def end(self) -> Report:
        """See :class:`vmjobs.ports.JobSource`."""
        return parse(Report, self._http.call("GET", f"{self._path}/end"))

    def resume(self, attempt: str) -> None:
        """See :class:`vmjobs.ports.JobSource`."""
        self._attempt = attempt

    def fetch_input(self, file: InputFile, sink: BinaryIO) -> None:
        """See :class:`vmjobs.ports.JobSource`."""
        self._http.download(f"{self._path}/inputs/{quote(file.name)}", sink.write, digest=file.digest)

    def report(self, report: Report) -> None:
        """See :class:`vmjobs.ports.JobSource`."""
        self._post(f"{self._attempt_path()}/reports", encode_json(report), JSON_HEADERS)

    def append(self, stream: StreamName, offset: int, data: bytes) -> None:
        """See :class:`vmjobs.ports.JobSource`."""
        for start in range(0, len(data), APPEND_BYTES):
            piece = data[start : start + APPEND_BYTES]
            path = f"{self._attempt_path()}/streams/{stream.value}?offset={offset + start}"
            self._post(path, piece, BYTES_HEADERS)

    def put_output(self, path: str, source: BinaryIO, size: int) -> Output:
        """See :class:`vmjobs.ports.JobSource`."""
        if why := check_path(path):
            # Checked here, because the HTTP client resolves dots in a URL before the service sees them.
            raise InvalidRequest(f"the output's name is refused: {why}")
        target = f"{self._attempt_path()}/outputs/{quote(path)}"
        return parse(Output, self._http.call("PUT", target, body=FileBody(source, size)))

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> requests.Response:
        # The API accepts repeated claims, reports and appended bytes.
        return self._http.call("POST", path, body=body, headers=headers, repeatable=True)


class CondorJobClient(_CheckpointClient):
    """The checkpoints of a transparent job (a ``vmjobs.ports.CheckpointStore``).

    token: the node's.
    """

    def __init__(
        self,
        url: str,
        token: str,
        job_id: str,
        owner: str,
        *,
        session: requests.Session | None = None,
        retries: Retries = AGENT_RETRIES,
    ) -> None:
        http = ApiTransport(url, token, session=session, retries=retries)
        super().__init__(http, f"/v1/condor-jobs/{quote(job_id, safe='')}")
        self._owner = owner
        self._node, self._connect = http, partial(ApiTransport, url, session=session, retries=retries)

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        super().close()
        self._node.close()

    def begin(self, attempt: str) -> Checkpoint | None:
        """See :class:`vmjobs.ports.CheckpointStore`."""
        body = encode_json(CondorJobClaim(attempt=attempt, owner=self._owner))
        path = f"{self._path}/attempts"
        answer = self._node.call("POST", path, body=body, headers=JSON_HEADERS, repeatable=True)
        ticket = parse(CondorJobTicket, answer)
        if self._http is not self._node:
            self._http.close()
        self._http, self._attempt = self._connect(ticket.token), attempt
        return ticket.checkpoint

    def report_not_resumed(self) -> None:
        """See :class:`vmjobs.ports.CheckpointStore`."""
        self._http.call("POST", f"{self._attempt_path()}/not-resumed", repeatable=True)

    def delete_checkpoints(self) -> None:
        """See :class:`vmjobs.ports.CheckpointStore`."""
        self._http.call("DELETE", self._attempt_path(), repeatable=True)


class CheckpointSource:
    """The files of a job's checkpoint: a ``vmjobs.ports.ContentSource``."""

    def __init__(self, http: ApiTransport, path: str) -> None:
        self._http = http
        self._path = path

    def layout(self, content: str) -> bytes:
        """See :class:`vmjobs.ports.ContentSource`."""
        return read_limited(self._http, f"{self._path}/contents/{_quoted(content)}/layout", MAX_LAYOUT)

    def segment(self, segment: bytes) -> bytes:
        """See :class:`vmjobs.ports.ContentSource`."""
        return read_limited(self._http, f"{self._path}/segments/{segment.hex()}", MAX_SEGMENT)


class ImageClient:
    """Fetches images by digest, with a node's, a job's or a user's token."""

    def __init__(
        self,
        url: str,
        token: Token,
        *,
        session: requests.Session | None = None,
        retries: Retries = AGENT_RETRIES,
    ) -> None:
        self._http = ApiTransport(url, token, session=session, retries=retries)

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._http.close()

    def manifest(self, digest: str) -> bytes:
        """The exact bytes of an image's manifest.

        Raises:
            NotFound: there is no such image.
            DigestMismatch: the received bytes do not match the digest.
        """
        data = self._read_limited(f"/v1/images/{_quoted(digest)}/manifest", MAX_MANIFEST)
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise DigestMismatch(f"manifest {digest}: the received bytes do not match the digest")
        return data

    def signature(self, digest: str) -> str:
        """All signatures of an image, separated by spaces; the caller checks them.

        Raises:
            NotFound: there is no such image.
        """
        data = self._read_limited(f"/v1/images/{_quoted(digest)}/signature", MAX_MANIFEST)
        return data.decode("ascii", "ignore")

    def layout(self, image: str, content: str) -> bytes:
        """The layout of a content of an image; the caller checks it.

        Raises:
            NotFound: there is no such image, or the content does not belong to it.
        """
        path = f"/v1/images/{_quoted(image)}/contents/{_quoted(content)}/layout"
        return self._read_limited(path, MAX_LAYOUT)

    def segment(self, image: str, segment: bytes) -> bytes:
        """A stored segment of an image; the caller checks it.

        Raises:
            NotFound: there is no such image, or the segment does not belong to it.
        """
        return self._read_limited(f"/v1/images/{_quoted(image)}/segments/{segment.hex()}", MAX_SEGMENT)

    def segment_range(self, image: str, segment: bytes, begin: int, end: int) -> tuple[bytes, int]:
        """A part of a stored segment, and the size of the whole; the caller checks it.

        Raises:
            NotFound: there is no such image, or the segment does not belong to it.
        """
        path = f"/v1/images/{_quoted(image)}/segments/{segment.hex()}"
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
        answer = self._http.call("GET", path, headers=headers)
        if answer.status_code != 206:  # a proxy does not support ranges
            return answer.content[begin:end], len(answer.content)
        first, _, read_limited = answer.headers.get("Content-Range", "").partition("/")
        if not first.startswith(f"bytes {begin}-") or not read_limited.isdigit():
            raise Unavailable("api", "the API answered with another range than requested")
        return answer.content[: end - begin], int(read_limited)

    def _read_limited(self, path: str, limit: int) -> bytes:
        return read_limited(self._http, path, limit)


def read_limited(http: ApiTransport, path: str, limit: int) -> bytes:
    """Download at most ``limit`` bytes.  Raises DigestMismatch if the resource has more."""
    data = bytearray()

    def take(piece: bytes) -> None:
        data.extend(piece)
        if len(data) > limit:
            raise DigestMismatch(f"{path} has more than {limit} bytes")

    http.download(path, take)
    return bytes(data)


def _quoted(digest: str) -> str:
    return quote(digest, safe=":")


class NodeClient:
    """Registers a node, with the node's token."""

    def __init__(
        self,
        url: str,
        token: Token,
        *,
        session: requests.Session | None = None,
        retries: Retries | None = None,
    ) -> None:
        self._http = ApiTransport(url, token, session=session, retries=retries)

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._http.close()

    def put_node(self, node: Node, *, renew: bool = False) -> NodeWishes:
        """Register the node's state; returns the service's requests to the node.

        renew: also request a new token, which the service issues in the second half of the present
        token's lifetime.
        """
        path = f"/v1/nodes/{quote(node.name, safe='')}"
        params = {"renew": "true"} if renew else {}
        answer = self._http.call(
            "PUT", path, body=encode_json(node), params=params, headers=JSON_HEADERS
        )
        return parse(NodeWishes, answer)


class AssignmentClient:
    """The cluster VMs of a node, with its token (a ``vmjobs.ports.AssignmentSource``).

    It also carries login sessions of these VMs (a ``vmjobs.ports.SessionSource``).
    """

    def __init__(
        self,
        url: str,
        token: Token,
        node: str,
        *,
        session: requests.Session | None = None,
        retries: Retries = ASSIGNMENT_RETRIES,
    ) -> None:
        self._http = ApiTransport(url, token, session=session, retries=retries)
        # A single try that lasts as long as the service may wait.
        patience = replace(retries, deadline=MAX_WAIT_SECONDS + retries.deadline)
        self._long_poll_http = ApiTransport(url, token, session=session, retries=patience)
        self._node = f"/v1/nodes/{quote(node, safe='')}"
        self._path = f"{self._node}/members"

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._http.close()
        self._long_poll_http.close()

    def answer(self, session: str, answer: SessionAnswer) -> None:
        """See :class:`vmjobs.ports.SessionSource`."""
        self._post(self._session(session), encode_json(answer), JSON_HEADERS)

    def stream(self, session: str) -> SessionStream:
        """See :class:`vmjobs.ports.SessionSource`."""
        return SessionStream(self._http, self._session(session))

    def _session(self, session: str) -> str:
        return f"{self._node}/sessions/{quote(session, safe='')}"

    def share(self, seen: int, wait: float) -> Assignment:
        """See :class:`vmjobs.ports.AssignmentSource`; ``wait``: 30 s at most."""
        left = min(wait, MAX_WAIT_SECONDS)
        end = time.monotonic() + left
        while True:
            params = {"seen": seen, "wait": max(0.0, left)}
            answer = self._long_poll_http.call("GET", self._path, params=params, repeatable=False)
            found = parse(Assignment, answer)
            left = end - time.monotonic()
            if found.revision != seen or left <= 0:
                return found
            # The service answered at once, because too many nodes wait already.
            self._long_poll_http.pause(min(left, CROWDED_PAUSE_SECONDS))
            left = end - time.monotonic()

    def report(self, reports: ClusterVmReports) -> None:
        """See :class:`vmjobs.ports.AssignmentSource`."""
        self._post(self._path, encode_json(reports), JSON_HEADERS)

    def token(self, member: str, incarnation: int) -> PoolToken:
        """See :class:`vmjobs.ports.AssignmentSource`."""
        body = encode_json(TokenRequest(incarnation=incarnation))
        return parse(PoolToken, self._post(f"{self._member(member)}/token", body, JSON_HEADERS))

    def append_console(self, member: str, incarnation: int, offset: int, data: bytes) -> None:
        """See :class:`vmjobs.ports.AssignmentSource`."""
        for start in range(0, len(data), APPEND_BYTES):
            place = f"incarnation={incarnation}&offset={offset + start}"
            piece = data[start : start + APPEND_BYTES]
            self._post(f"{self._member(member)}/console?{place}", piece, BYTES_HEADERS)

    def _member(self, member: str) -> str:
        return f"{self._path}/{quote(member, safe='')}"

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> requests.Response:
        return self._http.call("POST", path, body=body, headers=headers, repeatable=True)
