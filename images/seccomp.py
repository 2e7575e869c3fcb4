"""A seccomp filter for programs that read hostile files, as the kernel takes it: classic BPF.

It forbids what such a program never needs and an exploit wants: sockets, other processes, new
namespaces, mounts, tracing, kernel interfaces with a history of holes. Threads are allowed. Numbers
of system calls: ``asm/unistd_64.h`` (x86-64) and ``asm-generic/unistd.h`` (AArch64); the layout of
``struct seccomp_data``: ``linux/seccomp.h``.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import Final

from vmjobs.errors import Unavailable

_AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

#: Answered with EPERM, by (x86-64, AArch64) number; None: there is no such call.
_FORBIDDEN: Final = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "socketpair": (53, 199),
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount": (165, 40),
    "umount2": (166, 39),
    "init_module": (175, 105),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "finit_module": (313, 273),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "pidfd_getfd": (438, 438),
}
_CLONE: Final = (56, 220)
#: Answered with ENOSYS, so that the C library falls back to clone, whose flags can be read.
_CLONE3: Final = (435, 435)
_CLONE_THREAD: Final = 0x0001_0000
#: x86-64 only: numbers from here on are another ABI's (x32), which would slip by.
_X32: Final = 0x4000_0000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARG0_AT = 0, 4, 16
_ALLOW: Final = 0x7FFF_0000
_KILL: Final = 0x8000_0000
_ERROR: Final = 0x0005_0000


def program(machine: str | None = None) -> bytes:
    """The filter for this machine.

    Raises:
        Unavailable: there is none for its architecture.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise Unavailable("sandbox", f"there is no sandbox for {machine} machines")
    column = list(_AUDIT_ARCH).index(machine)
    lines = [
        _line(_LOAD, _ARCH_AT),
        _line(_EQUAL, _AUDIT_ARCH[machine], yes=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        lines += [_line(_AT_LEAST, _X32, no=1), _line(_RETURN, _KILL)]
    for numbers in _FORBIDDEN.values():
        if (number := numbers[column]) is not None:
            lines += [_line(_EQUAL, number, no=1), _line(_RETURN, _ERROR | errno.EPERM)]
    lines += [_line(_EQUAL, _CLONE3[column], no=1), _line(_RETURN, _ERROR | errno.ENOSYS)]
    lines += [
        _line(_EQUAL, _CLONE[column], no=3),
        _line(_LOAD, _ARG0_AT),
        _line(_ANY_BIT, _CLONE_THREAD, yes=1),
        _line(_RETURN, _ERROR | errno.EPERM),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _line(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; yes, no: how many to skip where a comparison holds, or does not."""
    return struct.pack("=HBBI", code, yes, no, value)
