"""Relays SSH sessions into a VM over connections that its guest makes.

No port is open, neither on the node nor in the guest. The guest connects to the relay, identifies
itself, and waits (guest contract, "SSH relay"). A client that logs in gets that connection: the relay
sends the guest the client's key, and the guest's SSH server answers; or, if the guest connected for
commands (:data:`SHELL`), the relay sends a command line. The guest then connects again.

The relay is independent of clusters and of the service: it is a socket that listens in the VM's
network (:class:`vmjobs.hypervisor.base.Network`), with :meth:`SshRelay.open_session` and
:meth:`SshRelay.send_command`.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from vmjobs.agent.guest.guest_loop import Connections, accepting, guest_loop, in_loop
from vmjobs.errors import LoginUnavailable
from vmjobs.sockets import shutdown_socket

#: A guest's first line: version, the relay's token, and its SSH server's key, ``-`` or ``shell``.
GREETING: Final = re.compile(rb"vmjobs-door 1 ([!-~]{1,128}) (-|shell|ssh-ed25519 [A-Za-z0-9+/]{68})")
MAX_GREETING: Final = 512
GREETING_SECONDS: Final = 10.0
#: The most connections that are not identified. Any program in the guest may connect; the oldest is
#: closed.
MAX_UNIDENTIFIED: Final = 32
#: The most waiting connections of the guest. It holds one; a dead guest program may have left others.
MAX_WAITING: Final = 2
NO_SERVER: Final = "-"
#: The mark of a guest that runs a command line, as a user of its own choice.
SHELL_MARK: Final = "shell"


@dataclass(frozen=True)
class SshSession:
    """A connection to a guest's SSH server for one key. host_key: the server's own."""

    connection: socket.socket
    host_key: str


class SshRelay:
    """The relay of one guest. token: identifies the guest; for its root alone."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self.connections = Connections(self._serve, MAX_UNIDENTIFIED + MAX_WAITING)
        #: Connections on which the guest waits, each with its SSH server's key.
        self._waiting: dict[socket.socket, str] = {}
        self._sessions = weakref.WeakSet[socket.socket]()
        self._changed = threading.Condition()
        self._closed = False
        self._shut = False

    def open_session(self, key: str, seconds: float) -> SshSession:
        """Open a session for the holder of ``key``, an OpenSSH public key.

        Raises:
            LoginUnavailable: the image has no SSH server, or the guest does not connect in time.
        """
        return SshSession(*self._send_line(f"session {key}\n", seconds, accepts_commands=False))

    def send_command(self, line: str, seconds: float) -> socket.socket:
        """Send a command line to a guest (see :data:`SHELL`); return the connection.

        Raises:
            LoginUnavailable: the guest does not connect within ``seconds``, or accepts no commands.
        """
        return self._send_line(f"{line}\n", seconds, accepts_commands=True)[0]

    def _send_line(
        self, line: str, seconds: float, *, accepts_commands: bool
    ) -> tuple[socket.socket, str]:
        deadline = time.monotonic() + seconds
        while True:
            connection, host_key = self._take_waiting(deadline, seconds, accepts_commands)
            try:
                connection.settimeout(GREETING_SECONDS)
                connection.sendall(line.encode())
                connection.settimeout(None)
            except OSError:  # the guest has just disconnected, and connects again
                connection.close()
                continue
            return connection, host_key

    def _take_waiting(
        self, deadline: float, seconds: float, accepts_commands: bool
    ) -> tuple[socket.socket, str]:
        with self._changed:
            left = deadline - time.monotonic()
            if not self._changed.wait_for(lambda: self._waiting or self._closed, max(0.0, left)):
                raise LoginUnavailable(
                    f"the guest did not connect for a login within {seconds:.0f} s",
                    hint="a VM that an earlier release of the agent started cannot: restart the VM",
                )
            if self._closed:
                raise LoginUnavailable("the VM or its agent is stopping")
            connection, host_key = self._waiting.popitem()  # the youngest
            if host_key == NO_SERVER or (host_key == SHELL_MARK) is not accepts_commands:
                self._waiting[connection] = host_key
                raise LoginUnavailable(
                    "the VM's image has no SSH server",
                    hint='add openssh-server to its recipe, as the recipe "worker" does',
                )
            self._sessions.add(connection)
        in_loop(self.connections.release(connection))
        return connection, host_key

    def shut(self, shut: bool) -> None:
        """Close waiting and new connections while ``shut``; sessions go on."""
        self._shut = shut
        if shut:
            in_loop(self.connections.close())

    def close(self) -> None:
        """Close all connections and sessions, which an ended VM does not close itself."""
        with self._changed:
            self._closed = True
            for connection in self._sessions:
                shutdown_socket(connection)
            self._changed.notify_all()
        in_loop(self.connections.close())

    async def _serve(self, connection: socket.socket) -> None:
        """Identify a connection; keep the guest's until it ends or becomes a session."""
        if self._closed or self._shut:
            return
        loop, said = guest_loop(), b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(GREETING_SECONDS):
                while b"\n" not in said and len(said) <= MAX_GREETING:
                    if not (data := await loop.sock_recv(connection, MAX_GREETING)):
                        return
                    said += data
            found = GREETING.fullmatch(said.removesuffix(b"\n"))
            if found is None or not hmac.compare_digest(found[1], self._token):
                return
            self.connections.mark_identified(connection)
            await self._wait(connection, found[2].decode())

    async def _wait(self, connection: socket.socket, host_key: str) -> None:
        with self._changed:
            self._waiting[connection] = host_key
            for older in list(self._waiting)[:-MAX_WAITING]:
                self.connections.hang_up(older)
            self._changed.notify_all()
        try:
            # A waiting guest sends nothing: data or an end means that the connection is useless.
            await guest_loop().sock_recv(connection, 1)
        finally:
            with self._changed:
                self._waiting.pop(connection, None)


@contextmanager
def listening(relay: SshRelay, server: socket.socket) -> Iterator[None]:
    """Relay the connections of a listening socket while the context lasts."""
    with accepting(server, relay.connections):
        try:
            yield
        finally:
            relay.close()
