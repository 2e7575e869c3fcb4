"""API clients of an execute node: for a job, its image, the node, and its cluster VMs."""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import BinaryIO, ClassVar, Final
from urllib.parse import quote

from vmjobs.client.request_bodies import FileBody
from vmjobs.client.sessions import SessionStream
from vmjobs.client.transport import (
    BYTES_HEADERS,
    ApiClient,
    ApiTransport,
    Retries,
    Token,
    parse,
    whole_size,
)
from vmjobs.client.uploads import UploadClient, quote_path
from vmjobs.cluster.ssh_session import SessionAnswer
from vmjobs.cluster.wire import Assignment, ClusterVmReports, PoolToken, TokenRequest
from vmjobs.errors import Conflict, DigestMismatch, InvalidRequest
from vmjobs.file_transfer import ContentReceiver
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
APPEND_BYTES: Final = 4 * 1024 * 1024
#: Maximum sizes of a manifest, a content's layout and a segment, in bytes.
MAX_MANIFEST: Final = 4 * 1024 * 1024
MAX_LAYOUT: Final = 257 * 1024 * 1024
MAX_SEGMENT: Final = 9 * 1024 * 1024


class _CheckpointClient(ApiClient):
    """Uploads and fetches a job's checkpoint, with the job's token."""

    default_retries = AGENT_RETRIES
    _jobs_path: ClassVar[str]

    def __init__(self, url: str, token: str, job_id: str, *, retries: Retries | None = None) -> None:
        super().__init__(url, token, retries=retries)
        self._path = f"{self._jobs_path}/{quote(job_id, safe='')}"
        self._attempt = ""

    def open_upload(self, size: int) -> UploadClient:
        # The VM is paused during this call. An upload whose answer is lost expires.
        answer = self._http.call(
            "POST",
            "/v1/uploads",
            body=UploadRequest(size=size),
            repeatable=True,
            deadline=UPLOAD_OPEN_SECONDS,
        )
        return UploadClient(self._http, parse(OpenUpload, answer))

    def save_checkpoint(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        path = f"{self._attempt_path()}/checkpoint?upload={quote(upload.id, safe='')}"
        self._http.call("PUT", path, body=checkpoint)

    def saved(self) -> CheckpointSource:
        return CheckpointSource(self._http, f"{self._path}/checkpoint")

    def _attempt_path(self) -> str:
        if not self._attempt:
            raise Conflict("the job has not been claimed")
        return f"{self._path}/attempts/{self._attempt}"


class JobAgentClient(_CheckpointClient):
    """One job, with the job's own token: a ``JobSource``.

    The API accepts repeated claims, reports and appended bytes.
    """

    _jobs_path = "/v1/jobs"

    def claim(self, claim: AttemptClaim) -> JobTicket:
        ticket = self._http.call("POST", f"{self._path}/attempts", body=claim, repeatable=True)
        self._attempt = claim.attempt
        return parse(JobTicket, ticket, strict=True)

    def end(self) -> Report:
        return self._http.get(Report, f"{self._path}/end")

    def resume(self, attempt: str) -> None:
        self._attempt = attempt

    def fetch_input(self, file: InputFile, sink: BinaryIO) -> None:
        self._http.download(f"{self._path}/inputs/{quote(file.name)}", sink.write, digest=file.digest)

    def report(self, report: Report) -> None:
        self._http.call("POST", f"{self._attempt_path()}/reports", body=report, repeatable=True)

    def append(self, stream: StreamName, offset: int, data: bytes) -> None:
        for start in range(0, len(data), APPEND_BYTES):
            piece = data[start : start + APPEND_BYTES]
            path = f"{self._attempt_path()}/streams/{stream.value}?offset={offset + start}"
            self._http.call("POST", path, body=piece, headers=BYTES_HEADERS, repeatable=True)

    def put_output(self, path: str, source: BinaryIO, size: int) -> Output:
        if why := check_path(path):
            # Checked here, because the HTTP client resolves dots in a URL before the service sees them.
            raise InvalidRequest(f"the output's name is refused: {why}")
        target = f"{self._attempt_path()}/outputs/{quote(path)}"
        return self._http.send(Output, "PUT", target, FileBody(source, size))


class CondorJobClient(_CheckpointClient):
    """The checkpoints of a transparent job (a ``CheckpointStore``).

    token: the node's.
    """

    _jobs_path = "/v1/condor-jobs"

    def __init__(
        self,
        url: str,
        token: str,
        job_id: str,
        owner: str,
        *,
        retries: Retries = AGENT_RETRIES,
    ) -> None:
        super().__init__(url, token, job_id, retries=retries)
        self._owner, self._node = owner, self._http
        self._connect = partial(ApiTransport, url, retries=retries)

    def close(self) -> None:
        super().close()
        self._node.close()

    def begin(self, attempt: str) -> Checkpoint | None:
        claim = CondorJobClaim(attempt=attempt, owner=self._owner)
        ticket = self._node.send(CondorJobTicket, "POST", f"{self._path}/attempts", claim)
        if self._http is not self._node:
            self._http.close()
        self._http, self._attempt = self._connect(ticket.token), attempt
        return ticket.checkpoint

    def report_not_resumed(self) -> None:
        self._http.call("POST", f"{self._attempt_path()}/not-resumed", repeatable=True)

    def delete_checkpoints(self) -> None:
        self._http.call("DELETE", self._attempt_path(), repeatable=True)


class CheckpointSource:
    """The files of a job's checkpoint: a ``vmjobs.file_transfer.ContentSource``."""

    def __init__(self, http: ApiTransport, path: str) -> None:
        self._http = http
        self._path = path

    def layout(self, content: str) -> bytes:
        path = f"{self._path}/contents/{quote_path(content)}/layout"
        return self._http.read_limited(path, MAX_LAYOUT)

    def segment(self, segment: bytes) -> bytes:
        return self._http.read_limited(f"{self._path}/segments/{segment.hex()}", MAX_SEGMENT)


class ImageClient(ApiClient):
    """Fetches images by digest, with a node's, a job's or a user's token."""

    default_retries = AGENT_RETRIES

    def manifest(self, digest: str) -> bytes:
        """The exact bytes of an image's manifest.

        Raises:
            NotFound: there is no such image.
            DigestMismatch: the received bytes do not match the digest.
        """
        data = self._http.read_limited(f"/v1/images/{quote_path(digest)}/manifest", MAX_MANIFEST)
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise DigestMismatch(f"manifest {digest}: the received bytes do not match the digest")
        return data

    def signature(self, digest: str) -> str:
        """All signatures of an image, separated by spaces; the caller checks them.

        Raises:
            NotFound: there is no such image.
        """
        data = self._http.read_limited(f"/v1/images/{quote_path(digest)}/signature", MAX_MANIFEST)
        return data.decode("ascii", "ignore")

    def layout(self, image: str, content: str) -> bytes:
        """The layout of a content of an image; the caller checks it.

        Raises:
            NotFound: there is no such image, or the content does not belong to it.
        """
        path = f"/v1/images/{quote_path(image)}/contents/{quote_path(content)}/layout"
        return self._http.read_limited(path, MAX_LAYOUT)

    def segment(self, image: str, segment: bytes) -> bytes:
        """A stored segment of an image; the caller checks it.

        Raises:
            NotFound: there is no such image, or the segment does not belong to it.
        """
        path = f"/v1/images/{quote_path(image)}/segments/{segment.hex()}"
        return self._http.read_limited(path, MAX_SEGMENT)

    def segment_range(self, image: str, segment: bytes, begin: int, end: int) -> tuple[bytes, int]:
        """A part of a stored segment, and the size of the whole; the caller checks it.

        Raises:
            NotFound: there is no such image, or the segment does not belong to it.
        """
        path = f"/v1/images/{quote_path(image)}/segments/{segment.hex()}"
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
        answer = self._http.call("GET", path, headers=headers)
        if answer.status_code != 206:  # a proxy does not support ranges
            return answer.content[begin:end], len(answer.content)
        return answer.content[: end - begin], whole_size(answer, begin)


class NodeClient(ApiClient):
    """Registers a node, with the node's token."""

    def put_node(self, node: Node, *, renew: bool = False) -> NodeWishes:
        """Register the node's state; returns the service's requests to the node.

        renew: also request a new token, which the service issues in the second half of the present
        token's lifetime.
        """
        path = f"/v1/nodes/{quote(node.name, safe='')}"
        params = {"renew": "true"} if renew else {}
        return self._http.send(NodeWishes, "PUT", path, node, params=params)


class AssignmentClient(ApiClient):
    """The cluster VMs of a node, with its token (a ``AssignmentSource``).

    It also carries login sessions of these VMs (a ``SessionSource``).
    """

    def __init__(self, url: str, token: Token, node: str) -> None:
        super().__init__(url, token, retries=ASSIGNMENT_RETRIES)
        # A single try that lasts as long as the service may wait.
        patience = Retries(deadline=MAX_WAIT_SECONDS + ASSIGNMENT_RETRIES.deadline)
        self._long_poll_http = ApiTransport(url, token, retries=patience)
        self._node = f"/v1/nodes/{quote(node, safe='')}"
        self._path = f"{self._node}/members"

    def close(self) -> None:
        super().close()
        self._long_poll_http.close()

    def answer(self, session: str, answer: SessionAnswer) -> None:
        self._http.call("POST", self._session(session), body=answer, repeatable=True)

    def stream(self, session: str) -> SessionStream:
        return SessionStream(self._http, self._session(session))

    def _session(self, session: str) -> str:
        return f"{self._node}/sessions/{quote(session, safe='')}"

    def assignment(self, seen: int, wait: float) -> Assignment:
        """See ``AssignmentSource``; ``wait``: 30 s at most."""
        left = min(wait, MAX_WAIT_SECONDS)
        end = time.monotonic() + left
        while True:
            params = {"seen": seen, "wait": max(0.0, left)}
            answer = self._long_poll_http.call("GET", self._path, params=params, repeatable=False)
            found = parse(Assignment, answer, strict=True)
            left = end - time.monotonic()
            if found.revision != seen or left <= 0:
                return found
            # The service answered at once, because too many nodes wait already.
            self._long_poll_http.pause(min(left, CROWDED_PAUSE_SECONDS))
            left = end - time.monotonic()

    def report(self, reports: ClusterVmReports) -> None:
        self._http.call("POST", self._path, body=reports, repeatable=True)

    def token(self, vm: str, incarnation: int) -> PoolToken:
        request = TokenRequest(incarnation=incarnation)
        return self._http.send(PoolToken, "POST", f"{self._vm_path(vm)}/token", request)

    def append_console(self, vm: str, incarnation: int, offset: int, data: bytes) -> None:
        for start in range(0, len(data), APPEND_BYTES):
            place = f"incarnation={incarnation}&offset={offset + start}"
            path = f"{self._vm_path(vm)}/console?{place}"
            piece = data[start : start + APPEND_BYTES]
            self._http.call("POST", path, body=piece, headers=BYTES_HEADERS, repeatable=True)

    def _vm_path(self, vm: str) -> str:
        return f"{self._path}/{quote(vm, safe='')}"
