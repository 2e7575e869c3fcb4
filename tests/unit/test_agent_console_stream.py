"""The console of a running job's VM, as sent to a client that watches it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vmjobs.agent import console_stream, protocol
from vmjobs.agent.framing import DataMessage
from vmjobs.agent.protocol import ConsoleMessage

SECONDS = 10.0


class Watched:
    """A growing console, and a client that watches it."""

    def __init__(self, path: Path, message: ConsoleMessage) -> None:
        self.path, self.ended = path, threading.Event()
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(SECONDS)
        self._theirs = theirs
        self._thread = threading.Thread(target=self._show, args=(message,))
        self._thread.start()

    def _show(self, message: ConsoleMessage) -> None:
        with self._theirs, suppress(OSError):  # the agent handles it: the client is gone
            console_stream.send_console(self._theirs, self.path, message, self.ended.wait)

    def says(self, text: bytes) -> None:
        with self.path.open("ab") as console:
            console.write(text)

    def seen(self) -> Iterator[bytes]:
        """Yield the pieces up to the last."""
        for message in protocol.receive(self.ours):
            assert isinstance(message, DataMessage)
            if message.last:
                return
            yield message.data

    def over(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self.ours.close()


def test_what_there_is_is_shown_from_an_offset_on(path: Path) -> None:
    for offset, text in ((0, b""), (0, b"one two three"), (4, b"two three"), (13, b""), (14, b"")):
        watched = Watched(path, ConsoleMessage(offset=offset))
        assert b"".join(watched.seen()) == text
        watched.over()
        path.write_bytes(b"one two three")  # there is no console before


def test_it_is_followed_to_the_end_of_the_job(path: Path) -> None:
    watched = Watched(path, ConsoleMessage(follow=True))
    pieces = watched.seen()
    for text in (b"booting", b" up", b" down"):
        watched.says(text)
        assert next(pieces) == text
    watched.says(b" last words")
    watched.path.unlink()  # removed with the run's directory, before the job counts as ended
    watched.ended.set()
    assert b"".join(pieces) == b" last words"
    watched.over()


def test_one_that_is_emptied_begins_anew(path: Path) -> None:
    path.write_bytes(b"a long text of before")
    watched = Watched(path, ConsoleMessage(follow=True))
    pieces = watched.seen()
    next(pieces)
    path.write_bytes(b"anew")
    assert next(pieces) == b"anew"
    watched.ended.set()
    assert list(pieces) == []
    watched.over()


def test_who_hangs_up_is_let_go(path: Path) -> None:
    path.write_bytes(b"something")
    watched = Watched(path, ConsoleMessage(follow=True))
    assert next(watched.seen()) == b"something"
    watched.ours.shutdown(socket.SHUT_RDWR)
    watched.over()
