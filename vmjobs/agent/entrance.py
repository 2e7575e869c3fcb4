"""The ways between an unchanged job's machine and the node: who enters it, and what it says by Chirp.

The guest makes all connections itself, to two ports of its endpoint's address; ``unchanged.sh`` is
what does that.
"""

from __future__ import annotations

import base64
import logging
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from vmjobs.agent import door, protocol, streams
from vmjobs.agent.framing import Channel, DataMessage
from vmjobs.agent.protocol import EnterMessage, SubmitMessage
from vmjobs.errors import NoLogin, Unavailable, VMJobsError
from vmjobs.hypervisor.base import CHIRP_PORT, DOOR_PORT, ENDPOINT_ADDRESS
from vmjobs.model import NetworkMode

log = logging.getLogger(__name__)

#: Seconds in which the guest is to come to its door: it has to be up, and to have done its set-up.
KNOCK_SECONDS: Final = 15.0
#: People in one machine at a time.
MOST: Final = 8
_PIECE: Final = 64 * 1024

Send = Callable[[protocol.Message], None]


class Entrance:
    """The doors of one job's machine. send: to whoever handed the job over. token: what its guest knows
    already, if that was saved.

    console: the file of its console, as soon as it is known where that will be.
    """

    def __init__(self, message: SubmitMessage, send: Send, token: str = "") -> None:
        self.console: Path | None = None
        self._online = message.network is not NetworkMode.NONE
        self._token = token or secrets.token_hex(16)
        self._chirps = message.chirp and self._online
        self._door = door.Door(self._token)
        self._streams = streams.Streams(Channel.CHIRP, send)
        self._free = threading.BoundedSemaphore(MOST)
        self._inside: set[socket.socket] = set()
        self._is_shut = False
        self._turn = threading.Lock()

    @property
    def token(self) -> str:
        """The door's secret; empty where there is none."""
        return self._token if self._online else ""

    @property
    def doors(self) -> Mapping[int, Callable[[socket.socket], AbstractContextManager[None]]]:
        """What listens at which port of the endpoint's address."""
        doors: dict[int, Callable[[socket.socket], AbstractContextManager[None]]] = {}
        if self._online:
            doors[DOOR_PORT] = partial(door.listening, self._door)
        if self._chirps:
            doors[CHIRP_PORT] = partial(streams.listening, self._streams)
        return doors

    @property
    def key(self) -> str:
        """What ``unchanged.sh`` needs for its door, a secret. Empty where there is none."""
        return f"{ENDPOINT_ADDRESS} {DOOR_PORT} {self._token}" if self._online else ""

    @property
    def chirp(self) -> str:
        """Where ``unchanged.sh`` finds Chirp. Empty where there is none."""
        return f"{ENDPOINT_ADDRESS} {CHIRP_PORT}" if self._chirps else ""

    def take(self, message: DataMessage) -> None:
        """Something from whoever handed the job over."""
        if message.channel is Channel.CHIRP:
            self._streams.take(message)

    def enter(
        self,
        message: EnterMessage,
        connection: socket.socket,
        send: Send,
        messages: Iterator[protocol.Message],
    ) -> None:
        """Let somebody in, and return when they have left. connection, send, messages: theirs.

        Raises:
            NoLogin: the guest does not come to its door, or there is none.
            Unavailable: too many are there.
        """
        if not self._online:
            raise NoLogin("the job's machine has no network, and so no way in")
        with self.visited(), self._door.order(_order(message), KNOCK_SECONDS) as guest:
            threads = [
                threading.Thread(target=_pass_on, args=(messages, guest), daemon=True),
                threading.Thread(target=_pass_back, args=(guest, send), daemon=True),
            ]
            for thread in threads:
                thread.start()
            with self._turn:
                self._inside.add(guest)
                if self._is_shut:
                    streams.hang_up(guest)
            _await_leaving(connection)
            with self._turn:
                self._inside.discard(guest)
            streams.hang_up(guest)
            for thread in threads:
                thread.join()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """The guest's connections end, and none is taken, while the context lasts: a machine that is
        saved would wait for what comes on them wherever it goes on.
        """
        self._shut(True)
        try:
            yield
        finally:
            self._shut(False)

    def _shut(self, shut: bool) -> None:
        self._door.shut(shut)
        self._streams.shut(shut)
        with self._turn:
            self._is_shut = shut
            for guest in self._inside if shut else ():
                streams.hang_up(guest)

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Somebody is in the machine, or looks at its console.

        Raises Unavailable: too many are there.
        """
        if not self._free.acquire(blocking=False):
            raise Unavailable("agent", f"{MOST} people are in the job's machine already")
        try:
            yield
        finally:
            self._free.release()


def _order(message: EnterMessage) -> str:
    command = base64.b64encode(message.command.encode("utf-8", "surrogateescape")).decode()
    term = message.term or "-"
    return f"shell {message.mark} {term} {message.rows} {message.columns} {command or '-'}"


def _await_leaving(connection: socket.socket) -> None:
    """Until the other end has hung up, whatever of it is still to be read."""
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.poll()


def _pass_on(messages: Iterator[protocol.Message], guest: socket.socket) -> None:
    """What somebody types, into the machine."""
    try:
        for piece in messages:
            if isinstance(piece, DataMessage) and piece.channel is Channel.SHELL:
                guest.sendall(piece.data)
                if piece.last:
                    guest.shutdown(socket.SHUT_WR)
    except (OSError, VMJobsError) as error:
        log.info("somebody who entered a machine is let go: %s", error)
        streams.hang_up(guest)


def _pass_back(guest: socket.socket, send: Send) -> None:
    """What comes from the machine, until nothing does. Who entered hangs up then."""
    with suppress(OSError):
        while data := guest.recv(_PIECE):
            send(DataMessage(Channel.SHELL, data))
    send(DataMessage(Channel.SHELL, last=True))
