"""A plain file server: HTTP/1.1, one range, sendfile. Usage: sendfile_server.py DIRECTORY"""

from __future__ import annotations

import os
import socket
import sys
import threading


def serve(connection: socket.socket, root: str) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lines = connection.makefile("rb")
    while line := lines.readline():
        path = line.split()[1].decode()
        span = b""
        while (header := lines.readline()) not in {b"\r\n", b""}:
            if header.lower().startswith(b"range: bytes="):
                span = header.partition(b"=")[2].strip()
        with open(root + path, "rb") as file:  # noqa: PTH123 - as plain as can be
            size = os.fstat(file.fileno()).st_size
            first, _, last = span.partition(b"-")
            start, stop = (int(first), int(last) + 1) if span else (0, size)
            status = f"206 OK\r\nContent-Range: bytes {start}-{stop - 1}/{size}" if span else "200 OK"
            connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {stop - start}\r\n\r\n".encode())
            connection.sendfile(file, start, stop - start)


def main() -> None:
    """Serve the directory given, on a port that it prints."""
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, sys.argv[1]), daemon=True).start()


if __name__ == "__main__":
    main()
