"""Runs other programs and waits for them.

Argument lists only, never a shell; always a deadline; a minimal environment; error messages quote the
command so that it can be pasted into a terminal.
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

#: Interval of the calls that may cancel a program, in seconds.
CHECK_SECONDS = 1.0
#: Maximum length of a failed program's output in a message, in characters.
MAX_QUOTED = 2000

_INHERITED = ("PATH", "HOME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class ProgramResult:
    returncode: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode("utf-8", "replace")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a program: a few inherited variables, and ``extra``."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    # An ordinary user's PATH lacks the directories of system programs such as mke2fs.
    kept["PATH"] = ":".join([kept.get("PATH", "/usr/bin:/bin"), "/usr/sbin", "/sbin"])
    return {**kept, "LC_ALL": "C.UTF-8", **(extra or {})}


def command_line(argv: Sequence[str | Path]) -> str:
    """The command as a line for a shell."""
    return shlex.join(str(word) for word in argv)


def run(
    argv: Sequence[str | Path],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    error: type[VMJobsError] = VMJobsError,
    check_cancelled: Callable[[], object] | None = None,
    inherit: Sequence[int] = (),
) -> ProgramResult:
    """Run a program to its end.

    Args:
        argv: the program and its arguments.
        timeout: seconds until the program and its children are killed.
        env: variables besides those of :func:`environment`.
        check: treat an exit status other than 0 as a failure.
        error: the exception class, called with one message.
        check_cancelled: called every second; an exception that it raises ends the program, as a timeout
            does. With it, standard input is an empty pipe that closes when the program must end, so
            that a program under another user id, which signals cannot reach, can detect that.
        inherit: file descriptors that the program and its children inherit.

    Raises:
        VMJobsError: of class ``error``, if the program cannot be started, fails or takes too long.
    """
    words = tuple(str(word) for word in argv)
    shown = command_line(words)
    deadline = time.monotonic() + timeout
    try:
        with (
            contextlib.ExitStack() as stack,
            subprocess.Popen(
                words,
                stdin=subprocess.PIPE if check_cancelled is None else _open_pipe(stack),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(env),
                start_new_session=True,
                pass_fds=inherit,
            ) as process,
        ):
            try:
                stdout, stderr = _communicate(process, deadline, check_cancelled)
            except BaseException:
                _kill(process)
                stack.close()
                raise
    except subprocess.TimeoutExpired as expired:
        said = _quote(expired.stderr or b"")
        raise error(f"timed out after {timeout:g} s: {shown}{said}") from expired
    except OSError as failed:
        raise error(f"cannot run: {shown}: {reason_of(failed)}") from failed
    result = ProgramResult(process.returncode, stdout, stderr)
    if check and result.returncode != 0:
        said = _quote(result.stderr or result.stdout)
        raise error(f"exit status {result.returncode}: {shown}{said}")
    return result


def _open_pipe(stack: contextlib.ExitStack) -> int:
    """The reading end of a pipe without data; closing ``stack`` closes the pipe."""
    reader, writer = os.pipe()
    stack.callback(os.close, reader)
    stack.callback(os.close, writer)
    return reader


def _communicate(
    process: subprocess.Popen[bytes],
    deadline: float,
    check_cancelled: Callable[[], object] | None,
) -> tuple[bytes, bytes]:
    """Read its output.  Raises TimeoutExpired, or as ``check_cancelled``."""
    if check_cancelled is None:
        return process.communicate(timeout=deadline - time.monotonic())
    while True:
        left = deadline - time.monotonic()
        try:
            return process.communicate(timeout=min(left, CHECK_SECONDS))
        except subprocess.TimeoutExpired:
            if left <= CHECK_SECONDS:
                raise
            check_cancelled()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and all of its children that stayed in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone, or under another user id
        os.killpg(process.pid, signal.SIGKILL)


def _quote(words: bytes) -> str:
    text = words.decode("utf-8", "replace").strip()
    return f": {text[-MAX_QUOTED:]}" if text else ""
