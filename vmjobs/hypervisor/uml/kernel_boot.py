"""Starts UML kernels: command lines, devices, and the wait until they are up."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path

import vmjobs
from vmjobs.errors import HypervisorError, reason_of
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import NAME_PREFIX, PrivateNetwork, VmConfig
from vmjobs.hypervisor.network import private_network
from vmjobs.hypervisor.network.guest_network import MAC, MTU, open_namespaces
from vmjobs.hypervisor.network.namespaces import TAP, TUN_DEVICE
from vmjobs.hypervisor.sandbox import bubblewrap
from vmjobs.hypervisor.sandbox.process_launcher import LaunchedProcess, Launcher
from vmjobs.hypervisor.sandbox.resource_limits import resource_limits_for
from vmjobs.hypervisor.shutdown_causes import read_tail
from vmjobs.hypervisor.uml import mconsole
from vmjobs.hypervisor.uml.cow import create_overlay, update_base
from vmjobs.model import CAPABILITIES, MIB, BootMethod, Capabilities, HypervisorKind

log = getLogger(__name__)

#: A COW file names its base by an absolute path of at most 255 bytes (arch/um/drivers/cow_user.c).
MAX_WORKDIR_BYTES = 240

#: Longest name that UML takes.
MAX_NAME = 63
#: UML numbers its disks 0 to 7; the root disk is one of them.
MAX_DATA_DISKS = 7
#: Seconds in which the kernel must have opened its management console.
START_SECONDS = 120.0
#: Bytes beside a VM's memory for the kernel's other data.
MEMORY_OVERHEAD_BYTES = 4 * MIB
#: The kernel's handle of its card on a private network. The next two handles are those of the network's
#: namespaces, which the first process of its sandbox keeps open.
CARD_HANDLE = 3
_NETWORK_HANDLES = (CARD_HANDLE + 1, CARD_HANDLE + 2)

#: Kernel parameters that an image may set. UML takes its devices, and so any file of this user, from
#: the same command line, so only names known to be harmless pass.
_ALLOWED_PARAMETER = re.compile(
    r"(init|rootfstype|rootflags|rootwait|rootdelay|ro|rw|loglevel|selinux|apparmor|audit|security"
    r"|systemd\.[\w.-]+|rd\.[\w.-]+|net\.ifnames|random\.trust_cpu|vmjobs(\.[\w.-]+)?)(=[\w./,:@%+-]*)?"
)


#: The kernel that ``images/uml/build.sh`` builds.
OWN_KERNEL = Path(vmjobs.__file__).with_name("kernel") / "linux.uml"
#: Catches each VM's system calls in the suitable way.
AUTO = "auto"
#: Debian's kernel, from the package user-mode-linux.
DEBIAN_KERNEL = "linux.uml"

# --------------------------------------------------------------------------- before the start


def find_kernel() -> str:
    """Return this node's UML kernel: a path, or a name to look up."""
    return str(OWN_KERNEL) if OWN_KERNEL.exists() else DEBIAN_KERNEL


def system_call_parameters(program: str, vm: VmConfig, system_calls: str) -> tuple[str, ...]:
    """Return parameters that select how a kernel catches its guest's system calls.

    Debian's kernel knows one way only. seccomp costs less than ptrace, but then any user's code in
    the guest can write to all of its memory (Linux, ``seccomp=`` in
    ``arch/um/os-Linux/start_up.c``): a guest that several users share runs by ptrace.

    Args:
        system_calls: :data:`AUTO`, or ``ptrace`` or ``seccomp`` for every VM.
    """
    if Path(program) != OWN_KERNEL:
        return ()
    if not _uses_seccomp(vm, system_calls):
        return ("seccomp=off",)
    return ("seccomp=on", *([f"ncpus={vm.cpus}"] if vm.cpus > 1 else []))


def _uses_seccomp(vm: VmConfig, system_calls: str) -> bool:
    return system_calls == "seccomp" or (system_calls == AUTO and not vm.shared)


def abilities(program: str, system_calls: str) -> Capabilities:
    """Features of VMs: our kernel has ISO 9660 and, by seccomp, several processors."""
    own, can = Path(program) == OWN_KERNEL, CAPABILITIES[HypervisorKind.UML]
    return replace(can, cpus=can.cpus if own and system_calls != "ptrace" else 1, cloud_init=own)


def command(program: str, vm: VmConfig, system_calls: str = AUTO) -> list[str]:
    """Return the command line of a VM's kernel, without its devices."""
    return [
        program,
        f"mem={vm.memory}M",
        f"umid={vm.name}",
        "uml_dir=.",
        "mconsole=notify:notify",
        # Without this, a guest's root could mount any of our directories; with it, none.
        "hostfs=/dev/null",
        "con=null",
        "con0=null,fd:1",
        "noreboot",
        *system_call_parameters(program, vm, system_calls),
        *allowed_parameters(vm.image.cmdline),
        *vm.cmdline,
        f"root=/dev/ubda{vm.image.partition or ''}",
        "rw",
        "panic=1",
        "vmjobs=1",
    ]


def check_vm(vm: VmConfig, program: str, system_calls: str) -> None:
    """Check that UML can run a VM. system_calls: as for :func:`system_call_parameters`.

    Raises:
        HypervisorError: UML cannot run it, and why.
    """
    if not vm.name.startswith(NAME_PREFIX) or not re.fullmatch(r"[\w.-]+", vm.name):
        raise HypervisorError(f"{vm.name!r} is not a VM's name")
    if len(vm.name) > MAX_NAME:
        raise HypervisorError(f"the name {vm.name} has more than {MAX_NAME} characters")
    if vm.image.boot is not BootMethod.KERNEL:
        raise HypervisorError(f"UML brings its own kernel and cannot boot by {vm.image.boot}")
    if len(vm.disks) > MAX_DATA_DISKS:
        raise HypervisorError(f"UML has {MAX_DATA_DISKS} data disks, not {len(vm.disks)}")
    most = abilities(program, system_calls).cpus if _uses_seccomp(vm, system_calls) else 1
    if vm.cpus > most:
        raise HypervisorError(f"{vm.name} needs {vm.cpus} processors, and UML has {most} for it here")
    where = vm.workdir.resolve()
    if len(os.fsencode(where)) > MAX_WORKDIR_BYTES:
        raise HypervisorError(
            f"the path of {where} is longer than the {MAX_WORKDIR_BYTES} bytes of UML's overlays",
            hint="set state_dir to a shorter path",
        )


def allowed_parameters(words: Sequence[str]) -> list[str]:
    """Return the image's kernel parameters that cannot name anything of the node."""
    allowed = [word for word in words if _ALLOWED_PARAMETER.fullmatch(word)]
    for word in set(words) - set(allowed):
        log.info("UML is not given the image's kernel parameter %r", word)
    return allowed


@dataclass(frozen=True)
class DiskLayout:
    """A VM's disks: kernel parameters, and files with their names in the sandbox."""

    devices: tuple[str, ...]
    binds: tuple[bubblewrap.BindMount, ...] = ()


def prepare_disks(vm: VmConfig, *, isolated: bool) -> DiskLayout:
    """Provide the disks in the kernel's working directory.

    Without isolation that is the VM's own, and gets links to them. With isolation it is one of the
    sandbox, which gets the files; the kernel cannot create the overlay there, so it is created here.

    The flag ``d`` means "data": without it UML looks for a copy-on-write header in bytes that a user
    may have written, and would open the file that the header names.
    """
    # c: no locks. A lock on the base would prevent QEMU from using the same image.
    devices = ["ubd0c=overlay,base"]
    overlay = vm.overlay or vm.workdir / "overlay"
    home = bubblewrap.HOME if isolated else vm.workdir.absolute()
    binds = [
        bubblewrap.BindMount(vm.image.root, "base", read_only=True),
        bubblewrap.BindMount(overlay, "overlay"),
    ]
    try:
        update_base(overlay, vm.image.root, home / "base")
        for number, disk in enumerate(vm.disks, start=1):
            binds.append(bubblewrap.BindMount(disk.path, f"disk{number}", disk.read_only))
            devices.append(f"ubd{number}{'dr' if disk.read_only else 'd'}=disk{number}")
        if not isolated:
            _link(vm.workdir, binds)
            return DiskLayout(tuple(devices))
        if not overlay.exists():
            create_overlay(overlay, vm.image.root, home / "base")
    except OSError as error:
        raise HypervisorError(f"cannot lay out {vm.workdir}: {reason_of(error)}") from error
    if (vm.workdir / "initrd").exists():  # only of a probe
        binds.append(bubblewrap.BindMount(vm.workdir / "initrd", "initrd", read_only=True))
    return DiskLayout(tuple(devices), tuple(binds))


def _link(workdir: Path, files: Sequence[bubblewrap.BindMount]) -> None:
    for file in files:
        if workdir / file.name != file.source:
            (workdir / file.name).symlink_to(file.source.absolute())


def _memory_directory(vm: VmConfig) -> Path:
    """Return a directory for the guest's memory file: a tmpfs if it has the space."""
    shared = Path("/dev/shm")  # noqa: S108
    with contextlib.suppress(OSError):
        there = os.statvfs(shared)
        room = there.f_bavail * there.f_frsize >= vm.memory * MIB
        if room and not there.f_flag & os.ST_NOEXEC and os.access(shared, os.W_OK):
            return shared
    return vm.workdir


def network_devices(vm: VmConfig) -> list[str]:
    """Return the parameters of the VM's network cards: its own and its private one."""
    own = [] if vm.network is None else [f"transport=tap,ifname={TAP},gro=1,mac={MAC},mtu={MTU}"]
    if vm.card is not None:
        own += [f"transport=fd,fd={CARD_HANDLE},mac={vm.card.mac},mtu={private_network.MTU}"]
    return [f"vec{number}:{card}" for number, card in enumerate(own)]


def private_network_of(pid: int) -> PrivateNetwork | None:
    """Open a VM's private network; None: it has none. pid: its first process."""
    user, network = (Path(f"/proc/{pid}/fd/{handle}") for handle in _NETWORK_HANDLES)
    try:
        kinds = [str(path.readlink()).partition(":")[0] for path in (user, network)]
        if kinds != ["user", "net"]:
            return None
        return PrivateNetwork(open_namespaces(user, network))
    except OSError:  # the process has ended, or has no such handles
        return None


# --------------------------------------------------------------------------- while it starts


def boot(
    launcher: Launcher,
    vm: VmConfig,
    argv: Sequence[str],
    binds: Sequence[bubblewrap.BindMount],
) -> LaunchedProcess:
    """Start the kernel; return once it is up.

    binds: the files that it gets in a sandbox; none: it runs without one.

    Raises:
        HypervisorError: it cannot be started, or is not up in time; it may still run.
    """
    with ExitStack() as stack:
        ready = stack.enter_context(_notify_socket(vm.workdir))
        console = stack.enter_context(vm.console.open("ab", buffering=0))
        nothing = stack.enter_context(open(os.devnull, "rb"))  # noqa: PTH123
        began = console.seek(0, os.SEEK_END)
        handles = [nothing.fileno(), console.fileno(), console.fileno()]
        if vm.card is not None:
            card_socket = private_network.connect_card(launcher, vm.card)
            handles += [stack.enter_context(card_socket).fileno(), *vm.card.network.namespaces]
        env, cwd = {"PATH": "/usr/bin:/bin", "TMPDIR": str(_memory_directory(vm))}, vm.workdir
        if binds:
            filtered = bubblewrap.open_seccomp_filter()
            stack.callback(os.close, filtered)
            handles.append(filtered)
            argv, cwd = _isolated(vm, argv, binds, len(handles) - 1), Path("/")
        process = launcher.start(argv, handles, env, cwd)
        try:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            _wait_until_up(process.pid, ready, vm.console, began)
        except BaseException:
            process.close()
            raise
        return process


def _isolated(
    vm: VmConfig, argv: Sequence[str], binds: Sequence[bubblewrap.BindMount], filtered: int
) -> list[str]:
    return bubblewrap.command(
        argv,
        binds=[*binds, bubblewrap.BindMount(vm.workdir / "notify", "notify")],
        devices=[] if vm.network is None else [TUN_DEVICE],
        # The kernel's memory is one file of whole pages; its other files are small.
        memory=vm.memory * MIB + MEMORY_OVERHEAD_BYTES,
        bounds=resource_limits_for(vm, HypervisorKind.UML),
        namespaces=vm.network.namespace_files if vm.network else (),
        held=() if vm.card is None else _NETWORK_HANDLES,
        filtered=filtered,
        env={"TMPDIR": "/dev/shm"},  # noqa: S108 - the sandbox's own
    )


@contextmanager
def _notify_socket(workdir: Path) -> Iterator[socket.socket]:
    """Yield a socket on which the kernel reports that its management console is up."""
    path = workdir / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        with mconsole.short_path(path) as address:
            sock.bind(address)
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def _wait_until_up(pid: int, ready: socket.socket, console: Path, began: int) -> None:
    first = procs.read(pid)
    with procs.open_pidfds([first] if first else []) as living:
        happened = procs.readable([ready.fileno(), *living], START_SECONDS if living else 0.0)
    if ready.fileno() in happened:
        return
    why = "ended at once" if happened or not living else f"is not up after {START_SECONDS:g} s"
    words = _console_tail(console, began)
    if words.startswith("bwrap:"):
        raise bubblewrap.sandbox_error(words)
    raise HypervisorError(f"UML {why}: {words}")


def _console_tail(console: Path, began: int) -> str:
    lines = read_tail(console, began).split("\n")
    return "; ".join(line.strip() for line in lines if line.strip())[-500:] or "it printed nothing"
