"""The guest endpoint: an HTTP service for one VM (guest contract, "Endpoint").

It listens at one address in the VM's own network. Its token is valid for this service only; the guest
never sees another. Signals, reports and the script's output use it; files travel by disk.

One thread has the connections of all guests (:mod:`vmjobs.agent.guest_loop`). Each carries one request;
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

from vmjobs.agent import dhcp
from vmjobs.agent.guest_link import CONTROL, NOT_YOURS, RENEWAL, GuestLink
from vmjobs.agent.guest_loop import Connections, accepting, guest_loop, in_loop
from vmjobs.agent.inbox import ExitReported, Observation, Ready, ScriptEnded
from vmjobs.errors import Forbidden, VMJobsError
from vmjobs.hypervisor.base import ENDPOINT_PORT, Network
from vmjobs.model import ExitChannel, ExitStatus

log = logging.getLogger(__name__)

#: The longest wait of a request for signals, in seconds.
MAX_WAIT = 25
MAX_LOG_CHUNK = 1024 * 1024
#: Bytes of a request's headers: a token, and a path of full size with each byte escaped.
MAX_HEADER = 16 * 1024
#: The most connections. Any program in the guest may connect without a token, and must not keep the
#: guest out: beyond this number the oldest connection that has shown no token is closed.
MAX_CONNECTIONS = 256
#: Seconds after which a connection without a request is closed.
SILENT_SECONDS = 30.0
#: The most requests of one guest with bodies in memory at a time; others wait.
MAX_BODIES: Final = 4
#: Seconds for requests that are in progress when the endpoint closes.
CLOSE_SECONDS: Final = 2.0

_WORKERS: Final = ThreadPoolExecutor(32, "endpoint")

#: Status and text.
Answer = tuple[int, str]


@dataclass(frozen=True)
class Asked:
    """A request. target: path and query as received."""

    method: str
    target: str
    body: bytes = b""

    @property
    def path(self) -> str:
        """Without the query."""
        return urlsplit(self.target).path

    def number(self, name: str, default: int) -> int:
        """Return a number of the query."""
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


def answer(link: GuestLink, asked: Asked) -> Answer:
    """Return the answer to a guest's request. Blocks."""
    action = _ACTIONS.get((asked.method, asked.path))
    return (404, "there is no such request") if action is None else action(link, asked)


def _ready(link: GuestLink, _asked: Asked) -> Answer:
    link.inbox.put(Ready())
    return 204, ""


def _control(link: GuestLink, asked: Asked) -> Answer:
    return 200, "".join(f"signal {number}\n" for number in link.take_signals(asked.done))


def _renewal(_link: GuestLink, _asked: Asked) -> Answer:
    return 204, ""  # the guest has shown the current token


def _pool_token(link: GuestLink, _asked: Asked) -> Answer:
    if link.pool_token is None:
        return 404, "this VM belongs to no cluster"
    try:
        return 200, link.pool_token()
    except Forbidden as refused:
        return 403, refused.message
    except VMJobsError as error:
        log.warning("a guest gets no token now: %s", error)
        return 503, "there is no token now; try again"


def _exit_report(
    observation: Callable[[ExitStatus, dict[str, str]], Observation], link: GuestLink, asked: Asked
) -> Answer:
    words = _words(asked)
    status = _exit_status(words)
    if status is None:
        return 400, "want code=N or signal=N"
    link.inbox.put(observation(status, words))
    return 204, ""


def _script_ended(status: ExitStatus, words: dict[str, str]) -> ScriptEnded:
    return ScriptEnded(status, disk_full=words.get("disk") == "full")


def _exit_reported(status: ExitStatus, words: dict[str, str]) -> ExitReported:
    return ExitReported(status, undelivered=words.get("undelivered") == "yes")


def _log(name: str, link: GuestLink, asked: Asked) -> Answer:
    offset = asked.number("offset", -1)
    with link.writing:
        try:
            told = _append(link, name, offset, asked.body)
        except OSError as error:
            link.lost[name] = error  # the guest tries again a few times, then drops the data
            raise
        if told[0] == 204:
            link.lost.pop(name, None)
        return told


def _append(link: GuestLink, name: str, offset: int, data: bytes) -> Answer:
    if link.on_words is not None:
        return _pass_on(link, link.on_words, name, offset, data)
    path = link.logs[name]
    size = path.stat().st_size if path.exists() else 0
    if offset < 0 or (offset > size and size < link.max_log):
        return 409, f"the next offset is {size}"
    fresh = data[max(0, size - offset) :][: max(0, link.max_log - size)]
    if fresh and offset <= size:
        with path.open("ab") as file:
            file.write(fresh)
        link.on_log()
    return 204, ""


def _pass_on(
    link: GuestLink, take: Callable[[bytes], None], name: str, offset: int, data: bytes
) -> Answer:
    end = link.words_end.get(name, offset)
    if fresh := data[max(0, end - offset) :]:
        take(fresh)
        link.words_end[name] = offset + len(data)
    return 204, ""


def _words(asked: Asked) -> dict[str, str]:
    text = asked.body[:256].decode("ascii", "replace")
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def _exit_status(words: dict[str, str]) -> ExitStatus | None:
    try:
        if "signal" in words:
            return ExitStatus(signal=int(words["signal"]), channel=ExitChannel.ENDPOINT)
        return ExitStatus(code=int(words["code"]), channel=ExitChannel.ENDPOINT)
    except (KeyError, ValueError):
        return None


_ACTIONS: Final[dict[tuple[str, str], Callable[[GuestLink, Asked], Answer]]] = {
    ("POST", "/v1/ready"): _ready,
    ("GET", CONTROL): _control,
    ("GET", RENEWAL): _renewal,
    ("GET", "/v1/token"): _pool_token,
    ("POST", "/v1/log/out"): partial(_log, "out"),
    ("POST", "/v1/log/err"): partial(_log, "err"),
    ("POST", "/v1/collecting"): partial(_exit_report, _script_ended),
    ("POST", "/v1/exit"): partial(_exit_report, _exit_reported),
}


# ---------------------------------------------------------------------- HTTP


class _Refused(Exception):
    """The request gets this status and text at once; the rest of it is not read."""


class _Exchange:
    """One request on a connection, and its answer (HTTP/1.1, RFC 9112, by h11)."""

    def __init__(self, connection: Socket) -> None:
        self._connection = connection
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER)

    async def head(self, link: GuestLink) -> tuple[h11.Request, str]:
        """Return the request without its body, and its ``Authorization`` header.

        Raises:
            _RequestRejected: the guest's token is missing, or the body is too large.
        """
        request = await self._next(MAX_HEADER)
        if not isinstance(request, h11.Request):
            raise ConnectionError
        shown = b", ".join(value for name, value in request.headers if name == b"authorization")
        if not link.admits(shown.decode("latin-1")):
            raise _Refused(401, NOT_YOURS)
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
        while isinstance(piece := await self._next(_PIECE), h11.Data):
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


_TOO_LARGE: Final = _Refused(413, f"at most {MAX_LOG_CHUNK} bytes at once")
_PIECE: Final = 256 * 1024


class _Endpoint:
    """The endpoint of one guest."""

    def __init__(self, link: GuestLink) -> None:
        self._link = link
        self.connections = Connections(self._serve, MAX_CONNECTIONS)
        self._bodies = asyncio.Semaphore(MAX_BODIES)

    async def _serve(self, connection: Socket) -> None:
        exchange = _Exchange(connection)
        with suppress(OSError, TimeoutError, h11.ProtocolError):  # the guest asks again
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    request, shown = await exchange.head(self._link)
                self.connections.known(connection)
                async with self._bodies:
                    body = await exchange.body()
            except _Refused as refused:
                await exchange.respond(*refused.args)
            except h11.RemoteProtocolError as error:
                await exchange.respond(error.error_status_hint, "this is not an HTTP request")
            else:
                asked = Asked(request.method.decode(), request.target.decode("latin-1"), body)
                await exchange.respond(*await self._answer(asked, shown))

    async def _answer(self, asked: Asked, shown: str) -> Answer:
        link = self._link
        if (refused := link.begin(shown, asked.path)) is not None:
            return refused
        try:
            if (asked.method, asked.path) == ("GET", CONTROL):
                link.beating = True
                await self._orders(asked)
            return await guest_loop().run_in_executor(_WORKERS, answer, link, asked)
        except OSError as error:
            log.error("cannot answer a guest's request: %s", error)
            return 500, "the node failed; try again"
        finally:
            link.end()

    async def _orders(self, asked: Asked) -> None:
        """Wait for signals, for at most the seconds of the request."""
        woken = asyncio.Event()
        wake = partial(guest_loop().call_soon_threadsafe, woken.set)
        seconds = min(max(0, asked.number("wait", 0)), MAX_WAIT, self._link.longest_wait)
        with self._link.on_orders(asked.done, wake), suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await woken.wait()


async def _give_addresses(network: Network) -> None:
    """Answer the guest's DHCP requests."""
    network.dhcp.setblocking(False)
    while True:
        request = await guest_loop().sock_recv(network.dhcp, dhcp.LONGEST)
        if (reply := dhcp.answer(request, network.mode)) is not None:
            with suppress(OSError):  # the guest asks again
                network.dhcp.sendto(reply, ("255.255.255.255", dhcp.CLIENT_PORT))


@contextmanager
def serving(link: GuestLink, network: Network) -> Iterator[None]:
    """Serve the endpoint and DHCP in a guest's network while the context lasts."""
    connections = _Endpoint(link).connections
    addresses = asyncio.run_coroutine_threadsafe(_give_addresses(network), guest_loop())
    with accepting(network.listening[ENDPOINT_PORT], connections):
        try:
            yield
        finally:
            addresses.cancel()
            link.close()
            in_loop(connections.close(CLOSE_SECONDS))
