#!/usr/bin/python3
"""A UML kernel or QEMU that a guest has taken over: it tries forbidden actions.

The kernel's command line lists what to try (``tries=``: JSON in base64). This program prints the result
of each try as a line of JSON on the console, and then ends, or does what ``then=`` says. When libvirt
asks for its capabilities, it runs QEMU itself. It uses only Python's own modules.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
#: Numbers of x86-64 system calls that C libraries do not wrap.
CALLS = {
    "bpf": 321,
    "io_uring_setup": 425,
    "keyctl": 250,
    "open_by_handle_at": 304,
    "perf_event_open": 298,
}
CLONE_NEWUSER, CLONE_NEWNS, MS_BIND, PTRACE_SEIZE, IPC_CREAT = 0x10000000, 0x20000, 4096, 0x4206, 0o1000


def checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def read(path: str) -> str:
    with Path(path).open("rb") as file:
        return repr(file.read(16))


def write(path: str) -> str:
    with Path(path).open("ab") as file:
        file.write(b"broken")
    return "written"


def create(path: str) -> str:
    with Path(path).open("xb"):
        return "created"


def listing(path: str) -> str:
    return ",".join(sorted(one.name for one in Path(path).iterdir())[:8]) or "empty"


def connect(path: str) -> str:
    """Connect to a Unix socket; a leading @ marks an abstract name."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect("\0" + path[1:] if path.startswith("@") else path)
        return "connected"


def tcp(address: str) -> str:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5):
        return "connected"


def family(number: str) -> str:
    with socket.socket(
        int(number), socket.SOCK_RAW if int(number) == socket.AF_NETLINK else socket.SOCK_STREAM
    ):
        return "made"


def processes(pid: str) -> str:
    if not any(one.name == pid for one in Path("/proc").iterdir()):
        raise OSError(errno.ESRCH, "not seen")
    return "seen"


def kill(pid: str) -> str:
    os.kill(int(pid), 0)
    return "may be killed"


def trace(pid: str) -> str:
    checked(LIBC.ptrace(PTRACE_SEIZE, int(pid), 0, 0))
    return "traced"


def capability(_: str) -> str:
    header, data = struct.pack("=II", 0x20080522, 0), ctypes.create_string_buffer(24)
    checked(LIBC.capget(header, data))
    effective, permitted, inheritable = struct.unpack("=III", data.raw[:12])
    if not effective | permitted | inheritable:
        raise OSError(errno.EPERM, "none")
    return f"{effective:x} {permitted:x} {inheritable:x}"


def gain(_: str) -> str:
    """Whether a program may give it additional rights: PR_GET_NO_NEW_PRIVS."""
    if LIBC.prctl(39, 0, 0, 0, 0) == 1:
        raise OSError(errno.EPERM, "none")
    return "by a setuid program"


def in_child(action: Callable[[], int]) -> str:
    """Try an action in a child, so that success changes nothing in this process."""
    child = os.fork()
    if child == 0:
        os._exit(0 if action() >= 0 else ctypes.get_errno() or 255)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number:
        raise OSError(number, os.strerror(number))
    return "done"


def mount(_: str) -> str:
    def action() -> int:
        if LIBC.unshare(CLONE_NEWNS):  # mounts must vanish with the child
            return -1
        return int(LIBC.mount(b"/usr", b"/usr", None, MS_BIND, None))

    return in_child(action)


def userns(_: str) -> str:
    return in_child(lambda: int(LIBC.unshare(CLONE_NEWUSER)))


def clone(_: str) -> str:
    pid = checked(LIBC.syscall(56, CLONE_NEWUSER | 17, 0, 0, 0, 0))
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "done"


def call(name: str) -> str:
    """Whether the kernel handles such a call at all, given nonsense arguments."""
    ctypes.set_errno(0)
    found = LIBC.syscall(CALLS[name], -1, 0, 0, 0, 0)
    if found < 0 and ctypes.get_errno() == errno.EPERM:
        raise OSError(errno.EPERM, "refused")
    return f"answered: {found}, {errno.errorcode.get(ctypes.get_errno())}"


def setns(_: str) -> str:
    ctypes.set_errno(0)
    if LIBC.setns(-1, 0) < 0 and ctypes.get_errno() == errno.EPERM:
        raise OSError(errno.EPERM, "refused")
    return "answered"


def shm(key: str) -> str:
    """Whether it sees System V shared memory of another process."""
    checked(LIBC.shmget(int(key), 0, 0))
    return "found"


def addresses(size: str) -> str:
    """Whether it gets this many bytes of address space."""
    with mmap.mmap(-1, int(size), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ):
        return "mapped"


def grow(told: str) -> str:
    """Whether its own file may grow to this size."""
    path, _, size = told.rpartition(":")
    os.truncate(path, int(size))
    return "grown"


def environment(name: str) -> str:
    return os.environ[name]


def handles(_: str) -> str:
    """Whether it has file descriptors other than standard input, output and error."""
    found = []
    for number in range(3, 256):
        try:
            found.append(f"{number}:{os.fstat(number).st_mode:o}")
        except OSError:
            continue
    if not found:
        raise OSError(errno.EBADF, "none")
    return ",".join(found)


def tap(name: str) -> int:
    """Open a tap device; returns its file descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    flags = 0x2 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
    try:
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", name.encode(), flags))  # TUNSETIFF
    except OSError:
        os.close(device)
        raise
    return device


def answers(address: str) -> str:
    """Whether an address answers an echo request within a minute."""
    return ping(address, 60.0)


def ping(told: str, seconds: float = 1.0) -> str:
    """Whether an address answers an echo request in a frame built here. told: target, source."""
    target, _, source = told.partition(" from ")
    ends = socket.inet_aton(source or "10.0.2.15"), socket.inet_aton(target)
    echo = summed(struct.pack("!BBHHH", 8, 0, 0, 1, 1) + b"hello", 2)
    packet = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(echo), 1, 0, 64, 1, 0, *ends)
    gateway, card = bytes.fromhex("52550a000202"), bytes.fromhex("525400123456")
    arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + card + ends[0] + gateway + ends[1]
    device = tap("tap0")
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            os.write(device, bytes(10) + gateway + card + b"\x08\x00" + summed(packet, 10) + echo)
            while select.select([device], [], [], 0.3)[0]:
                frame = os.read(device, 65536)[10:]
                if frame[12:14] == b"\x08\x06":  # an ARP request for our address
                    os.write(device, bytes(10) + frame[6:12] + card + b"\x08\x06" + arp)
                elif frame[12:14] == b"\x08\x00" and frame[23] == 1 and frame[34] == 0:
                    return "answered"
    finally:
        os.close(device)
    raise TimeoutError("no answer")


def summed(data: bytes, at: int) -> bytes:
    """Insert the Internet checksum (RFC 1071) at an offset."""
    padded = data + bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    return data[:at] + struct.pack("!H", ~total & 0xFFFF) + data[at + 2 :]


def attempt(what: str, argument: str) -> tuple[bool, str]:
    try:
        return True, str(globals()[what](argument))
    except (OSError, KeyError) as error:
        return False, f"{type(error).__name__}: {error}"


def say(words: str) -> None:
    os.write(1, f"{words}\n".encode())


def parameters(argv: list[str]) -> list[str]:
    """The kernel's command line."""
    return argv[argv.index("-append") + 1].split() if "-append" in argv else argv


def begin(argv: list[str]) -> None:
    """Report being up, as the driver expects; output then goes to the console."""
    if "-append" in argv:
        console = next(word for word in argv if word.startswith("file,id=console0,"))
        path = console.partition("path=")[2].partition(",")[0]
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 1)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as up:
        up.sendto(b"up", "notify")


def main() -> None:
    """Try everything, then do what ``then`` says."""
    words = dict(word.partition("=")[::2] for word in parameters(sys.argv[1:]))
    if "tries" not in words:
        os.execv("/usr/bin/qemu-system-x86_64", sys.argv)  # noqa: S606
    begin(sys.argv[1:])
    for name, (what, argument) in json.loads(base64.b64decode(words["tries"])).items():
        done, told = attempt(what, argument)
        say(json.dumps({"try": name, "done": done, "told": told}))
    if words["then"] == "heed":

        def heed(*_: object) -> None:
            say("told to end")
            os._exit(0)

        signal.signal(signal.SIGTERM, heed)
    say("tried all")
    if words["then"] == "hide":  # with an orphaned descendant
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        os._exit(0)
    if words["then"] == "pose":  # as another VM
        command = ["linux.uml", "-c", "import time; time.sleep(600)", f"umid={words['as']}"]
        os.execv("/usr/bin/python3", command)  # noqa: S606
    if words["then"] in {"stay", "heed"}:
        time.sleep(600)


if __name__ == "__main__":
    main()
