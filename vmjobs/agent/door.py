"""A machine's door: where its guest waits for those who log in (guest contract, "The door").

No port is open anywhere, neither on the node nor in the guest. The guest connects to the door, says
who it is, and waits. Whoever logs in gets that connection: the guest is told which key may come in,
and an SSH server answers on it; or, where it has come for that (:data:`SHELL`), it is told what to run
on it. The guest then connects anew, for the next one.

The door knows nothing of clusters and of the service: it is a socket that listens in the machine's
network (:class:`vmjobs.hypervisor.base.Network`), :meth:`Door.knock` and :meth:`Door.order`.
"""

from __future__ import annotations

import hmac
import logging
import re
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from vmjobs.agent.streams import hang_up
from vmjobs.errors import NoLogin

log = logging.getLogger(__name__)

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


@dataclass
class _Stranger:
    """A connection that has not said yet who it is."""

    until: float
    said: bytearray = field(default_factory=bytearray)


class Door:
    """The connections of one guest. token: which its root alone knows, if it is to keep others off."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._standby: dict[socket.socket, str] = {}
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._sessions = weakref.WeakSet[socket.socket]()
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
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
            self._selector.unregister(connection)
            self._sessions.add(connection)
            return connection, host_key

    # ------------------------------------------------------------------ its thread

    def run(self, server: socket.socket) -> None:
        """Take connections until :meth:`close` is called."""
        with self._selector:
            self._selector.register(server, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is server:
                        self._accept(server)
                    else:
                        self._heard(key.fileobj)  # type: ignore[arg-type]  # all are sockets
                self._expire()

    def shut(self, shut: bool) -> None:
        """Hang up on all that wait, and on whoever comes, until it is opened again; sessions go on."""
        with self._changed:
            self._shut = shut
            for connection in (*self._standby, *self._strangers) if shut else ():
                hang_up(connection)  # its thread sees that

    def close(self) -> None:
        """Hang up on all that wait, and on sessions: a machine that has ended does not say so there."""
        with self._changed:
            self._closed = True
            for connection in self._sessions:
                hang_up(connection)
            for connection in (*self._standby, *self._strangers):
                connection.close()
            self._standby.clear()
            self._strangers.clear()
            self._changed.notify_all()

    def _patience(self) -> float | None:
        with self._changed:
            soonest = min((stranger.until for stranger in self._strangers.values()), default=None)
        return None if soonest is None else max(0.0, soonest - time.monotonic())

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, _ = server.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if self._closed:
                return
            log.error("%s: a connection cannot be taken: %s", threading.current_thread().name, error)
            time.sleep(0.1)  # too many open files, for one: nothing tells when that is over
            return
        connection.setblocking(False)
        with self._changed:
            if self._closed or self._shut:
                connection.close()
                return
            self._strangers[connection] = _Stranger(time.monotonic() + GREETING_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ)
            while len(self._strangers) > MAX_STRANGERS:
                self._drop(next(iter(self._strangers)))

    def _heard(self, connection: socket.socket) -> None:
        with self._changed:
            stranger = self._strangers.get(connection)
            if stranger is None:
                # A guest that waits has nothing to say; so it has gone, or is none of ours.
                if connection in self._standby:
                    self._drop(connection)
                return
            try:
                data = connection.recv(MAX_GREETING)
            except OSError:
                data = b""
            stranger.said += data
            if not data or len(stranger.said) > MAX_GREETING:
                self._drop(connection)
            elif b"\n" in data:
                self._greeted(connection, bytes(stranger.said))

    def _greeted(self, connection: socket.socket, said: bytes) -> None:
        found = GREETING.fullmatch(said.removesuffix(b"\n"))
        if found is None or not hmac.compare_digest(found[1], self._token):
            self._drop(connection)
            return
        del self._strangers[connection]
        self._standby[connection] = found[2].decode()
        while len(self._standby) > MAX_STANDBY:
            self._drop(next(iter(self._standby)))
        self._changed.notify_all()

    def _expire(self) -> None:
        now = time.monotonic()
        with self._changed:
            for connection in [c for c, stranger in self._strangers.items() if stranger.until <= now]:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._strangers.pop(connection, None)
        self._standby.pop(connection, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()


@contextmanager
def listening(door: Door, server: socket.socket) -> Iterator[None]:
    """Have a door take the connections of a listening socket for as long as the context lasts."""
    with server:
        server.setblocking(False)
        thread = threading.Thread(target=door.run, args=(server,), name="door", daemon=True)
        thread.start()
        try:
            yield
        finally:
            door.close()
            hang_up(server)  # wakes the thread that waits for connections
            thread.join()
