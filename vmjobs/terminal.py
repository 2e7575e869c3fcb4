"""What guests, nodes and other users say, on a terminal that is to show it and not to obey it."""

from __future__ import annotations

import codecs
from typing import IO, Protocol


class ByteSink(Protocol):
    """Where bytes go."""

    def write(self, data: bytes, /) -> object:
        """Take them all."""

    def flush(self) -> object:
        """Have them seen."""


def printable(text: str, keep: str = "") -> str:
    """``text`` with a sign for each character that controls a terminal, except those to ``keep``."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)


def guest_output(stream: IO[bytes]) -> ByteSink:
    """``stream`` for what a guest prints: a terminal gets it harmless, all else gets its bytes."""
    return _Terminal(stream) if stream.isatty() else stream


class _Terminal:
    """A terminal's stream. Lines and columns stay; a character may come in several pieces."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes, /) -> object:
        return self._stream.write(printable(self._decoder.decode(data), "\n\r\t").encode())

    def flush(self) -> object:
        return self._stream.flush()
