"""An HTTP server in this process that answers as a test's script says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pydantic import BaseModel


class Handler(BaseHTTPRequestHandler):
    """Answers as the test's script says; the script gets the handler and the call's number."""

    protocol_version = "HTTP/1.1"
    server: Scripted

    def _any(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            self.server.seen.append(self)
            number = len(self.server.seen)
        self.server.script(self, number)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _any

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def document(self, status: int, body: object) -> None:
        """Send a document of the API, or bytes as they are."""
        kind = "application/json" if status < 300 else "application/problem+json"
        data = body if isinstance(body, bytes) else json.dumps(body, default=_plain).encode()
        self.answer(status, data, Content_Type=kind)

    def problem(self, status: int, code: str, detail: str = "so it is", **more: object) -> None:
        self.document(status, {"title": "x", "status": status, "detail": detail, "code": code, **more})

    def hang_up(self) -> None:
        """Close the connection in the middle of the answer."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class Scripted(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.seen: list[Handler] = []
        self.script: Callable[[Handler, int], None] = lambda handler, _: handler.answer(200)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect: tests do that on purpose."""


@contextmanager
def scripted() -> Iterator[Scripted]:
    """Run a server that listens until the context ends."""
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _plain(model: BaseModel) -> object:
    return model.model_dump(mode="json")
