"""The endpoint: an HTTP service for one guest (guest contract, point 4).

It listens on a Unix socket of its own, which the machine's user-mode network makes reachable at
one address in the guest. The token is good for this service only; the guest never sees another.
Bodies go to files at once, so that a guest is never slowed down by what is behind the agent.
"""

from __future__ import annotations

import hmac
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import waitress.server
from flask import Flask, Request, Response, request, send_file

from vmjobs.agent.inbox import ExitReported, Observer, Ready, ScriptEnded
from vmjobs.agent.outputs import OutputTray, Refused
from vmjobs.errors import Forbidden, VMJobsError
from vmjobs.hypervisor.mconsole import short_path
from vmjobs.model import ExitChannel, ExitStatus

log = logging.getLogger(__name__)

MAX_WAIT = 25
MAX_LOG_CHUNK = 1024 * 1024
#: Room for protocol overhead above the largest output.
SLACK = 1024 * 1024
CONNECTIONS = 12
#: Programs of many users in one guest may connect, though they know no token. They must not use up
#: what the guest itself needs: at so many connections the oldest that asks for nothing has to go.
MEMBER_CONNECTIONS = 256
#: Seconds that a connection on which nothing is asked lasts in such a guest. A request that is being
#: answered is no silence, however long that takes.
SILENT_SECONDS = 5
THREADS = 6


@dataclass
class GuestLink:
    """What the endpoint and the run share about one guest.

    logs: files for ``out`` and ``err``; ``max_log`` bytes are kept of each.
    on_log: called after a log has grown.
    on_words: takes what the script prints, in place of logs, of a guest that goes on for months. What
        it prints while nobody listens is lost.
    pool_token: for a machine of a cluster: its token for the pool.
    longest_wait: that a request for orders may last, in seconds.
    beating: the guest has begun to ask for orders, and so is heard of from now on.
    """

    token: str
    inbox: Observer
    tray: OutputTray
    job_tar: Path
    logs: dict[str, Path]
    max_log: int
    on_log: Callable[[], None] = lambda: None
    on_words: Callable[[bytes], None] | None = None
    pool_token: Callable[[], str] | None = None
    longest_wait: float = math.inf
    heard: float = field(default_factory=time.monotonic)
    signals: list[int] = field(default_factory=list)
    beating: bool = False
    closed: bool = False
    words_end: dict[str, int] = field(default_factory=dict)
    writing: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def endless(self) -> bool:
        """Whether the guest goes on for months."""
        return self.on_words is not None

    def send_signal(self, number: int) -> None:
        """Have the guest deliver a signal to the script."""
        with self.changed:
            self.signals.append(number)
            self.changed.notify_all()

    def close(self) -> None:
        """Let waiting requests go."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def take_signals(self, timeout: float) -> list[int]:
        """Wait for signals to deliver; an empty list after ``timeout`` seconds."""
        with self.changed:
            self.changed.wait_for(lambda: self.signals or self.closed, timeout)
            taken, self.signals[:] = list(self.signals), []
            return taken


def create_endpoint(link: GuestLink) -> Flask:
    """The endpoint's application."""
    app = Flask("vmjobs-endpoint", static_folder=None)

    @app.before_request
    def _authenticate() -> Response | None:
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {link.token}".encode()):
            return _plain("this endpoint belongs to another guest", 401)
        link.heard = time.monotonic()
        return None

    @app.get("/v1/job.tar")
    def _job() -> Response:
        return send_file(link.job_tar, mimetype="application/x-tar")

    @app.post("/v1/ready")
    def _ready() -> Response:
        link.inbox.put(Ready())
        return _plain("", 204)

    @app.get("/v1/control")
    def _control() -> Response:
        link.beating = True
        wait = min(max(0, request.args.get("wait", 0, int)), MAX_WAIT, link.longest_wait)
        return _plain("".join(f"signal {n}\n" for n in link.take_signals(wait)), 200)

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

    @app.post("/v1/outputs/<path:name>")
    def _output(name: str) -> Response:
        size = request.content_length
        if size is None:
            return _plain("want a Content-Length", 411)
        try:
            link.tray.accept(name, request.stream, size)
        except Refused as refused:
            return _plain(str(refused), 413 if refused.too_large else 422)
        return _plain("", 201)

    @app.post("/v1/exit")
    def _exit() -> Response:
        ended = _exit_status(_words(request))
        if ended is None:
            return _plain("want code=N or signal=N", 400)
        link.inbox.put(ExitReported(ended))
        return _plain("", 204)

    return app


class _Server(waitress.server.UnixWSGIServer):  # type: ignore[misc]  # it has no types
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


@contextmanager
def serving(link: GuestLink, socket: Path) -> Iterator[None]:
    """Serve the endpoint on a Unix socket for as long as the context lasts."""
    options: dict[str, Any] = {
        "unix_socket_perms": "600",
        "threads": THREADS,
        # At this limit none is taken any more; a member's endpoint makes room before.
        "connection_limit": 2 * MEMBER_CONNECTIONS if link.endless else CONNECTIONS,
        "asyncore_use_poll": True,
        "max_request_body_size": link.tray.limit + SLACK,
        "channel_timeout": SILENT_SECONDS if link.endless else 60,
        "cleanup_interval": 1 if link.endless else 30,
        "ident": "vmjobs",
        "clear_untrusted_proxy_headers": True,
    }
    with short_path(socket) as address:
        server = _Server(create_endpoint(link), unix_socket=address, **options)
    thread = threading.Thread(target=server.run, name=f"endpoint-{socket.parent.name[:8]}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        link.close()
        # Requests end before the server does: a task that ends later would find it taken apart.
        server.task_dispatcher.shutdown(timeout=2)
        server.close()
        socket.unlink(missing_ok=True)


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
        return _append_data(link, name, offset, data)


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
