"""A machine's door: where its guest waits for those who log in (guest contract, "The door").

No port is open anywhere, neither on the node nor in the guest. The guest connects to the door, says
who it is, and waits. Whoever logs in gets that connection: the guest is told which key may come in,
and an SSH server answers on it; or, where it has come for that (:data:`SHELL`), it is told what to run
on it. The guest then connects anew, for the next one.

The door knows nothing of clusters and of the service: it is a socket that listens in the machine's
network (:class:`vmjobs.hypervisor.base.Network`), :meth:`Door.knock` and :meth:`Door.order`.
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

from vmjobs.agent.guest_loop import Connections, accepting, guest_loop, in_loop
from vmjobs.agent.streams import hang_up
from vmjobs.errors import NoLogin

#: What a guest says first: version, the door's token, its SSH server's key, ``-`` or ``shell``.
GREETING: Final = re.compile(rb"vmjobs-door 1 ([!-~]{1,128}) (-|shell|ssh-ed25519 [A-Za-z0-9+/]{68})")
MAX_GREETING: Final = 512
GREETING_SECONDS: Final = 10.0
#: Connections that have not said who they are. Any program in the guest may connect; the oldest goes.
MAX_STRANGERS: Final = 32
#: Connections of the guest itself that wait. It holds one; what is older was left by one that died.
MAX_STANDBY: Final = 2
NO_SERVER: Final = "-"
#: Of a guest that runs what it is told, where it decides itself as whom.
SHELL: Final = "shell"


@dataclass(frozen=True)
class Visit:
    """A connection to a guest's SSH server that takes one key. host_key: the server's own."""

    connection: socket.socket
    host_key: str


class Door:
    """The connections of one guest. token: which its root alone knows, if it is to keep others off."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self.connections = Connections(self._attend, MAX_STRANGERS + MAX_STANDBY)
        #: Those on which the guest waits, and its SSH server's key.
        self._standby: dict[socket.socket, str] = {}
        self._sessions = weakref.WeakSet[socket.socket]()
        self._changed = threading.Condition()
        self._closed = False
        self._shut = False

    def knock(self, key: str, seconds: float) -> Visit:
        """Have the guest let in who holds the private half of ``key``, an OpenSSH public key.

        Raises:
            NoLogin: its image has no SSH server, or it does not wait at the door for ``seconds``.
        """
        return Visit(*self._say(f"session {key}\n", seconds, takes_orders=False))

    def order(self, words: str, seconds: float) -> socket.socket:
        """Have a guest that came for it (:data:`SHELL`) do something; the connection to it.

        words: what, a line.

        Raises:
            NoLogin: it does not wait at the door for ``seconds``, or came for something else.
        """
        return self._say(f"{words}\n", seconds, takes_orders=True)[0]

    def _say(self, line: str, seconds: float, *, takes_orders: bool) -> tuple[socket.socket, str]:
        deadline = time.monotonic() + seconds
        while True:
            connection, host_key = self._next(deadline, seconds, takes_orders)
            try:
                connection.settimeout(GREETING_SECONDS)
                connection.sendall(line.encode())
                connection.settimeout(None)
            except OSError:  # it went away this moment, and comes again
                connection.close()
                continue
            return connection, host_key

    def _next(self, deadline: float, seconds: float, takes_orders: bool) -> tuple[socket.socket, str]:
        with self._changed:
            left = deadline - time.monotonic()
            if not self._changed.wait_for(lambda: self._standby or self._closed, max(0.0, left)):
                raise NoLogin(
                    f"the machine's guest has not come to its door for {seconds:.0f} s",
                    hint="machines that an earlier release of the agent started have none; restart it",
                )
            if self._closed:
                raise NoLogin("the machine is ending, or its agent is")
            connection, host_key = self._standby.popitem()  # the youngest
            if host_key == NO_SERVER or (host_key == SHELL) is not takes_orders:
                self._standby[connection] = host_key
                raise NoLogin(
                    "the machine's image has no SSH server",
                    hint="add openssh-server to its recipe, as the recipe worker has it",
                )
            self._sessions.add(connection)
        in_loop(self.connections.give(connection))
        return connection, host_key

    def shut(self, shut: bool) -> None:
        """Hang up on all that wait, and on whoever comes, until it is opened again; sessions go on."""
        self._shut = shut
        if shut:
            in_loop(self.connections.close())

    def close(self) -> None:
        """Hang up on all that wait, and on sessions: a machine that has ended does not say so there."""
        with self._changed:
            self._closed = True
            for connection in self._sessions:
                hang_up(connection)
            self._changed.notify_all()
        in_loop(self.connections.close())

    async def _attend(self, connection: socket.socket) -> None:
        """Hear who it is, and have it wait, if it is the guest, until it goes or is wanted."""
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
            self.connections.known(connection)
            await self._wait(connection, found[2].decode())

    async def _wait(self, connection: socket.socket, host_key: str) -> None:
        with self._changed:
            self._standby[connection] = host_key
            for older in list(self._standby)[:-MAX_STANDBY]:
                self.connections.hang_up(older)
            self._changed.notify_all()
        try:
            # A guest that waits has nothing to say; so it has gone, or is none of ours.
            await guest_loop().sock_recv(connection, 1)
        finally:
            with self._changed:
                self._standby.pop(connection, None)


@contextmanager
def listening(door: Door, server: socket.socket) -> Iterator[None]:
    """Have a door take the connections of a listening socket for as long as the context lasts."""
    with accepting(server, door.connections):
        try:
            yield
        finally:
            door.close()
