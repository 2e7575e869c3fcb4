"""Shows text of guests, nodes and other users on a terminal without control characters."""

from __future__ import annotations

import codecs
from typing import IO, Protocol


class ByteSink(Protocol):
    """A writable binary stream."""

    def write(self, data: bytes, /) -> object:
        """Write all bytes."""

    def flush(self) -> object:
        """Flush buffers."""


def printable(text: str, keep: str = "") -> str:
    """Replace the characters that control a terminal, except those in ``keep``."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)


def guest_output(stream: IO[bytes]) -> ByteSink:
    """Wrap ``stream`` for guest output: terminals get it filtered, other files unchanged."""
    return _FilteredTerminal(stream) if stream.isatty() else stream


class _FilteredTerminal:
    """Filters a terminal's stream; accepts characters that are split between writes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes, /) -> object:
        return self._stream.write(printable(self._decoder.decode(data), "\n\r\t").encode())

    def flush(self) -> object:
        return self._stream.flush()
