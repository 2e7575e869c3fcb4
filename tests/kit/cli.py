"""Runs ``vmjobs``: in this process, or as a process of its own."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vmjobs.cli.common import config
from vmjobs.cli.main import main

#: The program that a user runs.
VMJOBS = str(Path(sys.executable).with_name("vmjobs"))


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Lines of standard output, without the padding of columns."""
        return [" ".join(line.split()) for line in self.out.splitlines()]

    @property
    def json(self) -> Any:
        assert self.code == 0, self.out + self.err
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Return a function that runs the program with the given arguments in this process.

    code: the exit status that it must have; None: any.
    """

    def run(*words: str | Path, stdin: str = "", code: int | None = None) -> Done:
        config.cache_clear()  # a process reads the settings once
        root = logging.getLogger()
        handlers, level = [*root.handlers], root.level
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as done:
            main([*map(str, words)])
        root.handlers[:] = handlers  # a command's own handler writes to this test's standard error
        root.setLevel(level)
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        assert isinstance(done.value.code, int)
        assert code in {None, done.value.code}, f"{words}: {done.value.code}: {out!r} {err!r}"
        return Done(done.value.code, out.decode(), err.decode())

    return run


def vmjobs(
    *words: str | Path,
    code: int | None = None,
    stdin: str = "",
    environ: Mapping[str, str] = os.environ,
    program: Sequence[str | Path] = (VMJOBS,),
    timeout: float = 400.0,
    cwd: Path | None = None,
    **settings: object,
) -> Done:
    """Run the program as a process.

    code: the exit status that it must have; None: any. settings: variables without their VMJOBS\\_.
    """
    own = {f"VMJOBS_{name.upper()}": str(value) for name, value in settings.items()}
    done = subprocess.run(
        [*program, *words],
        input=stdin,
        capture_output=True,
        text=True,
        env={**environ, **own},
        cwd=cwd,
        timeout=timeout,
        check=False,
    )
    assert code in {None, done.returncode}, f"{words}: {done.returncode}: {done.stdout}{done.stderr}"
    return Done(done.returncode, done.stdout, done.stderr)
