"""Runs programs on hostile files: without network, other files and rights, with limits.

bubblewrap gives the program its own namespaces with a read-only ``/usr``, its input file and one
directory for output, drops all capabilities and loads a seccomp filter (:mod:`vmjobs.seccomp`);
``prlimit`` limits memory, processor time, file size, descriptors and processes; this module limits
the time and the output, and kills all processes at the end. There is no fallback: where the sandbox
does not work, nothing runs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from images.formats.base import refusal
from vmjobs import seccomp
from vmjobs.errors import StorageFull, Unavailable
from vmjobs.subprocess import environment

#: Paths in the sandbox of the input file and of the output directory.
SOURCE: Final = "/in/disk"
OUTPUT: Final = "/out"

_MIB: Final = 1024 * 1024
_POLL_SECONDS: Final = 0.25
_MAX_QUOTED: Final = 1000
_PROBE_SECONDS: Final = 20.0
_SYMLINKS: Final = ("usr/lib", "usr/lib64", "usr/lib32", "usr/bin", "usr/sbin")

#: System calls that such a program never needs and an exploit wants: sockets, other processes, new
#: namespaces, mounts, tracing, kernel interfaces with a history of vulnerabilities.
_FORBIDDEN: Final = (
    *("socket", "connect", "bind", "socketpair", "fork", "vfork", "ptrace", "personality"),
    *("pivot_root", "chroot", "mount", "umount2", "init_module", "add_key", "request_key", "keyctl"),
    *("unshare", "perf_event_open", "open_by_handle_at", "setns", "process_vm_readv"),
    *("process_vm_writev", "finit_module", "kexec_file_load", "bpf", "userfaultfd", "io_uring_setup"),
    *("open_tree", "move_mount", "fsopen", "pidfd_getfd"),
)


@dataclass(frozen=True)
class SandboxLimits:
    """Limits on a sandboxed program.

    seconds: wall-clock time. cpu_seconds: processor time. memory: bytes of address space.
    file_size: bytes of the largest output file, holes included. written: bytes of disk for its output
    directory. files: open at once. threads: at once (the kernel does not limit root's).
    """

    seconds: float = 4 * 3600.0
    cpu_seconds: int = 4 * 3600
    memory: int = 4096 * _MIB
    file_size: int = 64 * _MIB
    written: int = 64 * _MIB
    files: int = 64
    threads: int = 1024


def run(
    argv: Sequence[str],
    *,
    source: BinaryIO | None = None,
    output: Path | None = None,
    limits: SandboxLimits,
    on_output: Callable[[bytes], None] = lambda _: None,
) -> None:
    """Run a program of ``/usr/bin`` in the sandbox until it exits.

    Args:
        argv: program and arguments. It sees ``source`` as :data:`SOURCE`, read-only, and
            ``output`` as :data:`OUTPUT`; its environment has only the path, locale and malloc settings.
        source: the input file, as an open descriptor: a path could change meanwhile.
        output: an existing directory for its output alone.
        on_output: called with each piece of its standard output.

    Raises:
        ImageRejected: it failed, or exceeded a limit; the code names the limit.
        StorageFull: no space is left for its output.
        Unavailable: the sandbox does not work on this host.
    """
    require(limits)
    deadline = time.monotonic() + limits.seconds
    with contextlib.ExitStack() as stack:
        command, descriptors = _command(argv, source, output, limits, stack)
        process = stack.enter_context(
            subprocess.Popen(
                command,
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment(),
                start_new_session=True,
            )
        )
        stack.callback(_kill, process)
        errors = _read_output(process, output, limits, deadline, on_output)
        code = process.wait()
    if code:
        _raise_failure(argv[0], code, errors, limits)


def require(limits: SandboxLimits | None = None) -> None:
    """Check that the sandbox works on this host, with a trial run.

    Raises:
        Unavailable: it does not work; the message has bubblewrap's reason and the remedy.
    """
    for program, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux")):
        if shutil.which(program) is None:
            raise Unavailable(
                "sandbox",
                f"cannot open the image: {program}, which the sandbox needs, is not installed",
                hint=f"apt-get install {package}; raw images need no conversion",
            )
    with contextlib.ExitStack() as stack:
        # An arbitrary file: older versions of bubblewrap cannot bind a file descriptor.
        file = stack.enter_context(Path("/usr/bin/env").open("rb"))
        command, descriptors = _command(("true",), file, None, limits or SandboxLimits(), stack)
        try:
            done = subprocess.run(
                command,
                pass_fds=descriptors,
                capture_output=True,
                timeout=_PROBE_SECONDS,
                env=environment(),
                stdin=subprocess.DEVNULL,
                check=False,
            )
            why = done.stderr.decode("utf-8", "replace").strip() if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"no result after {_PROBE_SECONDS:g} s"
    if why:
        raise Unavailable(
            "sandbox",
            f"cannot open the image: the sandbox does not work: {why}",
            hint="bubblewrap needs user namespaces. A container must be started with "
            "`--security-opt seccomp=unconfined`, or a profile that allows unshare, clone, mount, "
            "umount2 and pivot_root; a host needs kernel.unprivileged_userns_clone=1. Or convert "
            "the image elsewhere: raw images need no conversion",
        )


def _command(
    argv: Sequence[str],
    source: BinaryIO | None,
    output: Path | None,
    limits: SandboxLimits,
    stack: contextlib.ExitStack,
) -> tuple[list[str], list[int]]:
    """The complete command line and the descriptors that it inherits."""
    rules = seccomp.build_filter(_FORBIDDEN, clone_without=seccomp.CLONE_THREAD)
    syscalls = seccomp.open_filter(rules)
    stack.callback(os.close, syscalls)
    descriptors = [syscalls]
    words = ["bwrap", "--unshare-all", "--unshare-user", "--unshare-cgroup-try", "--die-with-parent"]
    words += ["--new-session", "--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
    words += ["--setenv", "PATH", "/usr/bin", "--setenv", "LC_ALL", "C.UTF-8"]
    # Unused malloc arenas and thread stacks would count against the limit on address space.
    words += ["--setenv", "MALLOC_ARENA_MAX", "2"]
    words += ["--ro-bind", "/usr", "/usr"]
    for target in _SYMLINKS:
        if (Path("/") / target).is_dir():
            words += ["--symlink", target, f"/{target.removeprefix('usr/')}"]
    words += ["--dir", "/tmp", "--chdir", "/"]  # noqa: S108 - the sandbox's own, empty
    if source is not None:
        descriptors.append(source.fileno())
        words += ["--ro-bind-fd", str(source.fileno()), SOURCE]
    if output is not None:
        words += ["--bind", str(output.absolute()), OUTPUT]
    words += ["--remount-ro", "/", "--seccomp", str(syscalls), "--"]
    words += ["prlimit", *_rlimits(limits), "--", *argv]
    return words, descriptors


def _rlimits(limits: SandboxLimits) -> list[str]:
    wanted = {
        "as": (resource.RLIMIT_AS, limits.memory),
        "cpu": (resource.RLIMIT_CPU, limits.cpu_seconds),
        "fsize": (resource.RLIMIT_FSIZE, limits.file_size),
        "nofile": (resource.RLIMIT_NOFILE, limits.files),
        "nproc": (resource.RLIMIT_NPROC, limits.threads),
        "core": (resource.RLIMIT_CORE, 0),
    }
    words = []
    for name, (number, value) in wanted.items():
        hard_limit = resource.getrlimit(number)[1]
        soft = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
        # The soft limit comes a second earlier: its signal, SIGXCPU, identifies the cause.
        hard = soft + 1 if name == "cpu" and hard_limit == resource.RLIM_INFINITY else soft
        words.append(f"--{name}={soft}:{hard}")
    return words


def _read_output(
    process: subprocess.Popen[bytes],
    output: Path | None,
    limits: SandboxLimits,
    deadline: float,
    on_output: Callable[[bytes], None],
) -> bytes:
    """Read the program's output until it closes; enforce limits on time and output."""
    errors = bytearray()
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(_POLL_SECONDS):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    on_output(data)
                else:
                    errors += data[: max(0, 64 * 1024 - len(errors))]
            if time.monotonic() > deadline:
                raise refusal(
                    "too_long", f"the conversion was stopped: not finished after {limits.seconds:g} s"
                )
            if output is not None and _disk_bytes(output) > limits.written:
                raise refusal(
                    "too_much_output",
                    f"the conversion was stopped: it wrote more than {limits.written // _MIB} MiB",
                )
    return bytes(errors)


def _disk_bytes(directory: Path) -> int:
    """Bytes of disk that the files in a directory take. Refuses subdirectories."""
    used = 0
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            raise refusal("conversion_failed", "the conversion made directories, which is not allowed")
        with contextlib.suppress(FileNotFoundError):
            used += entry.stat(follow_symlinks=False).st_blocks * 512
    return used


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the sandbox's first process, the PID namespace's init, and so all others."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _raise_failure(program: str, code: int, errors: bytes, limits: SandboxLimits) -> None:
    # bubblewrap and prlimit report death by a signal as 128 + its number.
    number = code - 128 if code > 128 else -code
    if number == signal.SIGKILL:
        raise refusal("killed", f"{program} was killed: the host may have run out of memory")
    if number == signal.SIGXCPU:
        raise refusal(
            "too_much_cpu", f"{program} was stopped after {limits.cpu_seconds} s of processor time"
        )
    if number == signal.SIGXFSZ or b"File too large" in errors:
        raise refusal(
            "too_much_output",
            f"{program} was stopped: it wrote more than {limits.file_size // _MIB} MiB",
        )
    if number == signal.SIGSYS:
        raise refusal("forbidden_call", f"{program} was stopped: it made a forbidden system call")
    if b"No space left on device" in errors or b"Disk quota exceeded" in errors:
        raise StorageFull(f"no space is left for the output of {program}")
    words = errors.decode("utf-8", "replace").strip()[-_MAX_QUOTED:] or f"exit status {code}"
    raise refusal("conversion_failed", f"{program} could not read the image: {words}")
