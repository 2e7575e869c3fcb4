"""The host's side of the contract tests: endpoints, listeners and waiting for the console."""

from __future__ import annotations

import http.server
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Fail unless ``condition`` comes true in time."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        pause.wait(0.02)


def said(console: Path) -> str:
    """The console so far."""
    return console.read_text("utf-8", "replace") if console.exists() else ""


class Endpoint(socketserver.ThreadingUnixStreamServer):
    """An HTTP service on a Unix socket; remembers what was asked."""

    daemon_threads = True
    small = b"small=hello\n"
    large = bytes(range(256)) * (40 * 1024 * 1024 // 256)

    def __init__(self, path: Path) -> None:
        self.requests: list[tuple[str, int]] = []
        super().__init__(str(path), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        connection, _ = super().get_request()
        return connection, ("guest", 0)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self._answer(self.server.large if self.path == "/large" else self.server.small)

    def do_POST(self) -> None:
        left = size = int(self.headers["Content-Length"])
        while left and (data := self.rfile.read(min(left, 65536))):
            left -= len(data)
        self._answer(b"uploaded=%d\n" % size)

    def _answer(self, body: bytes) -> None:
        self.server.requests.append((self.path, len(body)))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def endpoint(path: Path) -> Iterator[Endpoint]:
    """Serve until the end of the block."""
    with Endpoint(path) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
