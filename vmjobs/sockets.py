"""Ending a socket that other threads read or write; imports nothing large."""

from __future__ import annotations

import socket
from contextlib import suppress


def shutdown_socket(connection: socket.socket) -> None:
    """End all reads and writes on a socket. The caller still closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
