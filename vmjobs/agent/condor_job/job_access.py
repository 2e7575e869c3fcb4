"""Interactive sessions and Chirp of a transparent job's VM.

``unchanged.sh`` in the guest makes all connections, to two ports of its endpoint's address.
"""

from __future__ import annotations

import base64
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from vmjobs.agent import protocol
from vmjobs.agent.condor_job import stream_multiplexer
from vmjobs.agent.framing import Channel, DataMessage
from vmjobs.agent.guest import ssh_relay
from vmjobs.agent.protocol import EnterMessage, SubmitMessage
from vmjobs.errors import LoginUnavailable, Unavailable, VMJobsError
from vmjobs.hypervisor.base import CHIRP_PORT, ENDPOINT_ADDRESS, SSH_PORT
from vmjobs.model import NetworkMode
from vmjobs.sockets import shutdown_socket

log = logging.getLogger(__name__)

#: Seconds in which the guest must connect to the relay, after it has booted and set itself up.
CONNECT_SECONDS: Final = 15.0
#: The most sessions and console viewers of one VM at a time.
MAX_SESSIONS: Final = 8
_READ_BYTES: Final = 64 * 1024

Send = Callable[[protocol.Message], None]


class JobAccess:
    """Interactive sessions and Chirp of one job's VM.

    send: sends to the client that submitted the job. token: the SSH relay's, if a resumed guest knows
    it already. console: the file of the VM's console, as soon as its path is known.
    """

    def __init__(self, message: SubmitMessage, send: Send, token: str = "") -> None:
        self.console: Path | None = None
        self._online = message.network is not NetworkMode.NONE
        self._token = token or secrets.token_hex(16)
        self._has_chirp = message.chirp and self._online
        self._relay = ssh_relay.SshRelay(self._token)
        self._streams = stream_multiplexer.StreamMultiplexer(Channel.CHIRP, send)
        self._free_sessions = threading.BoundedSemaphore(MAX_SESSIONS)
        self._sessions: set[socket.socket] = set()
        self._is_shut = False
        self._lock = threading.Lock()

    @property
    def token(self) -> str:
        """The SSH relay's token; empty without network."""
        return self._token if self._online else ""

    @property
    def port_handlers(self) -> Mapping[int, Callable[[socket.socket], AbstractContextManager[None]]]:
        """Services by port of the endpoint's address."""
        port_handlers: dict[int, Callable[[socket.socket], AbstractContextManager[None]]] = {}
        if self._online:
            port_handlers[SSH_PORT] = partial(ssh_relay.listening, self._relay)
        if self._has_chirp:
            port_handlers[CHIRP_PORT] = partial(stream_multiplexer.listening, self._streams)
        return port_handlers

    @property
    def relay_parameters(self) -> str:
        """Address, port and token of the SSH relay for ``unchanged.sh``, or ``""``."""
        return f"{ENDPOINT_ADDRESS} {SSH_PORT} {self._token}" if self._online else ""

    @property
    def chirp(self) -> str:
        """Address and port of Chirp for ``unchanged.sh``, or ``""``."""
        return f"{ENDPOINT_ADDRESS} {CHIRP_PORT}" if self._has_chirp else ""

    def take(self, message: DataMessage) -> None:
        """Pass data from the client that submitted the job to the guest."""
        if message.channel is Channel.CHIRP:
            self._streams.take(message)

    def run_session(
        self,
        message: EnterMessage,
        connection: socket.socket,
        send: Send,
        messages: Iterator[protocol.Message],
    ) -> None:
        """Run an interactive session until the client ends it.

        connection, send, messages: the client's.

        Raises:
            LoginUnavailable: the guest does not connect, or has no network.
            Unavailable: the VM has too many sessions.
        """
        if not self._online:
            raise LoginUnavailable("cannot log in to the job's VM: it has no network")
        with (
            self.counted_session(),
            self._relay.send_command(_command_line(message), CONNECT_SECONDS) as guest,
        ):
            threads = [
                threading.Thread(target=_forward_input, args=(messages, guest), daemon=True),
                threading.Thread(target=_forward_output, args=(guest, send), daemon=True),
            ]
            for thread in threads:
                thread.start()
            with self._lock:
                self._sessions.add(guest)
                if self._is_shut:
                    shutdown_socket(guest)
            protocol.wait_for_hang_up(connection)
            with self._lock:
                self._sessions.discard(guest)
            shutdown_socket(guest)
            for thread in threads:
                thread.join()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """End the guest's connections and take none while the context lasts.

        A VM that is saved with open connections would wait for their data after it is resumed.
        """
        self._shut(True)
        try:
            yield
        finally:
            self._shut(False)

    def _shut(self, shut: bool) -> None:
        self._relay.shut(shut)
        self._streams.shut(shut)
        with self._lock:
            self._is_shut = shut
            for guest in self._sessions if shut else ():
                shutdown_socket(guest)

    @contextmanager
    def counted_session(self) -> Iterator[None]:
        """Count a session or a console viewer while the context lasts.

        Raises Unavailable: there are too many.
        """
        if not self._free_sessions.acquire(blocking=False):
            raise Unavailable(
                "agent", f"the job's VM has {MAX_SESSIONS} sessions already; try again later"
            )
        try:
            yield
        finally:
            self._free_sessions.release()


def _command_line(message: EnterMessage) -> str:
    command = base64.b64encode(message.command.encode("utf-8", "surrogateescape")).decode()
    term = message.term or "-"
    return f"shell {message.mark} {term} {message.rows} {message.columns} {command or '-'}"


def _forward_input(messages: Iterator[protocol.Message], guest: socket.socket) -> None:
    try:
        for piece in messages:
            if isinstance(piece, DataMessage) and piece.channel is Channel.SHELL:
                guest.sendall(piece.data)
                if piece.last:
                    guest.shutdown(socket.SHUT_WR)
    except (OSError, VMJobsError) as error:
        log.info("an interactive session is closed: %s", error)
        shutdown_socket(guest)


def _forward_output(guest: socket.socket, send: Send) -> None:
    """Pass the guest's output to the client until it ends; the client then hangs up."""
    with suppress(OSError):
        while data := guest.recv(_READ_BYTES):
            send(DataMessage(Channel.SHELL, data))
    send(DataMessage(Channel.SHELL, last=True))
