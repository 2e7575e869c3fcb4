"""HTTP with retries: repeats requests where that is safe, within a deadline."""

from __future__ import annotations

import email.utils
import hashlib
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import urlsplit

import requests
from pydantic import BaseModel, ValidationError

from vmjobs import __version__
from vmjobs.client.http_errors import error_from_response, root_cause
from vmjobs.client.request_bodies import PIECE_BYTES, BytesBody, FileBody
from vmjobs.closeable import Closeable
from vmjobs.errors import ConfigError, DigestMismatch, Unauthenticated, Unavailable, VMJobsError
from vmjobs.file_transfer import ProgressCallback
from vmjobs.model import REPLY

JSON_HEADERS: Final = {"Content-Type": "application/json"}
BYTES_HEADERS: Final = {"Content-Type": "application/octet-stream"}
#: Poll intervals in seconds: at first and after a change, and the maximum.
FIRST_POLL_SECONDS: Final = 0.3
LAST_POLL_SECONDS: Final = 2.0
_TRANSIENT_STATUSES: Final = frozenset({429, 502, 503, 504})
_IDEMPOTENT_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "DELETE"})

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Retries:
    """A client's retry policy. All times in seconds.

    deadline: for a call with all of its tries; a transfer restarts it whenever bytes arrive.
    first, ceiling: the pauses between tries grow from ``first`` to ``ceiling``.
    connect, read: timeouts of one try, for the connection and for each read.
    on_wait: called once in a call after ``quiet`` seconds of failed tries, with the error and the
        remaining time.
    """

    deadline: float = 15.0
    first: float = 0.2
    ceiling: float = 5.0
    connect: float = 5.0
    read: float = 60.0
    on_wait: Callable[[VMJobsError, float], object] | None = None
    quiet: float = 2.0

    def pause(self, tries: int) -> float:
        """The pause after ``tries`` tries: exponential, random so that clients spread."""
        longest = min(self.ceiling, self.first * 2.0 ** min(tries - 1, 16))
        return random.uniform(longest / 2, longest)  # noqa: S311 - no secret depends on it


#: A token, or a function that reads it for each request, because it may change while a program runs.
Token = str | Callable[[], str]


class _Bearer(requests.auth.AuthBase):
    """Sends the token. As an auth object it also overrides ``~/.netrc``."""

    def __init__(self, token: Token) -> None:
        self._token = token if callable(token) else _check_token(token)

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if token := _check_token(self._token()) if callable(self._token) else self._token:
            request.headers["Authorization"] = f"Bearer {token}"
        return request


def _check_token(token: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]*", token.strip()):
        raise Unauthenticated("the token is malformed: it has spaces or non-ASCII characters")
    return token.strip()


_RawBody = bytes | FileBody | BytesBody | None
#: A model is sent as JSON.
Body = _RawBody | BaseModel


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    body: _RawBody
    params: Mapping[str, Any]
    headers: Mapping[str, str]
    stream: bool


class ApiTransport:
    """A connection to one API with one token. Safe to share between threads."""

    def __init__(self, url: str, token: Token = "", *, retries: Retries | None = None) -> None:
        self._base = check_url(url)
        self._session = requests.Session()
        self._auth = _Bearer(token)
        self._retries = retries or Retries()
        self._closed = threading.Event()

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._closed.set()
        self._session.close()

    def pause(self, seconds: float) -> None:
        """Wait, unless the transport is closed meanwhile.

        Raises:
            Unavailable: it was closed.
        """
        if self._closed.wait(seconds):
            raise Unavailable("api", "the connection to the API was closed")

    def get(self, model: type[Model], path: str, params: Mapping[str, Any] | None = None) -> Model:
        """GET a JSON object."""
        return parse(model, self.call("GET", path, params=params))

    def pages(self, model: type[Model], path: str) -> Iterator[Model]:
        """GET a list page by page; ``model.next`` is the cursor of the next page."""
        cursor = ""
        while True:
            found = self.get(model, path, {"cursor": cursor} if cursor else None)
            yield found
            cursor = str(getattr(found, "next", ""))
            if not cursor:
                return

    def send(
        self,
        model: type[Model],
        method: str,
        path: str,
        body: Body = None,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Model:
        """Send a request whose repeats are harmless; returns its JSON answer."""
        answer = self.call(method, path, body=body, params=params, headers=headers, repeatable=True)
        return parse(model, answer)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Body = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
        accept: frozenset[int] = frozenset(),
        stream: bool = False,
        deadline: float = math.inf,
    ) -> requests.Response:
        """Send a request, with retries, until a final answer.

        repeatable: retries are harmless; default: for the methods that HTTP defines as idempotent.
        accept: statuses of 300 and more that are returned instead of raised.
        deadline: seconds for this call, if less than the transport's own.

        Raises:
            VMJobsError: the error that the answer reports.
            Unavailable: no answer within the deadline.
        """
        if isinstance(body, BaseModel):
            body, headers = body.model_dump_json().encode(), {**JSON_HEADERS, **(headers or {})}
        can_retry = method in _IDEMPOTENT_METHODS if repeatable is None else repeatable
        if isinstance(body, FileBody):
            can_retry = can_retry and body.repeatable
        request = _Request(method, path, body, params or {}, headers or {}, stream)
        begin = time.monotonic()
        end = begin + min(self._retries.deadline, deadline)
        tries, has_reported = 0, False
        while True:
            tries += 1
            retry_after_seconds = 0.0
            try:
                response = self._send_once(request, end)
            except requests.RequestException as error:
                failure: VMJobsError = self._unreachable(error)
                if isinstance(error, ValueError):  # the request itself, or a proxy's URL, is invalid
                    raise failure from error
            else:
                if response.status_code < 300 or response.status_code in accept:
                    return response
                failure = error_from_response(response)
                response.close()
                if response.status_code not in _TRANSIENT_STATUSES:
                    raise failure
                retry_after_seconds = retry_after(response.headers.get("Retry-After"))
            wait = max(retry_after_seconds, self._retries.pause(tries))
            if not can_retry or time.monotonic() + wait > end:
                raise failure
            present = time.monotonic()
            if (
                self._retries.on_wait
                and not has_reported
                and present + wait - begin > self._retries.quiet
            ):
                has_reported = True
                self._retries.on_wait(failure, end - present)
            self.pause(wait)

    def _send_once(self, request: _Request, end: float) -> requests.Response:
        if self._closed.is_set():
            raise Unavailable("api", "the connection to the API was closed")
        if isinstance(request.body, FileBody):
            request.body.rewind()
        left = max(0.5, end - time.monotonic())
        # A transfer has no limit on its duration, only on the time without data.
        transfer = request.stream or isinstance(request.body, FileBody | BytesBody)
        read = self._retries.read if transfer else min(self._retries.read, left)
        return self._session.request(
            request.method,
            self._base + request.path,
            # requests would send an empty upload chunked; b"" gets a Content-Length.
            data=request.body if request.body is None or len(request.body) else b"",
            params=request.params,
            headers={"User-Agent": f"vmjobs/{__version__}", **request.headers},
            auth=self._auth,
            timeout=(min(self._retries.connect, left), read),
            stream=request.stream,
            allow_redirects=False,
        )

    def _unreachable(self, error: requests.RequestException) -> Unavailable:
        return Unavailable(
            "api",
            f"cannot reach the API at {self._base}: {root_cause(error)}",
            hint="check the setting api_url and the network, or ask the service's operators",
        )

    def download(
        self,
        path: str,
        write: Callable[[bytes], object],
        *,
        digest: str = "",
        progress: ProgressCallback | None = None,
    ) -> int:
        """GET bytes and ``write`` them, resuming broken transfers; returns their number.

        Raises:
            DigestMismatch: the bytes do not match ``digest``. They have been written already, so the
                caller must use a temporary name until this returns.
        """
        state = hashlib.sha256()
        done, tries = 0, 0
        end = time.monotonic() + self._retries.deadline
        while True:
            headers = {"Accept-Encoding": "identity"}
            if done:
                headers["Range"] = f"bytes={done}-"
            response = self.call("GET", path, headers=headers, stream=True)
            with response:
                total, skip = _parse_extent(response, done)
                before = done
                try:
                    for data in response.iter_content(PIECE_BYTES):
                        piece, skip = data[skip:], max(0, skip - len(data))
                        state.update(piece)
                        write(piece)
                        done += len(piece)
                        if progress:
                            progress(done, total)
                    failure = f"the transfer ended after {done} of {total} bytes"
                except requests.RequestException as error:
                    failure = root_cause(error)
            if done == total:
                break
            if done > before:
                end, tries = time.monotonic() + self._retries.deadline, 0
            tries += 1
            wait = self._retries.pause(tries)
            if time.monotonic() + wait > end:
                raise Unavailable("api", f"cannot read {path} from {self._base}: {failure}")
            self.pause(wait)
        if digest and f"sha256:{state.hexdigest()}" != digest:
            raise DigestMismatch(f"{digest}: the received bytes do not match the digest")
        return done

    def read_limited(self, path: str, limit: int) -> bytes:
        """GET at most ``limit`` bytes.  Raises DigestMismatch if the resource has more."""
        data = bytearray()

        def take(piece: bytes) -> None:
            data.extend(piece)
            if len(data) > limit:
                raise DigestMismatch(f"{path} has more than {limit} bytes")

        self.download(path, take)
        return bytes(data)


class ApiClient(Closeable):
    """Base of clients with a connection of their own."""

    default_retries: ClassVar[Retries] = Retries()

    def __init__(self, url: str, token: Token = "", *, retries: Retries | None = None) -> None:
        self._http = ApiTransport(url, token, retries=retries or self.default_retries)

    def close(self) -> None:
        """Give connections back; calls that wait for another try fail at once."""
        self._http.close()


def next_poll_pause(pause: float, *, changed: bool) -> float:
    """Seconds until the next poll, after a pause of ``pause`` seconds."""
    return FIRST_POLL_SECONDS if changed else min(LAST_POLL_SECONDS, pause * 1.5)


def check_url(url: str) -> str:
    """The API's base URL without a slash at its end.

    Raises:
        ConfigError: it is not an http or https URL.
    """
    try:
        parts = urlsplit(url.strip())
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise ConfigError(
            f"{url!r} is not the URL of an API", hint="api_url must be like http://127.0.0.1:8080"
        )
    return url.strip().rstrip("/")


def _parse_extent(response: requests.Response, done: int) -> tuple[int, int]:
    """The length of the whole body, and how many bytes of this answer are known already."""
    if response.status_code == 206:
        return whole_size(response, done), 0
    length = response.headers.get("Content-Length", "")
    if not length.isdigit():
        raise Unavailable("api", "the API answered without a Content-Length")
    return int(length), done


def whole_size(response: requests.Response, begin: int) -> int:
    """The size of the whole body, from an answer with the part that starts at ``begin``.

    Raises:
        Unavailable: the answer has another part.
    """
    first, _, total = response.headers.get("Content-Range", "").partition("/")
    if not first.startswith(f"bytes {begin}-") or not total.isdigit():
        raise Unavailable("api", "the API answered with another range than requested")
    return int(total)


def retry_after(header: str | None) -> float:
    """The seconds of a ``Retry-After`` header; 0 if it is absent or malformed."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(min(int(text[:9]), 86400))
    try:
        moment = email.utils.parsedate_to_datetime(text)
        return max(0.0, moment.timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def parse(model: type[Model], response: requests.Response, *, strict: bool = False) -> Model:
    """Parse a JSON answer as ``model``.

    strict: refuse unknown fields of strict models. For what an agent is told to run: a field that
    it does not know may be a limit or a permission.

    Raises:
        Unavailable: it does not fit; another service than the API answers at this address.
    """
    try:
        return model.model_validate_json(response.content, context=None if strict else REPLY)
    except ValidationError as error:
        raise Unavailable(
            "api",
            f"{response.url} answered in another format than the vmjobs API",
            hint="check the setting api_url, and the versions of client and service",
        ) from error
