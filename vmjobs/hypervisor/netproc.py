"""Starting and finding the processes that carry a machine's network (see ``usernet``).

A hostile guest talks to libslirp in there: it is in a sandbox as its machine is. It has the sockets
behind which its job's endpoint and doors are, and in mode ``outbound`` the node's network. Where it has
to hold its machine to a share of the processors, it sees the node's processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import vmjobs
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs, sandbox
from vmjobs.hypervisor.base import (
    ENDPOINT_ADDRESS,
    ENDPOINT_PORT,
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    GUEST_NETMASK_BITS,
    NAMESERVER_ADDRESS,
    Machine,
    Network,
)
from vmjobs.hypervisor.detached import Detached, Launcher
from vmjobs.hypervisor.sandbox import HOME, Bind, Bounds, Shares
from vmjobs.model import MIB, NetworkMode
from vmjobs.subprocess import environment

MODULE = "vmjobs.hypervisor.usernet"

#: Seconds in which a network process must be ready.
READY_SECONDS = 30.0
#: Seconds from one look at a machine to the next, until all of its processes are known.
LOOK_SECONDS = 0.3
#: What it is called where QEMU looks for it, in a directory of its own.
CABLE = "net.sock"
#: Connections are files of its, and packets its memory; it writes no file but what it complains of.
_BOUNDS = Bounds(memory=0, cpus=0, address=4096 * MIB, file=64 * MIB, processes=64)


def wanted(machine: Machine) -> Network | None:
    """The network to make, if any."""
    network = machine.network
    return None if network is None or network.mode is NetworkMode.NONE else network


@dataclass(frozen=True)
class Started:
    """A network process, on its way.

    said: where it says that it is ready. told: where it is told what to regulate; -1: nowhere.
    log: where it says what went wrong. cable: its stream socket, if it is in a sandbox and has one. To
    be closed in the end.
    """

    process: Detached
    said: int
    told: int
    log: Path
    cable: Path | None = None

    def regulate(self, pid: int) -> None:
        """Say which process is the machine's kernel, where it was started to hold one to its share.

        Raises:
            HypervisorError: it is gone.
        """
        if self.told < 0:
            return
        try:
            os.write(self.told, b"%d\n" % pid)
        except OSError as error:
            raise HypervisorError(f"the network process is gone: {error.strerror}") from error

    def ready(self) -> Path:
        """Wait until it carries packets; its stream socket, if it has one.

        Raises:
            HypervisorError: it does not come up, with its own words. It is gone then.
        """
        try:
            told = _wait_ready(self.said, self.log)
            return self.cable or told
        except BaseException:
            self.process.kill()
            raise

    def close(self) -> None:
        """There is nothing more to say or to hear."""
        for handle in (self.said, self.told):
            if handle >= 0:
                os.close(handle)
        self.process.close()


def start(
    launcher: Launcher,
    machine: Machine,
    network: Network,
    *,
    fd: int | None = None,
    mtu: int,
    processors: float | None = None,
    isolated: bool = True,
) -> Started:
    """Start the process. It comes up beside whatever the caller does until it needs it.

    Args:
        launcher: what starts it, so that it lasts as long as its machine.
        fd: one end of a SEQPACKET pair, handed on to the process; without it the process makes a stream
            socket below the machine's directory.
        mtu: bytes in an IP packet.
        processors: that it holds the machine to; :meth:`Started.regulate` says which process that is.
        isolated: whether it is to be in a sandbox.
    """
    log, place = machine.workdir / "usernet.log", machine.workdir.absolute() / "net"
    cable = place / CABLE if fd is None else None
    with log.open("ab") as errors, ExitStack() as undo, ExitStack() as theirs:
        nothing = os.open(os.devnull, os.O_RDONLY)
        theirs.callback(os.close, nothing)
        said, stdout = os.pipe()
        theirs.callback(os.close, stdout)
        undo.callback(os.close, said)
        handles, told = [nothing, stdout, errors.fileno(), *([] if fd is None else [fd])], -1
        if processors is not None:
            orders, told = os.pipe()
            theirs.callback(os.close, orders)
            undo.callback(os.close, told)
            handles.append(orders)
        if cable is not None:
            place.mkdir(exist_ok=True)
            cable.unlink(missing_ok=True)
        bits = machine.limits.network_bits if machine.limits else None
        task = _Task(machine.name, network, mtu, bits, processors, len(handles) - 1, cable)
        env = {"PYTHONPATH": str(Path(vmjobs.__file__).parents[1])}
        if isolated:
            shares = Shares(network.mode is NetworkMode.OUTBOUND, processors is not None)
            filtered = sandbox.filter_file(shares)
            theirs.callback(os.close, filtered)
            handles.append(filtered)
            argv = _isolated(task, shares, len(handles) - 1, env)
        else:
            argv = task.argv()
        process = launcher.start(argv, handles, environment(env), Path("/"))
        undo.pop_all()
    return Started(process, said, told, log, cable if isolated else None)


@dataclass(frozen=True)
class _Task:
    """What a network process is told.

    orders: the handle where it hears which process is to have so many processors. cable: None: that is
    handle 3.
    """

    machine: str
    network: Network
    mtu: int
    bits: int | None
    processors: float | None
    orders: int
    cable: Path | None

    def argv(self) -> list[str]:
        subnet = f"{GATEWAY_ADDRESS.rpartition('.')[0]}.0/{GUEST_NETMASK_BITS}"
        doors = self.network.doors.items()
        return [
            *_program(),
            *("--machine", self.machine),
            *("--mode", self.network.mode.value),
            *("--endpoint", str(self.network.endpoint.absolute())),
            *("--endpoint-address", ENDPOINT_ADDRESS),
            *("--endpoint-port", str(ENDPOINT_PORT)),
            *(word for port, path in doors for word in ("--door", f"{port}:{path.absolute()}")),
            *("--network", subnet),
            *("--gateway", GATEWAY_ADDRESS),
            *("--nameserver", NAMESERVER_ADDRESS),
            *("--guest", GUEST_ADDRESS),
            *("--mtu", str(self.mtu)),
            *(("--bits", str(self.bits)) if self.bits else ()),
            *self._share(),
            *(("--fd", "3") if self.cable is None else ("--listen", str(self.cable))),
        ]

    def _share(self) -> tuple[str, ...]:
        if self.processors is None:
            return ()
        return ("--processors", f"{self.processors:g}", "--orders", str(self.orders))


def _program() -> list[str]:
    """Of a virtual environment its own Python: what is needed is the standard library."""
    return [os.path.realpath(sys.executable), "-S", "-P", "-m", MODULE]


def _isolated(task: _Task, shares: Shares, filtered: int, env: dict[str, str]) -> list[str]:
    """The same in a sandbox, where sockets have other names; directories, as they may be made anew."""
    network, places = task.network, dict[Path, str]()

    def inside(path: Path) -> Path:
        name = places.setdefault(path.parent.absolute(), f"sockets{len(places)}")
        return HOME / name / path.name

    doors = {port: inside(path) for port, path in network.doors.items()}
    network = replace(network, endpoint=inside(network.endpoint), doors=doors)
    cable = HOME / "net" / CABLE if task.cable else None
    binds = [Bind(place, name, read_only=True) for place, name in places.items()]
    if task.cable is not None:
        binds.append(Bind(task.cable.parent, "net"))
    binds += [Bind(path, str(path), read_only=True) for path in _code()]
    return sandbox.command(
        replace(task, network=network, cable=cable).argv(),
        binds=binds,
        bounds=_BOUNDS,
        shares=shares,
        console=False,
        filtered=filtered,
        env=env,
    )


def _code() -> Iterator[Path]:
    """Where its code is, beside ``/usr``."""
    yield Path(vmjobs.__file__).absolute().parent
    prefix = Path(sys.base_prefix).resolve()
    if not prefix.is_relative_to("/usr"):
        yield prefix


class NetworkProcesses:
    """Finds machines' network processes. All processes are searched but once."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}

    def note(self, name: str, pid: int) -> None:
        """It is that one."""
        self._pids[name] = pid

    def of(self, name: str) -> procs.Process | None:
        """The network process of a machine; None: it has ended. Raises as :func:`procs.scan`."""
        if name in self._pids:
            known = procs.read(self._pids[name])
            return known if known is not None and machine_of(known) == name else None
        for process in leading(name):
            self.note(name, process.pid)
            return process
        return None

    def forget(self, name: str) -> None:
        """The machine is gone."""
        self._pids.pop(name, None)


def leading(name: str) -> list[procs.Process]:
    """The network processes of a machine; of those in a sandbox its first."""
    found = [process for process in procs.scan() if machine_of(process) == name]
    return [process for process in found if sandbox.leads(process)] or found


def find(name: str, among: Iterable[procs.Process] | None = None) -> list[procs.Process]:
    """All of them. among: all processes, where somebody has just looked."""
    found = [one for one in (procs.scan() if among is None else among) if machine_of(one) == name]
    known = {process.pid for process in found}
    return [*found, *(process for process in sandbox.within(found) if process.pid not in known)]


def regulating(name: str) -> list[procs.Process]:
    """Those of them that hold the machine to a share of the processors."""
    return [process for process in find(name) if regulates(process)]


def regulates(process: procs.Process) -> bool:
    """Whether a process holds its machine to a share of the processors."""
    return "--processors" in process.argv and process.argv[1:2] == ("-S",)


def machine_of(process: procs.Process) -> str:
    """Whose network the process carries; ``""`` if it is no network process."""
    argv = process.argv
    if MODULE not in argv or "--machine" not in argv[:-1]:
        return ""
    return argv[argv.index("--machine") + 1]


def _wait_ready(output: int, log: Path) -> Path:
    said = os.read(output, 4096) if procs.readable([output], READY_SECONDS) else b""
    if said.startswith(b"ready"):
        return Path(os.fsdecode(said.removeprefix(b"ready").strip()))
    words = ""
    with contextlib.suppress(OSError):
        words = log.read_text("utf-8", "replace").strip()[-1000:]
    raise HypervisorError(f"the network process does not come up: {words or 'it said nothing'}")
