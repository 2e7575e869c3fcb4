"""The guest endpoint: an HTTP service for one VM (guest contract, "Endpoint").

It listens at one address in the VM's own network. Its token is valid for this service only; the guest
never sees another. Signals, reports and the script's output use it; files travel by disk.

One thread has the connections of all guests (:mod:`.guest_loop`). Each carries one request;
:func:`answer` handles it in another thread, because it may wait for a disk or the service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from socket import socket as Socket
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import h11

from vmjobs.agent.guest import dhcp
from vmjobs.agent.guest.guest_loop import Connections, accepting, guest_loop, in_loop
from vmjobs.agent.guest.guest_session import CONTROL, OTHER_GUEST, RENEWAL, GuestSession
from vmjobs.agent.vm.events import GuestReady, parse_exit_report
from vmjobs.errors import Forbidden, VMJobsError
from vmjobs.hypervisor.base import ENDPOINT_PORT, Network
from vmjobs.model import ExitChannel

log = logging.getLogger(__name__)

#: The longest wait of a request for signals, in seconds.
MAX_WAIT_SECONDS = 25
MAX_LOG_CHUNK = 1024 * 1024
#: Bytes of a request's headers: a token, and a path of full size with each byte escaped.
MAX_HEADER = 16 * 1024
#: The most connections. Any program in the guest may connect without a token, and must not keep the
#: guest out: beyond this number the oldest connection that has shown no token is closed.
MAX_CONNECTIONS = 256
#: Seconds after which a connection without a request is closed.
HEADER_SECONDS = 30.0
#: The most requests of one guest with bodies in memory at a time; others wait.
MAX_BODIES: Final = 4
#: Seconds for requests that are in progress when the endpoint closes.
CLOSE_SECONDS: Final = 2.0

_WORKERS: Final = ThreadPoolExecutor(32, "endpoint")

#: Status and text.
Answer = tuple[int, str]


@dataclass(frozen=True)
class GuestRequest:
    """A request. target: path and query as received."""

    method: str
    target: str
    body: bytes = b""

    @property
    def path(self) -> str:
        """Without the query."""
        return urlsplit(self.target).path

    def number(self, name: str, default: int) -> int:
        try:
            return int(dict(parse_qsl(urlsplit(self.target).query))[name])
        except (KeyError, ValueError):
            return default

    @property
    def done(self) -> int | None:
        """Number of signals that the guest has delivered; None: it does not count."""
        found = self.number("done", -1)
        return None if found < 0 else found


# ---------------------------------------------------------------------- actions


def answer(session: GuestSession, guest_request: GuestRequest) -> Answer:
    """Return the answer to a guest's request. Blocks."""
    action = _ACTIONS.get((guest_request.method, guest_request.path))
    return (404, "there is no such request") if action is None else action(session, guest_request)


def _ready(session: GuestSession, _guest_request: GuestRequest) -> Answer:
    session.event_queue.put(GuestReady())
    return 204, ""


def _control(session: GuestSession, guest_request: GuestRequest) -> Answer:
    return 200, "".join(f"signal {number}\n" for number in session.take_signals(guest_request.done))


def _renewal(_session: GuestSession, _guest_request: GuestRequest) -> Answer:
    return 204, ""  # the guest has shown the current token


def _pool_token(session: GuestSession, _guest_request: GuestRequest) -> Answer:
    if session.pool_token is None:
        return 404, "this VM belongs to no cluster"
    try:
        return 200, session.pool_token()
    except Forbidden as refused:
        return 403, refused.message
    except VMJobsError as error:
        log.warning("a guest gets no token now: %s", error)
        return 503, "there is no token now; try again"


def _report_exit(name: str, session: GuestSession, guest_request: GuestRequest) -> Answer:
    text = guest_request.body[:256].decode("ascii", "replace")
    event = parse_exit_report(name, text, ExitChannel.ENDPOINT)
    if event is None:
        return 400, "want code=N or signal=N"
    session.event_queue.put(event)
    return 204, ""


def _log(name: str, session: GuestSession, guest_request: GuestRequest) -> Answer:
    offset = guest_request.number("offset", -1)
    with session.writing:
        try:
            outcome = _append(session, name, offset, guest_request.body)
        except OSError as error:
            session.lost[name] = error  # the guest tries again a few times, then drops the data
            raise
        if outcome[0] == 204:
            session.lost.pop(name, None)
        return outcome


def _append(session: GuestSession, name: str, offset: int, data: bytes) -> Answer:
    if session.on_output is not None:
        return _forward_output(session, session.on_output, name, offset, data)
    path = session.logs[name]
    size = path.stat().st_size if path.exists() else 0
    if offset < 0 or (offset > size and size < session.max_log):
        return 409, f"the next offset is {size}"
    fresh = data[max(0, size - offset) :][: max(0, session.max_log - size)]
    if fresh and offset <= size:
        with path.open("ab") as file:
            file.write(fresh)
        session.on_log()
    return 204, ""


def _forward_output(
    session: GuestSession, take: Callable[[bytes], None], name: str, offset: int, data: bytes
) -> Answer:
    end = session.output_end.get(name, offset)
    if fresh := data[max(0, end - offset) :]:
        take(fresh)
        session.output_end[name] = offset + len(data)
    return 204, ""


_ACTIONS: Final[dict[tuple[str, str], Callable[[GuestSession, GuestRequest], Answer]]] = {
    ("POST", "/v1/ready"): _ready,
    ("GET", CONTROL): _control,
    ("GET", RENEWAL): _renewal,
    ("GET", "/v1/token"): _pool_token,
    ("POST", "/v1/log/out"): partial(_log, "out"),
    ("POST", "/v1/log/err"): partial(_log, "err"),
    ("POST", "/v1/collecting"): partial(_report_exit, "collecting"),
    ("POST", "/v1/exit"): partial(_report_exit, "exit"),
}


# ---------------------------------------------------------------------- HTTP


class _RequestRejected(Exception):
    """The request gets this status and text at once; the rest of it is not read."""


class _HttpExchange:
    """One request on a connection, and its answer (HTTP/1.1, RFC 9112, by h11)."""

    def __init__(self, connection: Socket) -> None:
        self._connection = connection
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER)

    async def head(self, session: GuestSession) -> tuple[h11.Request, str]:
        """Return the request without its body, and its ``Authorization`` header.

        Raises:
            _RequestRejected: the guest's token is missing, or the body is too large.
        """
        request = await self._next(MAX_HEADER)
        if not isinstance(request, h11.Request):
            raise ConnectionError
        shown = b", ".join(value for name, value in request.headers if name == b"authorization")
        if not session.accepts(shown.decode("latin-1")):
            raise _RequestRejected(401, OTHER_GUEST)
        if int(dict(request.headers).get(b"content-length", 0)) > MAX_LOG_CHUNK:
            raise _TOO_LARGE
        return request, shown.decode("latin-1")

    async def body(self) -> bytes:
        """Return the request's body.

        Raises:
            _RequestRejected: it is too large.
        """
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        body = bytearray()
        while isinstance(piece := await self._next(_READ_BYTES), h11.Data):
            body += piece.data
            if len(body) > MAX_LOG_CHUNK:
                raise _TOO_LARGE
        return bytes(body)

    async def respond(self, status: int, text: str) -> None:
        """Send the answer, after which the connection ends."""
        content, headers = text.encode(), [("Connection", "close")]
        if status != 204:
            headers += [
                ("Content-Type", "text/plain; charset=utf-8"),
                ("Content-Length", str(len(content))),
            ]
        answer = h11.Response(status_code=status, headers=headers)
        await self._send(answer, h11.Data(data=content), h11.EndOfMessage())

    async def _next(self, most: int) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await guest_loop().sock_recv(self._connection, most))
        return event

    async def _send(self, *events: h11.Event) -> None:
        data = b"".join(self._http.send(event) or b"" for event in events)
        await guest_loop().sock_sendall(self._connection, data)


_TOO_LARGE: Final = _RequestRejected(413, f"at most {MAX_LOG_CHUNK} bytes at once")
_READ_BYTES: Final = 256 * 1024


class _Endpoint:
    def __init__(self, session: GuestSession) -> None:
        self._session = session
        self.connections = Connections(self._serve, MAX_CONNECTIONS)
        self._bodies = asyncio.Semaphore(MAX_BODIES)

    async def _serve(self, connection: Socket) -> None:
        exchange = _HttpExchange(connection)
        with suppress(OSError, TimeoutError, h11.ProtocolError):  # the guest asks again
            try:
                async with asyncio.timeout(HEADER_SECONDS):
                    request, shown = await exchange.head(self._session)
                self.connections.mark_identified(connection)
                async with self._bodies:
                    body = await exchange.body()
            except _RequestRejected as refused:
                await exchange.respond(*refused.args)
            except h11.RemoteProtocolError as error:
                await exchange.respond(error.error_status_hint, "this is not an HTTP request")
            else:
                guest_request = GuestRequest(
                    request.method.decode(), request.target.decode("latin-1"), body
                )
                await exchange.respond(*await self._answer(guest_request, shown))

    async def _answer(self, guest_request: GuestRequest, shown: str) -> Answer:
        session = self._session
        if (refused := session.begin(shown, guest_request.path)) is not None:
            return refused
        try:
            if (guest_request.method, guest_request.path) == ("GET", CONTROL):
                session.has_heartbeat = True
                await self._wait_for_signals(guest_request)
            return await guest_loop().run_in_executor(_WORKERS, answer, session, guest_request)
        except OSError as error:
            log.error("cannot answer a guest's request: %s", error)
            return 500, "the node failed; try again"
        finally:
            session.end()

    async def _wait_for_signals(self, guest_request: GuestRequest) -> None:
        """Wait for signals, for at most the seconds of the request."""
        woken = asyncio.Event()
        wake = partial(guest_loop().call_soon_threadsafe, woken.set)
        seconds = min(
            max(0, guest_request.number("wait", 0)), MAX_WAIT_SECONDS, self._session.longest_wait
        )
        with self._session.on_signals(guest_request.done, wake), suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await woken.wait()


async def _serve_dhcp(network: Network) -> None:
    network.dhcp.setblocking(False)
    while True:
        request = await guest_loop().sock_recv(network.dhcp, dhcp.MAX_REQUEST)
        if (reply := dhcp.answer(request, network.mode)) is not None:
            with suppress(OSError):  # the guest asks again
                network.dhcp.sendto(reply, ("255.255.255.255", dhcp.CLIENT_PORT))


@contextmanager
def serving(session: GuestSession, network: Network) -> Iterator[None]:
    """Serve the endpoint and DHCP in a guest's network while the context lasts."""
    connections = _Endpoint(session).connections
    addresses = asyncio.run_coroutine_threadsafe(_serve_dhcp(network), guest_loop())
    with accepting(network.listening[ENDPOINT_PORT], connections):
        try:
            yield
        finally:
            addresses.cancel()
            session.close()
            in_loop(connections.close(CLOSE_SECONDS))
