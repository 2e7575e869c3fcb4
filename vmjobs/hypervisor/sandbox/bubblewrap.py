"""Sandbox of a VM's process, which its guest may have taken over.

bubblewrap gives it its own user, mount, pid, network, IPC and UTS namespaces. It sees ``/usr``
read-only, :data:`HOME` with its disks, and of ``/proc`` only two names that its start needs; a procfs
is not needed, which containers do not allow to mount. It has no capability and gains none, and a
seccomp filter denies it namespaces, mounts, kernel interfaces with a history of holes and all sockets
but Unix ones.

The processes, from the outside::

    sh (MARK)    ends after bubblewrap, with its status; passes SIGTERM on to the kernel or QEMU
      bwrap      ends after the next, and kills it when the first has died (--die-with-parent)
        sh       first process of the pid namespace: when it ends, all processes there are killed
          kernel, or QEMU

The first two are outside: the guest reaches neither them nor their command lines, which identify the
VM. Death by a signal becomes status 128 + its number. bubblewrap's own first process cannot replace the
third: it would wait for all processes that the kernel left behind.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmjobs import seccomp
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.subprocess import run

#: Name of a sandbox's first process in its command line.
MARK: Final = "vmjobs-sandbox"
#: bubblewrap's name in its command line.
PROGRAM: Final = "bwrap"
#: Above this, a status means death by a signal.
SIGNAL_STATUS_BASE: Final = 128
#: The kernel's working directory.
HOME: Final = Path("/vm")
#: Description of the isolation, for operators.
ISOLATION: Final = "own namespaces, no capabilities, seccomp"
#: What to do if the sandbox does not work.
HINT: Final = (
    "apt-get install bubblewrap, and let it make user namespaces (docs/operators.md says how, for "
    "hosts and for containers); or set isolation to preferred, and trust every guest with all that "
    "the agent may do"
)

#: Neither shell may replace itself with its child. The outer one lives until all is gone: libvirt takes
#: it for QEMU, and ends it by SIGTERM first. The inner one must print nothing on the VM's console.
_OUTER: Final = """
"$@" %s& child=$!
children() {
    found=
    read -r found rest <"/proc/$1/task/$1/children" # its one line has no end
    [ -n "$found" ]
} 2>/dev/null
pass_on() {
    if ! children $child; then kill -TERM $child
    elif first=$found; children $first; then kill -TERM $found
    else kill -KILL $first
    fi
}
trap pass_on TERM
while kill -0 $child 2>/dev/null; do wait $child; status=$?; done
exit $status
"""
_INNER: Final = 'ulimit -c 0; exec 2>/dev/null; "$@" 2>&1; exit $?'
#: Bytes of its working directory's tmpfs, and of /dev/shm beyond a UML kernel's memory.
SPARE_BYTES: Final = 1 << 20
_TRIAL_SECONDS: Final = 20.0
_BIND: Final = ("lib", "lib64", "lib32", "bin", "sbin")
_FORBIDDEN: Final = (
    *("mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "mount_setattr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "unshare", "setns"),
    *("open_by_handle_at", "name_to_handle_at", "quotactl", "acct", "swapon", "swapoff", "reboot"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load"),
    *("add_key", "request_key", "keyctl", "bpf", "perf_event_open", "userfaultfd", "syslog"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "ioperm", "iopl"),
    *("process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp"),
)


@dataclass(frozen=True)
class BindMount:
    """A file or directory that a sandboxed program gets.

    name: its path there: below :data:`HOME`, unless absolute.
    """

    source: Path
    name: str
    read_only: bool = False


@dataclass(frozen=True)
class ResourceLimits:
    """Limits of a VM's processes. memory, address, file: in bytes.

    memory, cpus: of all together, enforced by a cgroup. address: of each process. processes: including
    threads.
    """

    memory: int
    cpus: int
    address: int
    file: int
    processes: int


def open_seccomp_filter() -> int:
    """Open a file with the seccomp filter, for ``--seccomp``; the caller closes it."""
    rules = seccomp.build_filter(_FORBIDDEN, clone_with=seccomp.CLONE_NEW, families=[socket.AF_UNIX])
    return seccomp.open_filter(rules)


def command(
    argv: Sequence[str],
    *,
    binds: Iterable[BindMount],
    devices: Iterable[str] = (),
    memory: int = SPARE_BYTES,
    bounds: ResourceLimits | None = None,
    namespaces: Sequence[str] = (),
    held: Sequence[int] = (),
    filtered: int,
    env: dict[str, str],
) -> list[str]:
    """Return the command line of a program in the sandbox; it must lead a session.

    Args:
        argv: the program and its arguments.
        devices: of the node that it may open, beside ``/dev/null``.
        memory: bytes of its own ``/dev/shm``.
        bounds: limits of its processes.
        namespaces: files of the user namespace and the network namespace to enter; none: no network.
        held: numbers of handles below 10 that only its first process, outside, keeps open.
        filtered: handle of :func:`open_seccomp_filter`, for bubblewrap.
        env: the program's whole environment.

    Raises:
        HypervisorError: the program or bubblewrap is not installed.
    """
    program = _program(argv[0])
    outer = _OUTER % "".join(f"{handle}>&- " for handle in held)
    words = ["sh", "-c", outer, MARK, *enter_command(namespaces), _bwrap()]
    words += _unshare_options(filtered, has_network=bool(namespaces))
    for name, value in env.items():
        words += ["--setenv", name, value]
    words += ["--ro-bind", "/usr", "/usr"]
    for name in _BIND:
        if Path("/", name).exists():
            words += ["--symlink", f"usr/{name}", f"/{name}"]
    if not program.is_relative_to("/usr"):
        words += ["--ro-bind", str(program), str(program)]
    # The kernel executes itself again by this name, and reads its processor's flags.
    words += ["--dir", "/proc/self", "--symlink", str(program), "/proc/self/exe"]
    words += ["--ro-bind-try", "/proc/cpuinfo", "/proc/cpuinfo"]
    for device in ("/dev/null", *devices):
        words += ["--dev-bind", device, device]
    words += ["--size", str(memory), "--tmpfs", "/dev/shm"]  # noqa: S108 - its own
    words += ["--size", str(SPARE_BYTES), "--tmpfs", str(HOME)]
    for bind in binds:
        how = "--ro-bind" if bind.read_only else "--bind"
        words += [how, str(bind.source.resolve()), str(HOME / bind.name)]
    words += ["--chdir", str(HOME), "--remount-ro", "/", "--"]
    return [*words, "sh", "-c", _INNER, "sh", *_prlimit_command(bounds), str(program), *argv[1:]]


def _prlimit_command(bounds: ResourceLimits | None) -> list[str]:
    """Set inside, as processes count for the limit's namespace (since Linux 5.14)."""
    if bounds is None:
        return []
    wanted = {
        "as": (resource.RLIMIT_AS, bounds.address),
        "fsize": (resource.RLIMIT_FSIZE, bounds.file),
        "nproc": (resource.RLIMIT_NPROC, bounds.processes),
    }
    return ["prlimit", *(f"--{name}={_capped(*most)}" for name, most in wanted.items()), "--"]


def _capped(which: int, wanted: int) -> int:
    """Return ``wanted``, or the hard limit if lower: the sandbox cannot raise it."""
    hard = resource.getrlimit(which)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def enter_command(namespaces: Sequence[str]) -> list[str]:
    """Return a command that enters a user and a network namespace, by their files.

    It follows the outer shell, which stays outside: scans skip processes in other namespaces.
    """
    if not namespaces:
        return []
    user, network = namespaces
    return ["nsenter", "--preserve-credentials", f"--user={user}", f"--net={network}", "--"]


def _unshare_options(filtered: int, *, has_network: bool) -> list[str]:
    words = ["--unshare-user", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += [] if has_network else ["--unshare-net"]
    words += ["--unshare-pid", "--as-pid-1", "--die-with-parent"]
    words += ["--new-session", "--cap-drop", "ALL", "--clearenv", "--setenv", "PATH", "/usr/bin"]
    return [*words, "--seccomp", str(filtered)]


def sandbox_error(words: str) -> HypervisorError:
    """Return the error for a sandbox that cannot be created."""
    return HypervisorError(f"cannot isolate VMs here: {words}", hint=HINT)


def describe_isolation(*, isolated: bool) -> str:
    """Describe the isolation of a node's VMs, for operators."""
    return f"isolated: {ISOLATION}" if isolated else "NOT ISOLATED"


def _bwrap() -> str:
    found = shutil.which(PROGRAM)
    if found is None:
        raise sandbox_error("bwrap is not installed")
    return found


def _program(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise HypervisorError(f"cannot run {name}: it is not installed")
    return Path(found).resolve()


def unavailable_reason() -> str:
    """Try the sandbox; return in a few words why it fails, ``""`` if it works."""
    handle = open_seccomp_filter()
    try:
        argv = command(["true"], binds=(), filtered=handle, env={})
        done = run(argv, timeout=_TRIAL_SECONDS, check=False, error=HypervisorError, inherit=[handle])
    except HypervisorError as error:
        return str(error)
    finally:
        os.close(handle)
    if not done.returncode:
        return ""
    return done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"


def is_leader(process: procs.Process) -> bool:
    """Whether a process is the first of a sandbox."""
    return process.argv[3:4] == (MARK,)


def is_outer_process(process: procs.Process) -> bool:
    """Whether a process is one of a sandbox's two processes outside of it."""
    return is_leader(process) or process.program == PROGRAM


def descendants(processes: Iterable[procs.Process]) -> list[procs.Process]:
    """The descendants of these processes, outer ones before inner ones."""
    found: dict[int, procs.Process] = {}
    level = [child for process in processes for child in procs.children(process.pid)]
    while level:
        living = [one for pid in level if pid not in found and (one := procs.read(pid))]
        found.update({one.pid: one for one in living})
        level = [child for one in living for child in procs.children(one.pid)]
    return list(found.values())


def inner_processes(process: procs.Process) -> list[procs.Process]:
    """Return the children of a sandbox's inner shell. process: the sandbox's first."""
    level = [process.pid]
    for _ in ("bwrap", "sh", "kernel"):
        level = [child for pid in level for child in procs.children(pid)]
    return [one for pid in level if (one := procs.read(pid))]
