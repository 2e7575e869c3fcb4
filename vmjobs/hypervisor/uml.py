"""User-mode Linux: a guest kernel that is an ordinary process of this user.

Nothing is needed: no privilege, no device, no daemon. UML has one processor whatever a machine
asks for; whoever schedules machines knows that.

The kernel runs inside the machine's working directory and is told relative names only: a guest
reads its own command line, and learns nothing there of how the node is laid out.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from logging import getLogger
from pathlib import Path

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import mconsole, netproc, procs
from vmjobs.hypervisor.base import (
    NAME_PREFIX,
    Ending,
    Machine,
    MachineLimits,
    MachineState,
    Network,
    ProbeResult,
)
from vmjobs.hypervisor.endings import of_kernel, tail
from vmjobs.hypervisor.limits import Holder
from vmjobs.hypervisor.probe import boot_probe
from vmjobs.model import MIB, BootMethod, HypervisorKind
from vmjobs.subprocess import run

log = getLogger(__name__)

_Words = list[str]
_Processes = list[procs.Process]
_Pids = list[int]
_Children = dict[str, list[subprocess.Popen[bytes]]]
_Kernels = dict[str, tuple[subprocess.Popen[bytes], Path]]

#: A COW file names its base by an absolute path of at most 255 bytes (arch/um/drivers/cow_user.c).
MAX_WORKDIR = 240

#: Longest name that UML takes.
MAX_NAME = 63
#: UML numbers its disks 0 to 7; the root disk is one of them.
MAX_DATA_DISKS = 7
#: Seconds in which the guest's kernel must answer its console.
ANSWER_SECONDS = 5.0
#: Seconds in which the kernel must be up so far that it has a console.
START_SECONDS = 30.0
#: Seconds that a kernel which has ended may take to have an exit status.
ENDING_SECONDS = 5.0
#: Seconds that a killed process may take to end.
KILL_SECONDS = 30.0
#: Bytes in an IP packet between the guest and its network process.
MTU = 1500
MAC = "52:54:00:12:34:56"

#: What an image may ask for. UML takes its devices from the same command line, any file of this
#: user among them, so that nothing but names known to be harmless gets through.
_HARMLESS = re.compile(
    r"(init|rootfstype|rootflags|rootwait|rootdelay|ro|rw|loglevel|selinux|apparmor|audit|security"
    r"|systemd\.[\w.-]+|rd\.[\w.-]+|net\.ifnames|random\.trust_cpu|vmjobs(\.[\w.-]+)?)(=[\w./,:@%+-]*)?"
)


class UserModeLinux:
    """The UML driver.

    program: the UML kernel.
    kill_seconds: how long :meth:`destroy` waits for killed processes.
    """

    kind = HypervisorKind.UML

    def __init__(self, program: str = "linux.uml", *, kill_seconds: float = KILL_SECONDS) -> None:
        self._program = program
        self._kill_seconds = kill_seconds
        self._children: _Children = {}
        self._mains: dict[str, int] = {}
        self._kernels: _Kernels = {}
        self._lock = threading.Lock()
        self._holder = Holder(throttles_disks=False, one_processor=True)

    # ----------------------------------------------------------------- life and death

    def probe(self, deadline: float) -> ProbeResult:
        """See :meth:`Hypervisor.probe`."""
        # A UML kernel takes the initial file system as a parameter of its own.
        return boot_probe(self, version=self._version, deadline=deadline, cmdline=("initrd=initrd",))

    def unenforced(self, limits: MachineLimits, directory: Path) -> tuple[str, ...]:
        """See :meth:`Hypervisor.unenforced`."""
        return self._holder.unenforced(limits, directory)

    def start(self, machine: Machine) -> None:
        """See :meth:`Hypervisor.start`."""
        _check(machine)
        held = self._holder.plan(machine)
        if machine.image.live is not None:
            raise HypervisorError("a UML machine starts of a complete image only")
        if self._find(machine.name):
            raise HypervisorError(f"{machine.name} runs already")
        with ExitStack() as undo:
            undo.callback(self.destroy, machine.name)
            disks = _lay_out(machine)
            network, carrier = netproc.wanted(machine), None
            with _cable(network) as (outer, inner):
                if network is not None and outer is not None:
                    carrier = netproc.start(
                        machine,
                        network,
                        fd=outer.fileno(),
                        mtu=MTU,
                        processors=held.processors,
                    )
                    self._adopt(machine.name, carrier.process)
                argv = [*self._command(machine), *disks, *_network_device(inner)]
                kernel = self._boot(machine, argv, inner)
            self._holder.hold(held, machine.name, lambda: self._pids(machine.name))
            if carrier is not None:
                carrier.regulate(kernel)
                carrier.ready()  # long since: the kernel takes longer to come up
            undo.pop_all()

    def stop(self, name: str) -> None:
        """See :meth:`Hypervisor.stop`. The guest's init decides what Ctrl-Alt-Del means."""
        with contextlib.suppress(HypervisorError):  # gone, or deaf: the caller's deadline decides
            self._tell(name, "cad")

    def destroy(self, name: str) -> None:
        """See :meth:`Hypervisor.destroy`."""
        # The kernel's processes live on, and spin, when only their leader is killed.
        procs.kill_all(lambda: self._find(name) + netproc.find(name), self._kill_seconds, name)
        self._reap(name)
        self._holder.release(name)
        with self._lock:
            self._kernels.pop(name, None)

    def pause(self, name: str) -> None:
        """See :meth:`Hypervisor.pause`."""
        main = self._main(name)
        if main is None:
            raise HypervisorError(f"{name} does not run")
        if self._paused(main, name):
            return
        # What halts it and lets it go on at times must not do so now.
        for process in netproc.regulating(name):
            _signal(process.pid, signal.SIGSTOP)
            procs.wait_stopped(process.pid, ANSWER_SECONDS)
            _signal(main.pid, signal.SIGCONT)
        # First the guest is halted at a point of the kernel's choice, with no process of it
        # running; only then can the kernel itself be stopped, which shows from outside.
        mconsole.command(_console(main.pid, name), "stop", ANSWER_SECONDS)
        _signal(main.pid, signal.SIGSTOP)
        procs.wait_stopped(main.pid, ANSWER_SECONDS)

    def resume(self, name: str) -> None:
        """See :meth:`Hypervisor.resume`."""
        main = self._main(name)
        if main is None:
            raise HypervisorError(f"{name} does not run")
        if self._paused(main, name):
            _signal(main.pid, signal.SIGCONT)
            mconsole.command(_console(main.pid, name), "go", ANSWER_SECONDS)
        for process in netproc.regulating(name):
            _signal(process.pid, signal.SIGCONT)

    # ----------------------------------------------------------------- what there is

    def state(self, name: str) -> MachineState:
        """See :meth:`Hypervisor.state`."""
        main = self._main(name)
        if main is None:
            self._reap(name)
            return MachineState.GONE
        return MachineState.PAUSED if self._paused(main, name) else MachineState.RUNNING

    def wait(self, name: str, timeout: float) -> MachineState:
        """See :meth:`Hypervisor.wait`."""
        main = self._main(name)
        if main is not None:
            procs.wait_gone(main.pid, lambda: self._main(name) is not None, timeout)
        return self.state(name)

    def ending(self, name: str) -> Ending:
        """See :meth:`Hypervisor.ending`."""
        with self._lock:
            kernel = self._kernels.get(name)
        if kernel is None:
            return Ending.UNKNOWN
        process, console = kernel
        try:
            # A process that is about to end shows no command line any more, but has no status yet.
            return of_kernel(process.wait(ENDING_SECONDS), console)
        except subprocess.TimeoutExpired:
            return Ending.UNKNOWN

    def list(self) -> list[str]:
        """See :meth:`Hypervisor.list`; also machines of which only remains are left."""
        return sorted({name for process in procs.scan() if (name := self._name_of(process))})

    # ----------------------------------------------------------------- inside

    def _command(self, machine: Machine) -> _Words:
        return [
            self._program,
            f"mem={machine.memory}M",
            f"umid={machine.name}",
            "uml_dir=.",
            "mconsole=notify:notify",
            # Without this a guest's root could mount any directory of ours; with it, none.
            "hostfs=/dev/null",
            "con=null",
            "con0=null,fd:1",
            "noreboot",
            *allowed_parameters(machine.image.cmdline),
            *machine.cmdline,
            f"root=/dev/ubda{machine.image.partition or ''}",
            "rw",
            "panic=1",
            "vmjobs=1",
        ]

    def _boot(self, machine: Machine, argv: _Words, inner: socket.socket | None) -> int:
        """Start the kernel; its process's number, once it is up."""
        with (
            _notify_socket(machine.workdir) as ready,
            machine.console.open("ab", buffering=0) as console,
        ):
            began = console.seek(0, os.SEEK_END)
            try:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    pass_fds=() if inner is None else (inner.fileno(),),
                    cwd=machine.workdir,
                    env={"PATH": "/usr/bin:/bin", "TMPDIR": str(_memory_directory(machine))},
                    start_new_session=True,
                )
            except OSError as error:
                raise HypervisorError(f"cannot run {self._program}: {error.strerror}") from error
            self._adopt(machine.name, process)
            with self._lock:
                self._kernels[machine.name] = (process, machine.console)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            _wait_up(process, ready, machine.console, began)
            return process.pid

    def _adopt(self, name: str, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._children.setdefault(name, []).append(process)

    def _reap(self, name: str) -> None:
        with self._lock:
            left = [child for child in self._children.pop(name, []) if child.poll() is None]
            if left:
                self._children[name] = left

    def _tell(self, name: str, words: str) -> None:
        main = self._main(name)
        if main is not None:
            mconsole.command(_console(main.pid, name), words, ANSWER_SECONDS)

    def _name_of(self, process: procs.Process) -> str:
        """The machine that a process belongs to, ``""`` if to none."""
        if Path(process.argv[0]).name != Path(self._program).name:
            return ""
        names = [word.removeprefix("umid=") for word in process.argv if word.startswith("umid=")]
        return names[0] if names and names[0].startswith(NAME_PREFIX) else ""

    def _find(self, name: str) -> _Processes:
        everyone = list(procs.scan())
        ours = [process for process in everyone if self._name_of(process) == name]
        # A session with another leader is not one that start() made: leave the rest of it alone.
        foreign = {process.pid for process in everyone if process.leads and process not in ours}
        sessions = {process.session for process in ours} - foreign
        return [p for p in everyone if p in ours or p.session in sessions]

    def _paused(self, main: procs.Process, name: str) -> bool:
        """Whether it is stopped until it is resumed, and not for having used its share."""
        if not main.stopped:
            return False
        carriers = netproc.find(name)
        if not carriers and any(word.startswith("vec0:") for word in main.argv):
            return False  # what would let it go on has died: it is lost, and must not look well
        return all(process.stopped for process in carriers if netproc.regulates(process))

    def _pids(self, name: str) -> _Pids:
        return [process.pid for process in self._find(name) + netproc.find(name)]

    def _child(self, name: str) -> int | None:
        """The kernel, where this process started it."""
        with self._lock:
            children = [c.pid for c in self._children.get(name, ()) if c.returncode is None]
        living = (found for pid in children if (found := procs.read(pid)) is not None)
        return next((p.pid for p in living if p.leads and self._name_of(p) == name), None)

    def _main(self, name: str) -> procs.Process | None:
        """The guest's kernel itself: it leads its session."""
        known = self._mains.get(name) or self._child(name)
        if known is not None:
            process = procs.read(known)  # a look at one process, not at all of them
            if process is not None and process.leads and self._name_of(process) == name:
                return process
        self._mains.pop(name, None)
        for process in procs.scan():
            if process.leads and self._name_of(process) == name:
                self._mains[name] = process.pid
                return process
        return None

    def _version(self) -> str:
        told = run([self._program, "--version"], timeout=10, error=HypervisorError)
        return f"UML {told.text.strip()}"


# --------------------------------------------------------------------------- before the start


def _check(machine: Machine) -> None:
    if not machine.name.startswith(NAME_PREFIX) or not re.fullmatch(r"[\w.-]+", machine.name):
        raise HypervisorError(f"{machine.name!r} is not a machine's name")
    if len(machine.name) > MAX_NAME:
        raise HypervisorError(f"the name {machine.name} has more than {MAX_NAME} characters")
    if machine.image.boot is not BootMethod.KERNEL:
        raise HypervisorError(f"UML brings its own kernel and cannot boot by {machine.image.boot}")
    if len(machine.disks) > MAX_DATA_DISKS:
        raise HypervisorError(f"UML has {MAX_DATA_DISKS} data disks, not {len(machine.disks)}")
    where = machine.workdir.resolve()
    if len(os.fsencode(where)) > MAX_WORKDIR:
        raise HypervisorError(
            f"the path of {where} is longer than the {MAX_WORKDIR} bytes that UML's overlays allow",
            hint="set state_dir to a shorter path",
        )


def allowed_parameters(words: Sequence[str]) -> list[str]:
    """Those of an image's kernel parameters that cannot name anything of the node."""
    allowed = [word for word in words if _HARMLESS.fullmatch(word)]
    for word in set(words) - set(allowed):
        log.info("UML is not given the image's kernel parameter %r", word)
    return allowed


def _lay_out(machine: Machine) -> list[str]:
    """Put links to the disks into the working directory; the devices' parameters.

    The flag ``d`` says "data": without it UML looks for a copy-on-write header in what a user
    may have written, and would open the file that is named there.
    """
    try:
        (machine.workdir / "base").symlink_to(machine.image.root.absolute())
        if machine.overlay is not None:
            (machine.workdir / "overlay").symlink_to(machine.overlay.absolute())
        # c: no locks. A lock on the base would keep QEMU from using the same image.
        devices = ["ubd0c=overlay,base"]
        for number, disk in enumerate(machine.disks, start=1):
            (machine.workdir / f"disk{number}").symlink_to(disk.path.absolute())
            devices.append(f"ubd{number}{'dr' if disk.read_only else 'd'}=disk{number}")
    except OSError as error:
        raise HypervisorError(f"cannot lay out {machine.workdir}: {error}") from error
    return devices


def _memory_directory(machine: Machine) -> Path:
    """Where the file that is the guest's memory lies: in memory where that can be."""
    shared = Path("/dev/shm")  # noqa: S108
    with contextlib.suppress(OSError):
        there = os.statvfs(shared)
        room = there.f_bavail * there.f_frsize >= machine.memory * MIB
        if room and not there.f_flag & os.ST_NOEXEC and os.access(shared, os.W_OK):
            return shared
    return machine.workdir


@contextmanager
def _cable(network: Network | None) -> Iterator[tuple[socket.socket | None, socket.socket | None]]:
    """Both ends of the cable, closed here once those who use them have got them."""
    if network is None:
        yield None, None
        return
    outer, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with outer, inner:
        yield outer, inner


def _network_device(inner: socket.socket | None) -> list[str]:
    return [] if inner is None else [f"vec0:transport=fd,fd={inner.fileno()},mac={MAC},mtu={MTU}"]


# --------------------------------------------------------------------------- while it starts


@contextmanager
def _notify_socket(workdir: Path) -> Iterator[socket.socket]:
    """Where the kernel says that its management console is up."""
    path = workdir / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        with mconsole.short_path(path) as address:
            sock.bind(address)
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def _wait_up(process: subprocess.Popen[bytes], ready: socket.socket, console: Path, began: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    handle = os.pidfd_open(process.pid)
    try:
        happened = procs.readable([ready.fileno(), handle], deadline - time.monotonic())
    finally:
        os.close(handle)
    if ready.fileno() in happened:
        return
    why = "ended at once" if happened else f"is not up after {START_SECONDS:g} s"
    raise HypervisorError(f"UML {why}: {_last_words(console, began)}")


def _last_words(console: Path, began: int) -> str:
    lines = tail(console, began).decode("utf-8", "replace").split("\n")
    return "; ".join(line.strip() for line in lines if line.strip())[-500:] or "it said nothing"


def _console(pid: int, name: str) -> Path:
    """The management console's socket, seen through the machine's own working directory."""
    return Path(f"/proc/{pid}/cwd") / name / "mconsole"


def _signal(pid: int, which: signal.Signals) -> None:
    try:
        os.kill(pid, which)
    except OSError as error:
        message = f"cannot send {which.name} to process {pid}: {error.strerror}"
        raise HypervisorError(message) from error
