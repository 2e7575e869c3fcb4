"""The one way to run another program and wait for it.

Argument lists only, never a shell; always a deadline; an environment of its own; and a failure
that reads as a command to paste into a terminal.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vmjobs.errors import VMJobsError

#: Kept of a failed program's words, in characters.
MAX_QUOTED = 2000

_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Result:
    """A program that ended. ``seconds`` is wall-clock time."""

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode("utf-8", "replace")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The few variables another program needs, and ``extra``; nothing else leaks into it."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    kept.setdefault("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    return {**kept, "LC_ALL": "C.UTF-8", **(extra or {})}


def command_line(argv: Sequence[str | Path], cwd: Path | None = None) -> str:
    """The command as one would type it."""
    line = shlex.join(str(word) for word in argv)
    return f"cd {shlex.quote(str(cwd))} && {line}" if cwd else line


def run(
    argv: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    data: bytes = b"",
    check: bool = True,
    error: type[VMJobsError] = VMJobsError,
) -> Result:
    """Run a program to its end.

    Args:
        argv: the program and its arguments.
        timeout: seconds until it is killed, with all that it started.
        env: variables besides those of :func:`environment`.
        data: given to it on standard input.
        check: treat an exit status other than 0 as a failure.
        error: the class to raise, of one message.

    Raises:
        VMJobsError: of class ``error``, if the program cannot be started, fails or takes too long.
    """
    words = tuple(str(word) for word in argv)
    shown = command_line(words, cwd)
    began = time.monotonic()
    try:
        with subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(env),
            cwd=cwd,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(data, timeout)
            except BaseException:
                _kill(process)
                raise
    except subprocess.TimeoutExpired as expired:
        said = _quote(expired.stderr or b"")
        raise error(f"no end after {timeout:g} s: {shown}{said}") from expired
    except OSError as failed:
        raise error(f"cannot run: {shown}: {failed.strerror or failed}") from failed
    result = Result(words, process.returncode, stdout, stderr, time.monotonic() - began)
    if check and result.returncode != 0:
        said = _quote(result.stderr or result.stdout)
        raise error(f"exit status {result.returncode}: {shown}{said}")
    return result


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started and that stayed in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or run as somebody else
        os.killpg(process.pid, signal.SIGKILL)


def _quote(words: bytes) -> str:
    text = words.decode("utf-8", "replace").strip()
    return f": {text[-MAX_QUOTED:]}" if text else ""
