"""Runs command lines of the CLI in tests."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from vmjobs.cli.main import main


@dataclass
class Done:
    """What a command printed, and its exit status."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Lines of standard output, without the padding of columns."""
        return [" ".join(line.split()) for line in self.out.splitlines()]


Run = Callable[..., Done]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Return a function that runs the program with the given arguments."""

    def run(*words: str, stdin: str = "") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as done:
            main(list(words))
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        assert isinstance(done.value.code, int)
        return Done(done.value.code, out.decode(), err.decode())

    return run
