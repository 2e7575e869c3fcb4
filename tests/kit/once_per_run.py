"""Servers that all processes of a test run share; the first that needs one starts it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def once(factory: pytest.TempPathFactory, name: str, start: Callable[[], list[str]]) -> list[str]:
    """Call ``start`` in one process of this run; returns its result in all of them."""
    folder = factory.getbasetemp().parent if _IS_WORKER else factory.getbasetemp()
    note = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not note.exists():
            note.write_text(json.dumps(start()))
    found: list[str] = json.loads(note.read_text())
    return found


def after_run(script: str, *arguments: str | Path) -> None:
    """Run a shell ``script`` after this test run, however the run or one of its workers ended."""
    run = str(os.getppid() if _IS_WORKER else os.getpid())
    script = f'tail --pid="$0" --sleep-interval=0.1 -f /dev/null; {script}'
    subprocess.Popen(
        ["sh", "-c", script, run, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
