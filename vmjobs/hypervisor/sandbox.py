"""Where a machine's process runs: it is one of the host's, and its guest may have broken it.

bubblewrap gives it a user, mount, pid, network, IPC and UTS namespace of its own. It sees ``/usr``
read-only, :data:`HOME` with its disks and nothing else; of ``/proc`` two names that its start asks for,
so that no procfs is needed, which containers do not let anybody mount. It has no capability, gains
none, and a seccomp filter keeps it from namespaces, mounts, kernel interfaces with a history of holes
and all sockets but Unix ones.

The processes, from the outside::

    sh (MARK)    ends when bubblewrap has ended, with its status; SIGTERM is the kernel's, or QEMU's
      bwrap      ends with the next, and takes it along when the first has died (--die-with-parent)
        sh       the first process of the pid namespace: when it ends, nothing of it is left
          kernel, or QEMU

The first two are outside: the guest reaches neither them nor their command lines, by which a machine
is found. A death by signal comes out as 128 + its number. bubblewrap's own first process would not do
in the third's place: it waits for whatever the kernel has left behind.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmjobs import seccomp
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.subprocess import environment

#: What the first process of a sandbox is called in its command line.
MARK: Final = "vmjobs-sandbox"
#: bubblewrap, which shows as that in its command line.
PROGRAM: Final = "bwrap"
#: What a status is above that tells of a death by signal.
BY_SIGNAL: Final = 128
#: The kernel's working directory.
HOME: Final = Path("/vm")
#: What machines that run in it are told to have.
ISOLATION: Final = "own namespaces, no capabilities, seccomp"
#: What to do where it does not work.
HINT: Final = (
    "apt-get install bubblewrap, and let it make user namespaces (docs/operators.md says how, for "
    "hosts and for containers); or set isolation to preferred, and trust every guest with all that "
    "the agent may do"
)

#: Neither shell may become what it starts. The outer one is there until all is gone: libvirt takes it
#: for QEMU, and ends it by SIGTERM first. The inner one has nothing to say on a machine's console.
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
#: Bytes that its directory and the rest of its tmpfs may have beside disks and memory.
ROOM: Final = 1 << 20
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
class Bind:
    """A file, or a directory, that a program is to have.

    name: what it is called there: below :data:`HOME`, or anywhere if that is a whole path.
    """

    source: Path
    name: str
    read_only: bool = False


@dataclass(frozen=True)
class Bounds:
    """What the processes of a machine may take. memory, address, file: bytes. processes: threads too.

    memory, cpus: of all together, which takes a cgroup. address: of each.
    """

    memory: int
    cpus: int
    address: int
    file: int
    processes: int


def filter_file() -> int:
    """An open file with the seccomp filter, for ``--seccomp``; to be closed."""
    handle = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    rules = seccomp.forbidding(_FORBIDDEN, clone_with=seccomp.CLONE_NEW, families=[socket.AF_UNIX])
    os.write(handle, rules)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def command(
    argv: Sequence[str],
    *,
    binds: Iterable[Bind],
    devices: Iterable[str] = (),
    memory: int = ROOM,
    bounds: Bounds | None = None,
    namespaces: Sequence[str] = (),
    held: Sequence[int] = (),
    filtered: int,
    env: dict[str, str],
) -> list[str]:
    """The command line of a program in the sandbox; it is to lead a session.

    Args:
        argv: the program, and what it is told.
        devices: of the node's that it may open, beside ``/dev/null``.
        memory: bytes of its own ``/dev/shm``.
        bounds: what its processes may take.
        namespaces: files that are the user namespace and the network namespace that it is to be within;
            none: it has no network.
        held: numbers of handles below 10 that its first process, outside, has and nothing else.
        filtered: the number by which bubblewrap gets :func:`filter_file`.
        env: all that the program gets of an environment.

    Raises:
        HypervisorError: the program or bubblewrap is not installed.
    """
    program = _program(argv[0])
    outer = _OUTER % "".join(f"{handle}>&- " for handle in held)
    words = ["sh", "-c", outer, MARK, *entering(namespaces), _bwrap()]
    words += _unsharing(filtered, has_network=bool(namespaces))
    for name, value in env.items():
        words += ["--setenv", name, value]
    words += ["--ro-bind", "/usr", "/usr"]
    for name in _BIND:
        if Path("/", name).exists():
            words += ["--symlink", f"usr/{name}", f"/{name}"]
    if not program.is_relative_to("/usr"):
        words += ["--ro-bind", str(program), str(program)]
    # The kernel starts itself again by this name, and reads its processor's flags.
    words += ["--dir", "/proc/self", "--symlink", str(program), "/proc/self/exe"]
    words += ["--ro-bind-try", "/proc/cpuinfo", "/proc/cpuinfo"]
    for device in ("/dev/null", *devices):
        words += ["--dev-bind", device, device]
    words += ["--size", str(memory), "--tmpfs", "/dev/shm"]  # noqa: S108 - its own
    words += ["--size", str(ROOM), "--tmpfs", str(HOME)]
    for bind in binds:
        how = "--ro-bind" if bind.read_only else "--bind"
        words += [how, str(bind.source.resolve()), str(HOME / bind.name)]
    words += ["--chdir", str(HOME), "--remount-ro", "/", "--"]
    return [*words, "sh", "-c", _INNER, "sh", *_bounded(bounds), str(program), *argv[1:]]


def _bounded(bounds: Bounds | None) -> list[str]:
    """Inside, as processes count for the namespace that the limit was set in (since Linux 5.14)."""
    if bounds is None:
        return []
    wanted = {
        "as": (resource.RLIMIT_AS, bounds.address),
        "fsize": (resource.RLIMIT_FSIZE, bounds.file),
        "nproc": (resource.RLIMIT_NPROC, bounds.processes),
    }
    return ["prlimit", *(f"--{name}={_at_most(*most)}" for name, most in wanted.items()), "--"]


def _at_most(which: int, wanted: int) -> int:
    """A limit that may be set: nobody in there may raise one."""
    hard = resource.getrlimit(which)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def entering(namespaces: Sequence[str]) -> list[str]:
    """The words that put a program into a user namespace and a network namespace, by their files.

    They stand behind the outer shell, which stays outside: processes in there are not searched.
    """
    if not namespaces:
        return []
    user, network = namespaces
    return ["nsenter", "--preserve-credentials", f"--user={user}", f"--net={network}", "--"]


def _unsharing(filtered: int, *, has_network: bool) -> list[str]:
    words = ["--unshare-user", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += [] if has_network else ["--unshare-net"]
    words += ["--unshare-pid", "--as-pid-1", "--die-with-parent"]
    words += ["--new-session", "--cap-drop", "ALL", "--clearenv", "--setenv", "PATH", "/usr/bin"]
    return [*words, "--seccomp", str(filtered)]


def refused(words: str) -> HypervisorError:
    """What there is to say where no sandbox can be made."""
    return HypervisorError(f"no machine is isolated here: {words}", hint=HINT)


def described(*, isolated: bool) -> str:
    """What a node's machines have of it, for its operators."""
    return f"isolated: {ISOLATION}" if isolated else "NOT ISOLATED"


def _bwrap() -> str:
    found = shutil.which(PROGRAM)
    if found is None:
        raise refused("bwrap is not installed")
    return found


def _program(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise HypervisorError(f"cannot run {name}: it is not installed")
    return Path(found).resolve()


def fault() -> str:
    """Why nothing can be isolated here, in a few words; ``""`` if it can: it is tried."""
    handle = filter_file()
    try:
        argv = command(["true"], binds=(), filtered=handle, env={})
        done = subprocess.run(
            argv,
            pass_fds=[handle],
            capture_output=True,
            timeout=_TRIAL_SECONDS,
            env=environment(),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (HypervisorError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        os.close(handle)
    if not done.returncode:
        return ""
    return done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"


def leads(process: procs.Process) -> bool:
    """Whether a process is the first of a sandbox."""
    return process.argv[3:4] == (MARK,)


def outside(process: procs.Process) -> bool:
    """Whether a process is one of the two of a sandbox that are outside of it."""
    return leads(process) or process.program == PROGRAM


def within(processes: Iterable[procs.Process]) -> list[procs.Process]:
    """The descendants of these processes, outer ones before inner ones."""
    found: dict[int, procs.Process] = {}
    level = [child for process in processes for child in procs.children(process.pid)]
    while level:
        living = [one for pid in level if pid not in found and (one := procs.read(pid))]
        found.update({one.pid: one for one in living})
        level = [child for one in living for child in procs.children(one.pid)]
    return list(found.values())


def innermost(process: procs.Process) -> list[procs.Process]:
    """What the first process of a sandbox's pid namespace has started, by the sandbox's first one."""
    level = [process.pid]
    for _ in ("bwrap", "sh", "kernel"):
        level = [child for pid in level for child in procs.children(pid)]
    return [one for pid in level if (one := procs.read(pid))]
