"""Starting and finding the processes that carry a machine's network (see ``usernet``)."""

from __future__ import annotations

import contextlib
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import vmjobs
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
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
from vmjobs.model import NetworkMode
from vmjobs.subprocess import environment

MODULE = "vmjobs.hypervisor.usernet"

#: Seconds in which a network process must be ready.
READY_SECONDS = 30.0


def wanted(machine: Machine) -> Network | None:
    """The network to make, if any."""
    network = machine.network
    return None if network is None or network.mode is NetworkMode.NONE else network


@dataclass(frozen=True)
class Started:
    """A network process, on its way.

    said: where it says that it is ready. told: where it is told what to regulate; -1: nowhere.
    log: where it says what went wrong. To be closed in the end.
    """

    process: Detached
    said: int
    told: int
    log: Path

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
            return _wait_ready(self.said, self.log)
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
    listen: Path | None = None,
    mtu: int,
    processors: float | None = None,
) -> Started:
    """Start the process. It comes up beside whatever the caller does until it needs it.

    Args:
        launcher: what starts it, so that it lasts as long as its machine.
        fd: one end of a SEQPACKET pair, handed on to the process; or
        listen: where it makes a stream socket.
        mtu: bytes in an IP packet.
        processors: that it holds the machine to; :meth:`Started.regulate` says which process that is.
    """
    argv = [sys.executable, "-S", "-P", "-m", MODULE, *_arguments(machine, network, mtu)]
    if processors is not None:
        argv += ["--processors", f"{processors:g}"]
    argv += ["--fd", "3"] if fd is not None else ["--listen", str(listen)]
    log = machine.workdir / "usernet.log"
    with log.open("ab") as errors, ExitStack() as undo, ExitStack() as theirs:
        stdin, told = os.pipe() if processors is not None else (os.open(os.devnull, os.O_RDONLY), -1)
        theirs.callback(os.close, stdin)
        said, stdout = os.pipe()
        theirs.callback(os.close, stdout)
        for handle in (said, told):
            if handle >= 0:
                undo.callback(os.close, handle)
        handles = [stdin, stdout, errors.fileno(), *([] if fd is None else [fd])]
        env = environment({"PYTHONPATH": str(Path(vmjobs.__file__).parents[1])})
        process = launcher.start(argv, handles, env, Path())
        undo.pop_all()
    return Started(process, said, told, log)


def find(name: str) -> list[procs.Process]:
    """The network processes of a machine."""
    return [process for process in procs.scan() if machine_of(process) == name]


def regulating(name: str) -> list[procs.Process]:
    """Those of them that hold the machine to a share of the processors."""
    return [process for process in find(name) if regulates(process)]


def regulates(process: procs.Process) -> bool:
    """Whether a network process holds its machine to a share of the processors."""
    return "--processors" in process.argv


def machine_of(process: procs.Process) -> str:
    """Whose network the process carries; ``""`` if it is no network process."""
    argv = process.argv
    if MODULE not in argv or "--machine" not in argv[:-1]:
        return ""
    return argv[argv.index("--machine") + 1]


def _arguments(machine: Machine, network: Network, mtu: int) -> list[str]:
    bits = machine.limits.network_bits if machine.limits else None
    subnet = f"{GATEWAY_ADDRESS.rpartition('.')[0]}.0/{GUEST_NETMASK_BITS}"
    return [
        *("--machine", machine.name),
        *("--mode", network.mode.value),
        *("--endpoint", str(network.endpoint)),
        *("--endpoint-address", ENDPOINT_ADDRESS),
        *("--endpoint-port", str(ENDPOINT_PORT)),
        *(word for port, path in network.doors.items() for word in ("--door", f"{port}:{path}")),
        *("--network", subnet),
        *("--gateway", GATEWAY_ADDRESS),
        *("--nameserver", NAMESERVER_ADDRESS),
        *("--guest", GUEST_ADDRESS),
        *("--mtu", str(mtu)),
        *(("--bits", str(bits)) if bits else ()),
    ]


def _wait_ready(output: int, log: Path) -> Path:
    said = os.read(output, 4096) if procs.readable([output], READY_SECONDS) else b""
    if said.startswith(b"ready"):
        return Path(os.fsdecode(said.removeprefix(b"ready").strip()))
    words = ""
    with contextlib.suppress(OSError):
        words = log.read_text("utf-8", "replace").strip()[-1000:]
    raise HypervisorError(f"the network process does not come up: {words or 'it said nothing'}")
