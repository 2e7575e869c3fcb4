"""The endpoint: an HTTP service for one guest (guest contract, "Endpoint").

It listens at one address in the machine's own network. The token is good for this service only; the
guest never sees another. It carries orders, reports and what the script prints; files travel by disk.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from socket import socket as Socket
from typing import Any

import waitress.adjustments
import waitress.channel
import waitress.parser
import waitress.server
import waitress.utilities
import waitress.wasyncore
from flask import Flask, Request, Response, g, request

from vmjobs.agent import dhcp
from vmjobs.agent.inbox import ExitReported, Observer, Ready, ScriptEnded
from vmjobs.errors import Forbidden, VMJobsError
from vmjobs.hypervisor.base import ENDPOINT_PORT, Network
from vmjobs.model import ExitChannel, ExitStatus, NetworkMode

log = logging.getLogger(__name__)

MAX_WAIT = 25
MAX_LOG_CHUNK = 1024 * 1024
#: Bytes of a request's headers: a token, and a path of full size with each byte escaped.
MAX_HEADER = 16 * 1024
CONNECTIONS = 12
#: Seconds that an answer takes to its guest. One that was turned away asks again after two.
QUIET_SECONDS = 0.5
#: Programs of many users in one guest may connect, though they know no token. They must not use up
#: what the guest itself needs: at so many connections the oldest that asks for nothing has to go.
MEMBER_CONNECTIONS = 256
#: Seconds that a connection on which nothing is asked lasts in such a guest. A request that is being
#: answered is no silence, however long that takes.
SILENT_SECONDS = 5
THREADS = 6

CONTROL = "/v1/control"
RENEWAL = "/v1/renewal"
_NOT_YOURS = "this endpoint belongs to another guest"


class Orders:
    """Signals that a guest is to deliver, until it says that it has: an answer may be lost.

    A guest counts what it has delivered, over agents that come and go. So a count says something only
    beside the one before it.
    """

    def __init__(self) -> None:
        #: Not delivered yet, as far as is known.
        self.left: list[int] = []
        self._given = 0
        self._done: int | None = None

    def add(self, number: int) -> None:
        """Another one; once is enough where it waits already, and has not been told of."""
        if number not in self.left[self._given :]:
            self.left.append(number)

    def acknowledge(self, done: int | None) -> None:
        """The guest has delivered so many in its life; None: it is one that does not count."""
        if done is None:
            return
        fresh = 0 if self._done is None else done - self._done
        if 0 < fresh <= self._given:
            del self.left[:fresh]
            self._given -= fresh
        self._done = done

    def give(self, *, certain: bool) -> list[int]:
        """What to tell the guest. certain: it will be heard whether that arrived."""
        told = list(self.left)
        self._given = len(told)
        if not certain:
            self.left, self._given = [], 0
        return told


@dataclass
class GuestLink:
    """What the endpoint and the run share about one guest.

    logs: files for ``out`` and ``err``; ``max_log`` bytes are kept of each.
    on_log: called after a log has grown.
    on_words: takes what the script prints, in place of logs, of a guest that goes on for months. What
        it prints while nobody listens is lost.
    pool_token: for a machine of a cluster: its token for the pool.
    former: SHA-256 of the token that the guest of a resumed machine knows. It gets the new one for it,
        until it has used that, and nothing else; ``""``: there is none.
    longest_wait: that a request for orders may last, in seconds.
    beating: the guest has begun to ask for orders, and so is heard of from now on.
    lost: why this node could not keep what came last of ``out`` or ``err``.
    """

    token: str
    inbox: Observer
    logs: dict[str, Path]
    max_log: int
    on_log: Callable[[], None] = lambda: None
    on_words: Callable[[bytes], None] | None = None
    pool_token: Callable[[], str] | None = None
    former: str = ""
    longest_wait: float = math.inf
    heard: float = field(default_factory=time.monotonic)
    orders: Orders = field(default_factory=Orders)
    beating: bool = False
    lost: dict[str, OSError] = field(default_factory=dict)
    closed: bool = False
    words_end: dict[str, int] = field(default_factory=dict)
    writing: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: No request is answered but with "try again"; one for orders has been.
    hushed: bool = False
    _turned_away: bool = False
    #: When the last request came, in monotonic seconds.
    _asked: float = 0.0
    #: Requests that are being answered.
    _answering: int = 0

    @property
    def endless(self) -> bool:
        """Whether the guest goes on for months."""
        return self.on_words is not None

    def admits(self, authorization: str) -> bool:
        """Whether a request with this header comes from the guest."""
        return self._is_current(authorization) or self._is_former(authorization)

    def _is_current(self, authorization: str) -> bool:
        return hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode())

    def _is_former(self, authorization: str) -> bool:
        if not self.former:
            return False
        shown = authorization.removeprefix("Bearer ").encode()
        return hmac.compare_digest(hashlib.sha256(shown).hexdigest(), self.former)

    def begin(self, authorization: str, path: str) -> tuple[str, int] | None:
        """A request begins: what to answer at once, and its status; None: go on, and :meth:`end` it."""
        former = self._is_former(authorization)
        if not former and not self._is_current(authorization):
            return _NOT_YOURS, 401
        with self.changed:
            self._asked = time.monotonic()
            if self.hushed:
                self._turned_away = self._turned_away or path == CONTROL
                self.changed.notify_all()
                return "this machine is about to be saved; try again", 503
            if former:
                renewal = f"{self.token} {int(time.time())}\n"
                return (renewal, 200) if path == RENEWAL else ("take the new token first", 503)
            renewed, self.former = bool(self.former), ""
            self._answering += 1
        self.heard = time.monotonic()
        if renewed:
            self.inbox.put(Ready())
        return None

    def end(self) -> None:
        """A request that had begun is answered."""
        with self.changed:
            self._answering -= 1
            self.changed.notify_all()

    def hush(self, timeout: float) -> bool:
        """Answer nothing any more, so that what the guest was told is all that there is: for a machine
        that is to be saved. False: a request is still being answered after ``timeout`` seconds.

        An answer that is on its way when the machine is saved never comes. So this waits until who asks
        for orders has been turned away, as all others, and nobody has asked for :data:`QUIET_SECONDS`.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            self.hushed, self._turned_away = True, not self.beating
            self.changed.notify_all()
            while (now := time.monotonic()) < deadline:
                if not self._turned_away or self._answering:
                    self.changed.wait(deadline - now)
                elif (quiet := now - self._asked) < QUIET_SECONDS:
                    self.changed.wait(min(QUIET_SECONDS - quiet, deadline - now))
                else:
                    break
            return not self._answering

    def speak(self) -> None:
        """Go on answering."""
        with self.changed:
            self.hushed = False

    def send_signal(self, number: int) -> None:
        """Have the guest deliver a signal to the script."""
        with self.changed:
            self.orders.add(number)
            self.changed.notify_all()

    def close(self) -> None:
        """Let waiting requests go."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def take_signals(self, timeout: float, done: int | None = None) -> list[int]:
        """Wait for signals to deliver; an empty list after ``timeout`` seconds.

        done: how many the guest has delivered so far. What it was told without it is not told again.
        """
        with self.changed:
            self.orders.acknowledge(done)
            self.changed.wait_for(lambda: self.orders.left or self.closed or self.hushed, timeout)
            return self.orders.give(certain=done is not None)


def create_endpoint(link: GuestLink) -> Flask:
    """The endpoint's application."""
    app = Flask("vmjobs-endpoint", static_folder=None)

    @app.before_request
    def _authenticate() -> Response | None:
        refused = link.begin(request.headers.get("Authorization", ""), request.path)
        if refused is not None:
            return _plain(*refused)
        g.begun = True
        return None

    @app.teardown_request
    def _ended(_error: BaseException | None) -> None:
        if g.pop("begun", False):
            link.end()

    @app.post("/v1/ready")
    def _ready() -> Response:
        link.inbox.put(Ready())
        return _plain("", 204)

    @app.get(CONTROL)
    def _control() -> Response:
        link.beating = True
        wait = min(max(0, request.args.get("wait", 0, int)), MAX_WAIT, link.longest_wait)
        signals = link.take_signals(wait, request.args.get("done", None, int))
        return _plain("".join(f"signal {n}\n" for n in signals), 200)

    @app.get(RENEWAL)
    def _renewal() -> Response:
        return _plain("", 204)  # the token that was shown is the one that is in force

    @app.get("/v1/token")
    def _token() -> Response:
        return _pool_token(link)

    @app.post("/v1/log/<any(out,err):name>")
    def _log(name: str) -> Response:
        return _append(link, name, request)

    @app.post("/v1/collecting")
    def _collecting() -> Response:
        words = _words(request)
        ended = _exit_status(words)
        if ended is None:
            return _plain("want code=N or signal=N", 400)
        link.inbox.put(ScriptEnded(ended, disk_full=words.get("disk") == "full"))
        return _plain("", 204)

    @app.post("/v1/exit")
    def _exit() -> Response:
        words = _words(request)
        ended = _exit_status(words)
        if ended is None:
            return _plain("want code=N or signal=N", 400)
        link.inbox.put(ExitReported(ended, undelivered=words.get("undelivered") == "yes"))
        return _plain("", 204)

    return app


class _Unauthorized(waitress.utilities.Error):  # type: ignore[misc]  # it has no types
    code = 401
    reason = "Unauthorized"


def _channel_of(link: GuestLink) -> type[waitress.channel.HTTPChannel]:
    """Connections that read no more than the headers of who does not know the token.

    The application would refuse them as well, but only once it has the whole body.
    """

    class Parser(waitress.parser.HTTPRequestParser):  # type: ignore[misc]
        def received(self, data: bytes) -> int:
            in_headers = not self.headers_finished
            consumed: int = super().received(data)
            begun = in_headers and self.headers_finished and not (self.error or self.empty)  # type: ignore[has-type]
            if begun and not link.admits(self.headers.get("AUTHORIZATION", "")):
                self.error = _Unauthorized(_NOT_YOURS)
                self.expect_continue = False  # it would go on with the body
                self.completed = True
            return consumed

    class Channel(waitress.channel.HTTPChannel):  # type: ignore[misc]
        parser_class = Parser

    return Channel


class _Server(waitress.server.TcpWSGIServer):  # type: ignore[misc]  # it has no types
    """Hangs up on the oldest connection that still asks for nothing, where there are too many.

    A guest asks at once when it has connected; so it is never the one, however slowly others ask.
    """

    def handle_accept(self) -> None:
        super().handle_accept()
        channels = self.active_channels.values()  # the oldest first
        if len(channels) <= MEMBER_CONNECTIONS:
            return
        silent = (c for c in channels if not (c.requests or c.total_outbufs_len or c.will_close))
        for channel in islice(silent, 1):
            channel.will_close = True


class _Dhcp(waitress.wasyncore.dispatcher):  # type: ignore[misc]  # it has no types
    """Gives the guest its address, in the same thread."""

    def __init__(self, server: Socket, mode: NetworkMode, around: dict[int, Any]) -> None:
        super().__init__(server, around)
        self._mode = mode

    def writable(self) -> bool:
        return False

    def handle_read(self) -> None:
        with suppress(OSError):  # it asks again
            reply = dhcp.answer(self.socket.recv(dhcp.LONGEST), self._mode)
            if reply is not None:
                self.socket.sendto(reply, ("255.255.255.255", dhcp.CLIENT_PORT))


@contextmanager
def serving(link: GuestLink, network: Network) -> Iterator[None]:
    """Serve the endpoint, and DHCP, in a guest's network for as long as the context lasts."""
    server = network.listening[ENDPOINT_PORT]
    options: dict[str, Any] = {
        "sockets": [server],
        "threads": THREADS,
        # At this limit none is taken any more; a member's endpoint makes room before.
        "connection_limit": 2 * MEMBER_CONNECTIONS if link.endless else CONNECTIONS,
        "asyncore_use_poll": True,
        "max_request_header_size": MAX_HEADER,
        "max_request_body_size": MAX_LOG_CHUNK + 1,  # for waitress that is one too many
        "inbuf_overflow": MAX_LOG_CHUNK + 1,  # nothing is on a disk meanwhile
        "channel_timeout": SILENT_SECONDS if link.endless else 60,
        "cleanup_interval": 1 if link.endless else 30,
        "ident": "vmjobs",
        "clear_untrusted_proxy_headers": True,
    }
    adjusted = waitress.adjustments.Adjustments(**options)
    about = (server.family, server.type, server.proto, server.getsockname())
    serves = _Server(
        create_endpoint(link), _sock=server, adj=adjusted, sockinfo=about, bind_socket=False
    )
    serves.channel_class = _channel_of(link)
    addresses = _Dhcp(network.dhcp, network.mode, serves._map)
    thread = threading.Thread(target=serves.run, name="endpoint", daemon=True)
    thread.start()
    try:
        yield
    finally:
        link.close()
        # Requests end before the server does: a task that ends later would find it taken apart.
        serves.task_dispatcher.shutdown(timeout=2)
        serves.close()
        addresses.close()


def _pool_token(link: GuestLink) -> Response:
    if link.pool_token is None:
        return _plain("this machine belongs to no cluster", 404)
    try:
        return _plain(link.pool_token(), 200)
    except Forbidden as refused:
        return _plain(refused.message, 403)
    except VMJobsError as error:
        log.warning("a guest gets no token now: %s", error)
        return _plain("there is no token now; try again", 503)


def _append(link: GuestLink, name: str, incoming: Request) -> Response:
    offset = incoming.args.get("offset", -1, int)
    data = incoming.stream.read(MAX_LOG_CHUNK + 1)
    with link.writing:
        try:
            answer = _append_data(link, name, offset, data)
        except OSError as error:
            link.lost[name] = error  # the guest tries again, and goes on without it some time
            raise
        if answer.status_code == 204:
            link.lost.pop(name, None)
        return answer


def _append_data(link: GuestLink, name: str, offset: int, data: bytes) -> Response:
    if len(data) > MAX_LOG_CHUNK:
        return _plain(f"at most {MAX_LOG_CHUNK} bytes at once", 413)
    if link.on_words is not None:
        return _pass_on(link, link.on_words, name, offset, data)
    path = link.logs[name]
    size = path.stat().st_size if path.exists() else 0
    if offset < 0 or (offset > size and size < link.max_log):
        return _plain(f"the next offset is {size}", 409)
    fresh = data[max(0, size - offset) :][: max(0, link.max_log - size)]
    if fresh and offset <= size:
        with path.open("ab") as file:
            file.write(fresh)
        link.on_log()
    return _plain("", 204)


def _pass_on(
    link: GuestLink, take: Callable[[bytes], None], name: str, offset: int, data: bytes
) -> Response:
    end = link.words_end.get(name, offset)
    if fresh := data[max(0, end - offset) :]:
        take(fresh)
        link.words_end[name] = offset + len(data)
    return _plain("", 204)


def _words(incoming: Request) -> dict[str, str]:
    text = incoming.stream.read(256).decode("ascii", "replace")
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def _exit_status(words: dict[str, str]) -> ExitStatus | None:
    try:
        if "signal" in words:
            return ExitStatus(signal=int(words["signal"]), channel=ExitChannel.ENDPOINT)
        return ExitStatus(code=int(words["code"]), channel=ExitChannel.ENDPOINT)
    except (KeyError, ValueError):
        return None


def _plain(text: str, status: int) -> Response:
    return Response(text, status, mimetype="text/plain")
