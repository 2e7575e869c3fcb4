"""Starts processes that outlive the caller, and reports how each of them ended.

A program of its own, with one end of a SEQPACKET pair (:mod:`.process_launcher`).
Supervisors kill a daemon's descendants when it dies: HTCondor's master records again and again which
process is a child of which. So this process orphans itself before it starts anything, and its
environment names no ancestor; its children are later adopted by init. It runs until all processes that
it started have ended and the caller is gone.

It also creates the network namespaces of VMs, and starts processes in them. It imports little, and from
the standard library alone, because the first VM waits for it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from vmjobs.hypervisor.network import namespaces

#: Bytes of a request, and the most handles that a process may get.
MAX_REQUEST_BYTES = 128 * 1024
MAX_HANDLES = 32
#: Above all handle numbers that a process may get.
_FIRST_SCRATCH_HANDLE = 2 * MAX_HANDLES

#: The handle of the pipe on which to report a process's end, by its number.
_Reports = dict[int, int]

#: Names of functions, with their arguments.
Steps = list[tuple[str, dict[str, Any]]]


def pack_program(
    argv: list[str], env: dict[str, str], cwd: str, *, enters: bool, forward: list[str]
) -> bytes:
    """Return a request to start a program.

    enters: the last two handles are those of the user namespace and the network namespace that it
    enters; the program does not get them. forward: as for :func:`namespaces.forward`, in there.
    """
    words = {"argv": argv, "env": env, "cwd": cwd, "enters": enters, "forward": forward}
    return json.dumps(words).encode()


def pack_steps(steps: Steps) -> bytes:
    """Return a request to run steps in a network namespace.

    The first handle is a SEQPACKET socket that receives one message, with the handles of user namespace
    and network namespace, and of the sockets made. The other two handles are those of the namespaces;
    without them, both are created.

    steps: functions of :mod:`namespaces`, by name, each with its arguments.
    """
    return json.dumps({"steps": steps}).encode()


def main() -> None:
    """Leave the caller's process tree, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    _become_orphan()
    if os.fork():  # a supervisor that saw this process as a child has not seen its child
        os._exit(0)
    serve(control)


def _become_orphan() -> None:
    parent = os.getpid()
    reader, writer = os.pipe()
    if os.fork():
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)  # returns when the parent ends
    os.close(reader)
    while os.getppid() == parent:
        os.sched_yield()


def serve(control: socket.socket) -> None:
    """Handle requests until the caller is gone and all started processes have ended."""
    reports: _Reports = {}
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(woken, select.POLLIN)
    poller.register(control, select.POLLIN)
    asked = True
    while asked or reports:
        ready = {handle for handle, _ in poller.poll()}
        if woken in ready:
            os.read(woken, 4096)
            _report_exits(reports)
        if control.fileno() in ready and not _handle_request(control, reports):
            asked = False
            poller.unregister(control)


def _report_exits(reports: _Reports) -> None:
    with suppress(ChildProcessError):
        while (ended := os.wait4(-1, os.WNOHANG))[0]:
            pid, status, used = ended
            report = reports.pop(pid, None)
            if report is not None:
                # Only a process's parent learns its usage, with that of its reaped children.
                spent = f"{used.ru_utime + used.ru_stime:.2f} {used.ru_maxrss}"
                _write_report(report, f"ended {os.waitstatus_to_exitcode(status)} {spent}")
                os.close(report)


def _handle_request(control: socket.socket, reports: _Reports) -> bool:
    """Handle the next request; return False if the caller is gone."""
    try:
        request, handles, flags, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, MAX_HANDLES)
    except ConnectionError:
        return False
    if not request:
        return False
    if not handles:
        return True  # no handle fitted; the caller sees that no answer comes
    for handle in handles:
        os.set_inheritable(handle, False)
    report, *passed_handles = handles
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            too = errno.E2BIG if flags & socket.MSG_TRUNC else errno.EMFILE
            raise OSError(too, "")
        pid = _start(request, passed_handles) if _has_reader(report) else 0
    except OSError as error:
        _write_report(report, f"failed {error.errno}")
        pid = 0
    finally:
        for handle in passed_handles:
            os.close(handle)
    if pid and _write_report(report, f"started {pid}"):
        reports[pid] = report
        return True
    if pid:  # the caller is gone; end it with all that it started
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os.close(report)
    return True


def _has_reader(report: int) -> bool:
    """Whether the caller still waits for the answer."""
    poller = select.poll()
    poller.register(report, 0)
    return not poller.poll(0)


def _write_report(report: int, words: str) -> bool:
    try:
        os.write(report, f"{words}\n".encode())
    except BrokenPipeError:
        return False
    return True


def _start(request: bytes, passed_handles: list[int]) -> int:
    """Start a process and return its number. Raises ``OSError`` if that fails."""
    asked = json.loads(request)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        _run(asked, passed_handles, writer)
    os.close(writer)
    try:
        failure = os.read(reader, 16)
    finally:
        os.close(reader)
    if failure:
        os.waitpid(pid, 0)
        raise OSError(int(failure), "")
    return pid


def _run(asked: dict[str, Any], passed_handles: list[int], failed: int) -> None:
    """Do what the request says, and never return."""
    code = 0
    try:
        failed, *passed_handles = (
            fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, _FIRST_SCRATCH_HANDLE)
            for handle in [failed, *passed_handles]
        )
        os.setsid()
        if "argv" in asked:
            _exec_program(asked, passed_handles)
        _run_steps(asked, passed_handles)
        os._exit(0)
    except OSError as error:
        code = error.errno or errno.EIO
    finally:
        os.write(failed, str(code).encode())
        os._exit(127)


def _exec_program(asked: dict[str, Any], passed_handles: list[int]) -> None:
    """Execute the program, with the handles given as 0, 1, 2 and so on."""
    if asked["enters"]:
        *passed_handles, user, network = passed_handles
        namespaces.enter(user, network)
        namespaces.forward(asked["forward"])
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(ignored, signal.SIG_DFL)
    if asked["cwd"]:
        os.chdir(asked["cwd"])
    for number, handle in enumerate(passed_handles):
        os.dup2(handle, number)
    os.execvpe(asked["argv"][0], asked["argv"], asked["env"])  # noqa: S606


def _run_steps(asked: dict[str, Any], passed_handles: list[int]) -> None:
    answer, *there = passed_handles
    if there:
        namespaces.enter(*there)
    else:
        namespaces.create()
    made: list[socket.socket] = []
    for step, arguments in asked["steps"]:
        made += getattr(namespaces, step)(**arguments) or ()
    with socket.socket(fileno=answer) as peer:
        socket.send_fds(peer, [b"."], [*namespaces.handles(), *(one.fileno() for one in made)])


if __name__ == "__main__":
    main()
