"""The API as an execute node uses it: one job, its image, and the node itself."""

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
from vmjobs.client.transport import Retries, Token, Transport, Upload, parse
from vmjobs.client.uploads import UploadClient
from vmjobs.cluster.session import SessionAnswer
from vmjobs.cluster.wire import MemberReports, NodeShare, PoolToken, TokenRequest
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
from vmjobs.paths import refusal
from vmjobs.ports import ContentReceiver
from vmjobs.wire import CondorJobClaim, CondorJobTicket, NodeWishes, UploadRequest
from vmjobs.wire import Upload as OpenUpload

#: A repository that is restarted or moved is no reason to lose a job that is running well.
AGENT_RETRIES: Final = Retries(deadline=300.0, ceiling=10.0)
#: Seconds in which a repository has to say whether a machine may be saved there.
BRIEF_SECONDS: Final = 10.0
#: What an agent asks about clusters it asks again soon, with what has become of them meanwhile.
SHARE_RETRIES: Final = Retries(deadline=15.0)
#: The service answers at the latest after so many seconds, whatever it was asked to wait.
MAX_WAIT: Final = 30.0
#: Seconds until the next question where the service did not wait.
CROWDED_PAUSE: Final = 5.0
JSON_HEADERS: Final = {"Content-Type": "application/json"}
BYTES_HEADERS: Final = {"Content-Type": "application/octet-stream"}
APPEND_BYTES: Final = 4 * 1024 * 1024
#: More than this is never taken for a manifest, a content's layout, a segment; in bytes.
MAX_MANIFEST: Final = 4 * 1024 * 1024
MAX_LAYOUT: Final = 257 * 1024 * 1024
MAX_SEGMENT: Final = 9 * 1024 * 1024


def encoded(model: BaseModel) -> bytes:
    """A model as the body of a request."""
    return model.model_dump_json().encode()


class _SavedJob:
    """A job whose machine is saved, with the job's own token. path: of the job."""

    def __init__(self, http: Transport, path: str) -> None:
        self._http = http
        self._path = path
        self._attempt = ""

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._http.close()

    def open_upload(self, size: int) -> UploadClient:
        """See :class:`vmjobs.ports.JobSource`."""
        body = encoded(UploadRequest(size=size))
        # A machine stands still while this is waited for. (One whose answer is lost is given up.)
        answer = self._http.call(
            "POST",
            "/v1/uploads",
            body=body,
            headers=JSON_HEADERS,
            repeatable=True,
            deadline=BRIEF_SECONDS,
        )
        return UploadClient(self._http, parse(OpenUpload, answer))

    def keep(self, upload: ContentReceiver, checkpoint: Checkpoint) -> None:
        """See :class:`vmjobs.ports.JobSource`."""
        path = f"{self._mine()}/checkpoint?upload={quote(upload.id, safe='')}"
        body = encoded(checkpoint)
        self._http.call("PUT", path, body=body, headers=JSON_HEADERS, repeatable=True)

    def saved(self) -> SavedSource:
        """See :class:`vmjobs.ports.JobSource`."""
        return SavedSource(self._http, f"{self._path}/checkpoint")

    def _mine(self) -> str:
        if not self._attempt:
            raise Conflict("the job has not been claimed")
        return f"{self._path}/attempts/{self._attempt}"


class JobAgentClient(_SavedJob):
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
        http = Transport(url, token, session=session, retries=retries)
        super().__init__(http, f"/v1/jobs/{quote(job_id, safe='')}")

    def claim(self, claim: AttemptClaim) -> JobTicket:
        """See :class:`vmjobs.ports.JobSource`."""
        path = f"{self._path}/attempts"
        ticket = self._post(path, encoded(claim), JSON_HEADERS)
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
        self._post(f"{self._mine()}/reports", encoded(report), JSON_HEADERS)

    def append(self, stream: StreamName, offset: int, data: bytes) -> None:
        """See :class:`vmjobs.ports.JobSource`."""
        for start in range(0, len(data), APPEND_BYTES):
            piece = data[start : start + APPEND_BYTES]
            path = f"{self._mine()}/streams/{stream.value}?offset={offset + start}"
            self._post(path, piece, BYTES_HEADERS)

    def put_output(self, path: str, source: BinaryIO, size: int) -> Output:
        """See :class:`vmjobs.ports.JobSource`."""
        if why := refusal(path):
            # Said here, because dots in a URL are resolved before anybody could refuse them.
            raise InvalidRequest(f"the output's name is refused: {why}")
        target = f"{self._mine()}/outputs/{quote(path)}"
        return parse(Output, self._http.call("PUT", target, body=Upload(source, size)))

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> requests.Response:
        # Claims, reports and appended bytes may all be repeated: the API is made for it.
        return self._http.call("POST", path, body=body, headers=headers, repeatable=True)


class CondorJobClient(_SavedJob):
    """The checkpoints of a transparent job, by its node's token: a ``vmjobs.ports.CheckpointStore``."""

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
        http = Transport(url, token, session=session, retries=retries)
        super().__init__(http, f"/v1/condor-jobs/{quote(job_id, safe='')}")
        self._owner = owner
        self._node, self._connect = http, partial(Transport, url, session=session, retries=retries)

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        super().close()
        self._node.close()

    def begin(self, attempt: str) -> Checkpoint | None:
        """See :class:`vmjobs.ports.CheckpointStore`."""
        body = encoded(CondorJobClaim(attempt=attempt, owner=self._owner))
        path = f"{self._path}/attempts"
        answer = self._node.call("POST", path, body=body, headers=JSON_HEADERS, repeatable=True)
        ticket = parse(CondorJobTicket, answer)
        if self._http is not self._node:
            self._http.close()
        self._http, self._attempt = self._connect(ticket.token), attempt
        return ticket.checkpoint

    def not_resumed(self) -> None:
        """See :class:`vmjobs.ports.CheckpointStore`."""
        self._http.call("POST", f"{self._mine()}/not-resumed", repeatable=True)

    def over(self) -> None:
        """See :class:`vmjobs.ports.CheckpointStore`."""
        self._http.call("DELETE", self._mine(), repeatable=True)


class SavedSource:
    """The files of a job's checkpoint: a ``vmjobs.ports.ContentSource``."""

    def __init__(self, http: Transport, path: str) -> None:
        self._http = http
        self._path = path

    def layout(self, content: str) -> bytes:
        """See :class:`vmjobs.ports.ContentSource`."""
        return whole(self._http, f"{self._path}/contents/{_quoted(content)}/layout", MAX_LAYOUT)

    def segment(self, segment: bytes) -> bytes:
        """See :class:`vmjobs.ports.ContentSource`."""
        return whole(self._http, f"{self._path}/segments/{segment.hex()}", MAX_SEGMENT)


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
        self._http = Transport(url, token, session=session, retries=retries)

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._http.close()

    def manifest(self, digest: str) -> bytes:
        """The exact bytes of an image's manifest.

        Raises:
            NotFound: there is no such image.
            DigestMismatch: what arrived is another manifest.
        """
        data = self._whole(f"/v1/images/{_quoted(digest)}/manifest", MAX_MANIFEST)
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise DigestMismatch(f"what came as the manifest {digest} has other bytes")
        return data

    def signature(self, digest: str) -> str:
        """All signatures of an image, with spaces between; the caller checks them.

        Raises:
            NotFound: there is no such image.
        """
        data = self._whole(f"/v1/images/{_quoted(digest)}/signature", MAX_MANIFEST)
        return data.decode("ascii", "ignore")

    def layout(self, image: str, content: str) -> bytes:
        """The layout of a content of an image; the caller checks it.

        Raises:
            NotFound: there is no such image, or the content is none of its.
        """
        path = f"/v1/images/{_quoted(image)}/contents/{_quoted(content)}/layout"
        return self._whole(path, MAX_LAYOUT)

    def segment(self, image: str, segment: bytes) -> bytes:
        """A stored segment of an image; the caller checks it.

        Raises:
            NotFound: there is no such image, or the segment is none of its.
        """
        return self._whole(f"/v1/images/{_quoted(image)}/segments/{segment.hex()}", MAX_SEGMENT)

    def segment_range(self, image: str, segment: bytes, begin: int, end: int) -> tuple[bytes, int]:
        """A part of a stored segment, and the size of the whole; the caller checks it.

        Raises:
            NotFound: there is no such image, or the segment is none of its.
        """
        path = f"/v1/images/{_quoted(image)}/segments/{segment.hex()}"
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
        answer = self._http.call("GET", path, headers=headers)
        if answer.status_code != 206:  # somebody on the way knows of no ranges
            return answer.content[begin:end], len(answer.content)
        first, _, whole = answer.headers.get("Content-Range", "").partition("/")
        if not first.startswith(f"bytes {begin}-") or not whole.isdigit():
            raise Unavailable("api", "the API answers with a range that was not asked for")
        return answer.content[: end - begin], int(whole)

    def _whole(self, path: str, limit: int) -> bytes:
        return whole(self._http, path, limit)


def whole(http: Transport, path: str, limit: int) -> bytes:
    """What there is at a path, of at most ``limit`` bytes.  Raises DigestMismatch if it is more."""
    data = bytearray()

    def take(piece: bytes) -> None:
        data.extend(piece)
        if len(data) > limit:
            raise DigestMismatch(f"what came from {path} has more than {limit} bytes")

    http.download(path, take)
    return bytes(data)


def _quoted(digest: str) -> str:
    return quote(digest, safe=":")


class NodeClient:
    """Announces a node, with the node's token."""

    def __init__(
        self,
        url: str,
        token: Token,
        *,
        session: requests.Session | None = None,
        retries: Retries | None = None,
    ) -> None:
        self._http = Transport(url, token, session=session, retries=retries)

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._http.close()

    def put_node(self, node: Node, *, renew: bool = False) -> NodeWishes:
        """Tell the API what this node has and does; what the node is asked to do. renew: ask for a new
        token, too, which there is in the second half of the present one's life.
        """
        path = f"/v1/nodes/{quote(node.name, safe='')}"
        params = {"renew": "true"} if renew else {}
        answer = self._http.call("PUT", path, body=encoded(node), params=params, headers=JSON_HEADERS)
        return parse(NodeWishes, answer)


class ShareClient:
    """What a node is to have of virtual clusters, with its token: a ``vmjobs.ports.ShareSource``.

    It also speaks for those who log in to machines there: a ``vmjobs.ports.SessionSource``.
    """

    def __init__(
        self,
        url: str,
        token: Token,
        node: str,
        *,
        session: requests.Session | None = None,
        retries: Retries = SHARE_RETRIES,
    ) -> None:
        self._http = Transport(url, token, session=session, retries=retries)
        # One try waits for as long as the service may, and there is no second one.
        patience = replace(retries, deadline=MAX_WAIT + retries.deadline)
        self._waiting = Transport(url, token, session=session, retries=patience)
        self._node = f"/v1/nodes/{quote(node, safe='')}"
        self._path = f"{self._node}/members"

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._http.close()
        self._waiting.close()

    def answer(self, session: str, answer: SessionAnswer) -> None:
        """See :class:`vmjobs.ports.SessionSource`."""
        self._post(self._session(session), encoded(answer), JSON_HEADERS)

    def stream(self, session: str) -> SessionStream:
        """See :class:`vmjobs.ports.SessionSource`."""
        return SessionStream(self._http, self._session(session))

    def _session(self, session: str) -> str:
        return f"{self._node}/sessions/{quote(session, safe='')}"

    def share(self, seen: int, wait: float) -> NodeShare:
        """See :class:`vmjobs.ports.ShareSource`; ``wait``: 30 s at most."""
        left = min(wait, MAX_WAIT)
        end = time.monotonic() + left
        while True:
            params = {"seen": seen, "wait": max(0.0, left)}
            answer = self._waiting.call("GET", self._path, params=params, repeatable=False)
            found = parse(NodeShare, answer)
            left = end - time.monotonic()
            if found.revision != seen or left <= 0:
                return found
            # So many nodes wait that the service lets no more of them do so.
            self._waiting.pause(min(left, CROWDED_PAUSE))
            left = end - time.monotonic()

    def report(self, reports: MemberReports) -> None:
        """See :class:`vmjobs.ports.ShareSource`."""
        self._post(self._path, encoded(reports), JSON_HEADERS)

    def token(self, member: str, incarnation: int) -> PoolToken:
        """See :class:`vmjobs.ports.ShareSource`."""
        body = encoded(TokenRequest(incarnation=incarnation))
        return parse(PoolToken, self._post(f"{self._member(member)}/token", body, JSON_HEADERS))

    def append_console(self, member: str, incarnation: int, offset: int, data: bytes) -> None:
        """See :class:`vmjobs.ports.ShareSource`."""
        for start in range(0, len(data), APPEND_BYTES):
            place = f"incarnation={incarnation}&offset={offset + start}"
            piece = data[start : start + APPEND_BYTES]
            self._post(f"{self._member(member)}/console?{place}", piece, BYTES_HEADERS)

    def _member(self, member: str) -> str:
        return f"{self._path}/{quote(member, safe='')}"

    def _post(self, path: str, body: bytes, headers: dict[str, str]) -> requests.Response:
        return self._http.call("POST", path, body=body, headers=headers, repeatable=True)
