"""A TCP proxy that counts the bytes that pass, and can hold the client up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PIECE = 64 * 1024


class Proxy:
    """A proxy to a server. up, down: bytes that have passed to the server and from it."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._changed = threading.Condition()
        self._limit: int | None = None
        self.up = self.down = 0
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def hold_after(self, count: int | None) -> None:
        """Let at most ``count`` more bytes through, both directions together; None: all."""
        with self._changed:
            self._limit = None if count is None else self.up + self.down + count
            self._changed.notify_all()

    def wait_for(self, count: int, seconds: float = 60) -> None:
        """Wait until ``count`` bytes have passed in both directions together."""
        with self._changed:
            passed = self._changed.wait_for(lambda: self.up + self.down >= count, seconds)
        assert passed, f"only {self.up} and {self.down} bytes passed"

    def serve(self) -> None:
        """Accept connections until closed."""
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for source, sink, way in ((client, server, "up"), (server, client, "down")):
                threading.Thread(target=self._pump, args=(source, sink, way), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE):
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._limit is None or self.up + self.down < self._limit
                    )
                    # Count before sending, because the receiver may read the count at once.
                    setattr(self, way, getattr(self, way) + len(data))
                    self._changed.notify_all()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Closing alone does not wake the thread that accepts.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hold_after(None)


@contextmanager
def proxy_to(listen: str, kind: Callable[[tuple[str, int]], Proxy] = Proxy) -> Iterator[Proxy]:
    """Run a proxy in front of the service that listens at ``HOST:PORT``."""
    host, _, port = listen.rpartition(":")
    made = kind((host, int(port)))
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.close()
        thread.join(10)
