"""The output of a shell in a job's VM, and the exit status at its end."""

from __future__ import annotations

import os

import pytest

from vmjobs.job_shell import ExitStatusFilter

MARK = "0123456789abcdef" * 2
END = f"\x1evmjobs {MARK} 7\n".encode()


def through(tail: ExitStatusFilter, data: bytes, size: int) -> bytes:
    return b"".join(tail.feed(data[at : at + size]) for at in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, 100_000])
def test_all_but_the_end_is_printed(size: int) -> None:
    words = b"a line\nanother\n\x1evmjobs \x1e\x1e\x00" + os.urandom(5000)
    tail = ExitStatusFilter(MARK)
    assert through(tail, words + END, size) == words
    assert (tail.status, tail.remainder()) == (7, b"")


@pytest.mark.parametrize("line", [b"$ ", b"a line\n", b"\n", b"vmjobs"])
def test_no_text_is_kept_back(line: bytes) -> None:
    assert ExitStatusFilter(MARK).feed(line) == line


@pytest.mark.parametrize(
    "data", [b"words", b"words\x1evm", b"words" + END[:-1], b"words" + END.replace(b"0123", b"4321")]
)
def test_without_an_end_there_is_no_status(data: bytes) -> None:
    """The VM closes the connection, or the guest fakes an end."""
    tail = ExitStatusFilter(MARK)
    assert tail.feed(data) + tail.remainder() == data
    assert tail.status is None
