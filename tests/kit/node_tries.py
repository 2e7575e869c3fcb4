"""Runs on a node as some user: tries every way to access a VM, and reports how each ended.

One JSON object on standard input: the VM's processes, files, sockets, its job, its libvirt. One on
standard output: for each try ``ok``, or the error.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PTRACE_SEIZE = 0x4206
LIBC = ctypes.CDLL(None, use_errno=True)


def call(answer: int) -> None:
    """Raise OSError if a function of the C library returned an error."""
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def opened(path: str) -> None:
    with Path(path).open("rb") as file:
        file.read(1)


def listed(path: str) -> None:
    list(Path(path).iterdir())


def connected(path: str) -> None:
    """Try to connect to a socket; a refusal counts as success, as only permissions matter."""
    where = Path(path)
    place = f"/proc/self/fd/{os.open(where.parent, os.O_PATH)}/{where.name}"
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as peer:
            try:
                peer.connect(place)
                return
            except ConnectionRefusedError:
                return
            except OSError as error:
                if error.strerror != "Protocol wrong type for socket":
                    raise


def mapped(pid: int) -> int:
    """Start address of the first readable mapping of a process."""
    with Path(f"/proc/{pid}/maps").open() as maps:
        return next(int(line.split("-")[0], 16) for line in maps if line.split()[1][0] == "r")


def memory(pid: int) -> None:
    """Try to read the memory of a process through its ``mem`` file."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as file:
        os.lseek(file.fileno(), mapped(pid), os.SEEK_SET)
        file.read(16)


def virsh(uri: str, name: str) -> None:
    """Check that libvirt lists a domain."""
    command = ["virsh", "-c", uri, "list", "--all", "--name"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise PermissionError(0, done.stderr.strip())
    if name not in done.stdout.split():
        raise PermissionError(0, "not listed")


def of_process(pid: int) -> dict[str, Callable[[], object]]:
    """Tries at one process of a VM.

    The kernel grants process_vm_readv(2) and pidfd_getfd(2) where it grants ``mem`` and ``ptrace``.
    """
    return {
        "environ": lambda: opened(f"/proc/{pid}/environ"),
        "maps": lambda: mapped(pid),
        "mem": lambda: memory(pid),
        "fd": lambda: listed(f"/proc/{pid}/fd"),
        "map_files": lambda: listed(f"/proc/{pid}/map_files"),
        "root": lambda: listed(f"/proc/{pid}/root/"),
        "cwd": lambda: listed(f"/proc/{pid}/cwd/"),
        "exe": lambda: Path(f"/proc/{pid}/exe").readlink(),
        "kill": lambda: os.kill(pid, 0),  # the kernel requires the same rights as for any signal
        "ptrace": lambda: call(LIBC.ptrace(PTRACE_SEIZE, pid, 0, 0)),
        "affinity": lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid)),
        "limits": lambda: resource.prlimit(pid, resource.RLIMIT_CORE),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)),
    }


def main() -> None:
    wish: dict[str, Any] = json.load(sys.stdin)
    tries: dict[str, Callable[[], object]] = {}
    for pid in wish.get("pids", ()):
        tries |= {f"process {pid} {name}": act for name, act in of_process(pid).items()}
    for path in wish["folders"]:
        tries[f"folder {path}"] = partial(listed, path)
    for path in wish["files"]:
        tries[f"file {path}"] = partial(opened, path)
    for path in wish.get("sockets", ()):
        tries[f"socket {path}"] = partial(connected, path)
    for uri in wish.get("libvirt", ()):
        tries[f"libvirt {uri}"] = partial(virsh, uri, wish["domain"])
    said = {}
    for name, act in tries.items():
        try:
            act()
            said[name] = "ok"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    json.dump(said, sys.stdout)


main()
