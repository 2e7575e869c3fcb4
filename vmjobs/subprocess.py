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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vmjobs.errors import VMJobsError, reason_of

#: Between two looks at whether a program is still wanted, in seconds.
WAIT_SECONDS = 1.0
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
    # An ordinary user's has no directories for system programs, of which mke2fs is one.
    kept["PATH"] = ":".join([kept.get("PATH", "/usr/bin:/bin"), "/usr/sbin", "/sbin"])
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
    waiting: Callable[[], object] | None = None,
    inherit: Sequence[int] = (),
) -> Result:
    """Run a program to its end.

    Args:
        argv: the program and its arguments.
        timeout: seconds until it is killed, with all that it started.
        env: variables besides those of :func:`environment`.
        data: given to it on standard input.
        check: treat an exit status other than 0 as a failure.
        error: the class to raise, of one message.
        waiting: called every second; what it raises ends the program, as a timeout does. Its
            standard input is then empty, and ends only when the program is not wanted any more:
            one that runs as somebody else, whom no signal reaches, can tell by that.
        inherit: open files that it and all that it starts have as well.

    Raises:
        VMJobsError: of class ``error``, if the program cannot be started, fails or takes too long.
    """
    words = tuple(str(word) for word in argv)
    shown = command_line(words, cwd)
    began = time.monotonic()
    try:
        with (
            contextlib.ExitStack() as leash,
            subprocess.Popen(
                words,
                stdin=subprocess.PIPE if waiting is None else _open_pipe(leash),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(env),
                cwd=cwd,
                start_new_session=True,
                pass_fds=inherit,
            ) as process,
        ):
            try:
                stdout, stderr = _communicate(process, data, began + timeout, waiting)
            except BaseException:
                _kill(process)
                leash.close()
                raise
    except subprocess.TimeoutExpired as expired:
        said = _quote(expired.stderr or b"")
        raise error(f"no end after {timeout:g} s: {shown}{said}") from expired
    except OSError as failed:
        raise error(f"cannot run: {shown}: {reason_of(failed)}") from failed
    result = Result(words, process.returncode, stdout, stderr, time.monotonic() - began)
    if check and result.returncode != 0:
        said = _quote(result.stderr or result.stdout)
        raise error(f"exit status {result.returncode}: {shown}{said}")
    return result


def _open_pipe(leash: contextlib.ExitStack) -> int:
    """The reading end of a pipe that nobody writes to; it ends with ``leash``."""
    reader, writer = os.pipe()
    leash.callback(os.close, reader)
    leash.callback(os.close, writer)
    return reader


def _communicate(
    process: subprocess.Popen[bytes],
    data: bytes,
    deadline: float,
    waiting: Callable[[], object] | None,
) -> tuple[bytes, bytes]:
    """Give it its input, and hear all it says.  Raises TimeoutExpired; what ``waiting`` raises."""
    if waiting is None:
        return process.communicate(data, deadline - time.monotonic())
    while True:
        left = deadline - time.monotonic()
        try:
            return process.communicate(timeout=min(left, WAIT_SECONDS))
        except subprocess.TimeoutExpired:
            if left <= WAIT_SECONDS:
                raise
            waiting()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started and that stayed in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or run as somebody else
        os.killpg(process.pid, signal.SIGKILL)


def _quote(words: bytes) -> str:
    text = words.decode("utf-8", "replace").strip()
    return f": {text[-MAX_QUOTED:]}" if text else ""
