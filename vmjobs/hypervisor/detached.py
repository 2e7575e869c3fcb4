"""Processes that outlive this one, and that nobody takes for its descendants.

They are started by a small process of their own (:mod:`vmjobs.hypervisor.launcher`): one for each
:class:`Launcher`, from its first use until this process and all that was started have ended. Should it
be killed, what it started goes on, but nobody learns how that ends; the next start makes another one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import vmjobs
from vmjobs.errors import HypervisorError, reason_of
from vmjobs.hypervisor import launcher, procs
from vmjobs.hypervisor.base import Usage
from vmjobs.subprocess import environment

#: Seconds in which a process must have been started.
START_SECONDS = 30.0


def program_of(module: str) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a module of ours that needs the standard library alone."""
    env = environment({"PYTHONPATH": str(Path(vmjobs.__file__).parents[1])})
    return [sys.executable, "-S", "-P", "-m", module], env


class Detached:
    """A process that was started; its end is told as long as the launcher lives.

    report: where its fate is told; closed by :meth:`close`.
    """

    def __init__(self, pid: int, report: int) -> None:
        self.pid = pid
        self._report = report
        self._status: int | None = None
        self._used: Usage | None = None
        self._lock = threading.Lock()

    def status(self, timeout: float) -> int | None:
        """How it ended: its exit status, or a signal's number below 0.

        None: it did not within ``timeout`` seconds, or nobody knows.
        """
        with self._lock:
            if self._report >= 0 and self._status is None:
                words = _read_line(self._report, timeout).split()
                if words[:1] == [b"ended"]:
                    self._status = int(words[1])
                    self._used = Usage(float(words[2]), int(words[3]) * 1024)
            return self._status

    def used(self, timeout: float) -> Usage | None:
        """What it, and all below it that were waited for, have used; None where its end is not known.

        timeout: as of :meth:`status`.
        """
        self.status(timeout)
        return self._used

    def kill(self) -> None:
        """End it; returns once it has ended."""
        if self.status(0.0) is not None:
            return  # its number may be another one's by now
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                procs.readable([handle], START_SECONDS)
            finally:
                os.close(handle)

    def close(self) -> None:
        """Nobody will ask how it ended."""
        with self._lock:
            if self._report >= 0:
                os.close(self._report)
                self._report = -1


class Launcher:
    """Starts detached processes. Safe to use from several threads."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._first: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Have it come up beside whatever the caller does until it starts something."""
        with self._lock, suppress(OSError):  # told then
            if self._control is None:
                self._begin()

    def start(
        self,
        argv: Sequence[str],
        handles: Sequence[int],
        env: Mapping[str, str],
        cwd: Path | None = None,
        namespaces: tuple[int, int] | None = None,
        forward: Sequence[str] = (),
    ) -> Detached:
        """Start a process in a session of its own; it runs the program when this returns.

        handles: become its handles 0, 1, 2 and so on; it gets no other.
        namespaces: handles of the user namespace and the network namespace that it is to be in.
        forward: interfaces there between which packets are to be forwarded.

        Raises:
            OSError: the program cannot be run.
            HypervisorError: nothing can be started.
        """
        where = str(cwd.absolute()) if cwd else ""
        request = launcher.pack_program(
            list(argv), dict(env), where, enters=namespaces is not None, forward=list(forward)
        )
        return self._begin_process(argv[0], request, [*handles, *(namespaces or ())])

    def take_steps(
        self, steps: launcher.Steps, namespaces: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], list[socket.socket]]:
        """Have steps taken in a network namespace; handles of what it is in then, and sockets made.

        Args:
            steps: as of :func:`launcher.pack_steps`.
            namespaces: handles of the user namespace and the network namespace; None: they are made.

        Raises:
            OSError: the kernel does not allow it.
            HypervisorError: nothing can be started.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine:
            with theirs:
                handles = [theirs.fileno(), *(namespaces or ())]
                request = launcher.pack_steps(steps)
                process = self._begin_process("the network of a VM", request, handles)
            process.close()
            _, (user, network, *made), _, _ = socket.recv_fds(mine, 1, launcher.MOST_HANDLES)
        return (user, network), [socket.socket(fileno=handle) for handle in made]

    def _begin_process(self, what: str, request: bytes, handles: list[int]) -> Detached:
        reader, writer = os.pipe()
        try:
            try:
                self._ask(request, [writer, *handles])
            finally:
                os.close(writer)
            words = _read_line(reader, START_SECONDS).split()
            if words[:1] == [b"failed"]:
                raise OSError(int(words[1]), os.strerror(int(words[1])), what)
            if words[:1] != [b"started"]:
                raise HypervisorError(
                    f"{what} was not started: what starts machines has ended, "
                    f"or does not answer for {START_SECONDS:g} s"
                )
        except BaseException:
            os.close(reader)
            raise
        return Detached(int(words[1]), reader)

    def _ask(self, request: bytes, handles: list[int]) -> None:
        with self._lock:
            try:
                try:
                    socket.send_fds(self._ready(), [request], handles)
                except ConnectionError:  # it was killed
                    self._begin()
                    socket.send_fds(self._ready(), [request], handles)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise HypervisorError(f"no machine can be started: {reason_of(error)}") from error

    def _ready(self) -> socket.socket:
        control = self._control or self._begin()
        if self._first is not None:
            self._first.wait(START_SECONDS)  # it ends at once, and leaves a child that is nobody's
            self._first = None
        return control

    def _begin(self) -> socket.socket:
        if self._control is not None:
            self._control.close()
        self._control, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        argv, env = program_of(launcher.__name__)
        with inner:
            self._first = subprocess.Popen(
                [*argv, str(inner.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(inner.fileno(),),
                cwd="/",
                env=env,
                start_new_session=True,
            )
        return self._control


def _read_line(handle: int, timeout: float) -> bytes:
    """The next line of a pipe in which each is written at once; what there is of it in time."""
    deadline, line = time.monotonic() + timeout, b""
    while not line.endswith(b"\n") and procs.readable([handle], max(0.0, deadline - time.monotonic())):
        byte = os.read(handle, 1)
        if not byte:
            break
        line += byte
    return line
