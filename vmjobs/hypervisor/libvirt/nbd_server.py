"""Starts and finds the NBD servers of root disks that are not complete on this node.

One nbdkit for each VM, with :mod:`.nbd_plugin`; it ends with the VM, and with the
process that fetches the disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import LazyDisk
from vmjobs.hypervisor.libvirt import nbd_plugin
from vmjobs.hypervisor.shutdown_causes import read_tail
from vmjobs.subprocess import environment, run

PROGRAM = "nbdkit"
PLUGIN = nbd_plugin.__file__

#: Seconds in which a server must be ready.
READY_SECONDS = 30.0
#: Reads of one VM that may wait for their chunks at once.
THREADS = 4


def unavailable_reason() -> str:
    """Return why this node cannot serve disks; empty if it can."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed"
    try:
        run([PROGRAM, "--dump-plugin", "python"], timeout=30, error=HypervisorError)
    except HypervisorError as error:
        return f"{PROGRAM} has no plugin for Python: {error.message}"
    return ""


def start(name: str, disk: LazyDisk, workdir: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Serve a VM's root disk; return the process and its NBD socket.

    Raises:
        HypervisorError: the server did not become ready, with its output. It is gone then.
    """
    listen = workdir.absolute() / "nbd.sock"
    inner, outer = os.pipe()  # nbdkit closes its standard output
    argv = [
        *(PROGRAM, "--foreground", "--readonly", "--newstyle"),
        *("--threads", str(THREADS), "--unix", str(listen)),
        *("python", PLUGIN, f"ask={disk.socket}", f"ready={outer}", f"machine={name}"),
    ]
    log = workdir / "nbdkit.log"
    with os.fdopen(inner, "rb", buffering=0) as ready:
        try:
            with log.open("ab") as said:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env=environment(),
                    pass_fds=(outer,),
                    start_new_session=True,
                )
        except OSError as error:
            raise HypervisorError(f"{PROGRAM} cannot be started: {error.strerror}") from error
        finally:
            os.close(outer)
        try:
            _wait_ready(ready.fileno(), log)
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process, listen


def find(name: str, among: Iterable[procs.Process] | None = None) -> list[procs.Process]:
    """Return the servers of a VM. among: all processes; None: scan them now."""
    return [one for one in (procs.scan() if among is None else among) if vm_of(one) == name]


def vm_of(process: procs.Process) -> str:
    """The name of the VM whose disk the process serves; ``""`` if it serves none."""
    if PLUGIN not in process.argv:
        return ""
    found = [word.removeprefix("machine=") for word in process.argv if word.startswith("machine=")]
    return found[-1] if found else ""


def _wait_ready(ready: int, log: Path) -> None:
    if procs.readable([ready], READY_SECONDS) and os.read(ready, 64).startswith(b"ready"):
        return
    words = read_tail(log).strip()[-1000:] or "it printed nothing"
    raise HypervisorError(f"{PROGRAM} did not start: {words}")
