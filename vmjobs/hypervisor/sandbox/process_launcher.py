"""Starts processes that outlive this one, and are not its descendants.

A small process (:mod:`.launcher`) starts them: one for each :class:`Launcher`, from
its first use until this process and all that it started have ended. If it is killed, the processes it
started continue, but their exit status is lost; the next start creates another one.
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
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import VmUsage
from vmjobs.hypervisor.sandbox import launcher
from vmjobs.subprocess import environment

#: Seconds in which the launcher must have started a process.
START_SECONDS = 30.0


def module_command(module: str) -> tuple[list[str], dict[str, str]]:
    """Return command line and environment of a module that needs no other package."""
    env = environment({"PYTHONPATH": str(Path(vmjobs.__file__).parents[1])})
    return [sys.executable, "-S", "-P", "-m", module], env


class LaunchedProcess:
    """A process that was started; its end is reported as long as the launcher lives.

    report: pipe on which the launcher reports the end; :meth:`close` closes it.
    """

    def __init__(self, pid: int, report: int) -> None:
        self.pid = pid
        self._report = report
        self._status: int | None = None
        self._used: VmUsage | None = None
        self._lock = threading.Lock()

    def status(self, timeout: float) -> int | None:
        """Return its exit status, or the negative number of the signal that ended it.

        None: it did not end within ``timeout`` seconds, or its status is lost.
        """
        with self._lock:
            if self._report >= 0 and self._status is None:
                words = _read_line(self._report, timeout).split()
                if words[:1] == [b"ended"]:
                    self._status = int(words[1])
                    self._used = VmUsage(float(words[2]), int(words[3]) * 1024)
            return self._status

    def used(self, timeout: float) -> VmUsage | None:
        """Return the usage of it and its reaped descendants; None: its end is unknown.

        timeout: as for :meth:`status`.
        """
        self.status(timeout)
        return self._used

    def kill(self) -> None:
        """Kill it; return once it has ended."""
        if self.status(0.0) is not None:
            return  # another process may have its number by now
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                procs.readable([handle], START_SECONDS)
            finally:
                os.close(handle)

    def close(self) -> None:
        """Stop listening for its end."""
        with self._lock:
            if self._report >= 0:
                os.close(self._report)
                self._report = -1


class Launcher:
    """Starts processes that outlive this one. Safe to use from several threads."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._launcher_parent: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start the launcher in the background, so that :meth:`start` need not wait."""
        with self._lock, suppress(OSError):  # the first start raises it again
            if self._control is None:
                self._start_launcher()

    def start(
        self,
        argv: Sequence[str],
        handles: Sequence[int],
        env: Mapping[str, str],
        cwd: Path | None = None,
        namespaces: tuple[int, int] | None = None,
        forward: Sequence[str] = (),
    ) -> LaunchedProcess:
        """Start a process in a new session; it runs the program when this returns.

        handles: become its handles 0, 1, 2 and so on; it gets no other.
        namespaces: handles of the user namespace and the network namespace that it enters.
        forward: interfaces there between which to forward packets.

        Raises:
            HypervisorError: the program cannot be run, or the launcher does not work.
        """
        where = str(cwd.absolute()) if cwd else ""
        request = launcher.pack_program(
            list(argv), dict(env), where, enters=namespaces is not None, forward=list(forward)
        )
        try:
            return self._launch(argv[0], request, [*handles, *(namespaces or ())])
        except OSError as error:
            raise HypervisorError(f"cannot run {argv[0]}: {reason_of(error)}") from error

    def run_steps(
        self, steps: launcher.Steps, namespaces: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], list[socket.socket]]:
        """Run steps in a network namespace; return its handles, and the sockets made.

        Args:
            steps: as for :func:`launcher.pack_steps`.
            namespaces: handles of the user namespace and the network namespace; None: make both.

        Raises:
            OSError: the kernel does not allow it.
            HypervisorError: the launcher does not work.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine:
            with theirs:
                handles = [theirs.fileno(), *(namespaces or ())]
                request = launcher.pack_steps(steps)
                process = self._launch("the network of a VM", request, handles)
            process.close()
            _, (user, network, *made), _, _ = socket.recv_fds(mine, 1, launcher.MAX_HANDLES)
        return (user, network), [socket.socket(fileno=handle) for handle in made]

    def _launch(self, what: str, request: bytes, handles: list[int]) -> LaunchedProcess:
        reader, writer = os.pipe()
        try:
            try:
                self._send_request(request, [writer, *handles])
            finally:
                os.close(writer)
            words = _read_line(reader, START_SECONDS).split()
            if words[:1] == [b"failed"]:
                raise OSError(int(words[1]), os.strerror(int(words[1])), what)
            if words[:1] != [b"started"]:
                raise HypervisorError(
                    f"cannot start {what}: the process launcher has ended, "
                    f"or did not answer within {START_SECONDS:g} s"
                )
        except BaseException:
            os.close(reader)
            raise
        return LaunchedProcess(int(words[1]), reader)

    def _send_request(self, request: bytes, handles: list[int]) -> None:
        with self._lock:
            try:
                try:
                    socket.send_fds(self._control_socket(), [request], handles)
                except ConnectionError:  # the launcher was killed
                    self._start_launcher()
                    socket.send_fds(self._control_socket(), [request], handles)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise HypervisorError(f"the process launcher failed: {reason_of(error)}") from error

    def _control_socket(self) -> socket.socket:
        control = self._control or self._start_launcher()
        if self._launcher_parent is not None:
            self._launcher_parent.wait(
                START_SECONDS
            )  # it exits at once, and leaves an orphan: the launcher
            self._launcher_parent = None
        return control

    def _start_launcher(self) -> socket.socket:
        if self._control is not None:
            self._control.close()
        self._control, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        argv, env = module_command(launcher.__name__)
        with inner:
            self._launcher_parent = subprocess.Popen(
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
    """Read a line from a pipe of whole lines; return the part that arrives in time."""
    deadline, line = time.monotonic() + timeout, b""
    while not line.endswith(b"\n") and procs.readable([handle], max(0.0, deadline - time.monotonic())):
        byte = os.read(handle, 1)
        if not byte:
            break
        line += byte
    return line
