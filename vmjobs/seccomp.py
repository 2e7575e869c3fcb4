"""Seccomp filters in classic BPF that forbid some system calls and allow the rest.

Numbers of system calls: ``asm/unistd_64.h`` (x86-64) and ``asm-generic/unistd.h`` (AArch64); the layout
of ``struct seccomp_data``: ``linux/seccomp.h``; flags of clone: ``linux/sched.h``.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Iterable
from typing import Final

from vmjobs.errors import Unavailable

#: ``CLONE_THREAD``: without it clone makes a process.
CLONE_THREAD: Final = 0x0001_0000
#: All ``CLONE_NEW…`` flags of clone: mnt, cgroup, uts, ipc, user, pid and net.
CLONE_NEW: Final = 0x7E02_0000

_AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

#: (x86-64, AArch64) numbers; None: the architecture lacks the call.
_NUMBERS: Final = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bind": (49, 200),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clone": (56, 220),
    "clone3": (435, 435),
    "connect": (42, 203),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fork": (57, None),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vfork": (58, None),
}
#: x86-64 only: numbers from here on belong to another ABI (x32) and would bypass the filter.
_X32: Final = 0x4000_0000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARG0_AT = 0, 4, 16
_ALLOW: Final = 0x7FFF_0000
_KILL: Final = 0x8000_0000
_ERROR: Final = 0x0005_0000


def build_filter(
    calls: Iterable[str],
    *,
    clone_with: int = 0,
    clone_without: int = 0,
    families: Iterable[int] | None = None,
    machine: str | None = None,
) -> bytes:
    """Build a filter that fails ``calls`` with EPERM, and kills users of a foreign ABI.

    Args:
        clone_with: forbidden flags of clone.
        clone_without: flags of clone at least one of which is required; 0: none.
        families: address families of allowed sockets; None: all.
        machine: architecture as ``uname`` names it; None: the host's.

    clone3 fails with ENOSYS, because no filter can read its flags; the C library then uses clone.

    Raises:
        Unavailable: there is no filter for the architecture.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise Unavailable("sandbox", f"the sandbox does not support {machine}")
    column = list(_AUDIT_ARCH).index(machine)
    program = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_EQUAL, _AUDIT_ARCH[machine], yes=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        program += [_instruction(_AT_LEAST, _X32, no=1), _instruction(_RETURN, _KILL)]
    for call in calls:
        if (number := _NUMBERS[call][column]) is not None:
            program += _if_equal(number, [_instruction(_RETURN, _ERROR | errno.EPERM)])
    program += _if_equal(_number("clone3", column), [_instruction(_RETURN, _ERROR | errno.ENOSYS)])
    if families is not None:
        body = [_instruction(_LOAD, _ARG0_AT)]
        for family in families:
            body += _if_equal(family, [_instruction(_RETURN, _ALLOW)])
        body.append(_instruction(_RETURN, _ERROR | errno.EPERM))
        program += _if_equal(_number("socket", column), body)
    program += _if_equal(_number("clone", column), _clone_rules(clone_with, clone_without))
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def open_filter(rules: bytes) -> int:
    """Open a file with a filter, for bubblewrap's ``--seccomp``; the caller closes it."""
    handle = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    os.write(handle, rules)
    os.lseek(handle, 0, os.SEEK_SET)
    return handle


def _clone_rules(forbidden: int, required: int) -> list[bytes]:
    program = [_instruction(_LOAD, _ARG0_AT)]
    if forbidden:
        program += [
            _instruction(_ANY_BIT, forbidden, no=1),
            _instruction(_RETURN, _ERROR | errno.EPERM),
        ]
    if required:
        program += [
            _instruction(_ANY_BIT, required, yes=1),
            _instruction(_RETURN, _ERROR | errno.EPERM),
        ]
    return [*program, _instruction(_RETURN, _ALLOW)]


def _number(call: str, column: int) -> int:
    number = _NUMBERS[call][column]
    if number is None:
        raise ValueError(call)
    return number


def _if_equal(number: int, body: list[bytes]) -> list[bytes]:
    """Execute ``body``, which must return, if the loaded word is ``number``."""
    return [_instruction(_EQUAL, number, no=len(body)), *body]


def _instruction(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; yes, no: instructions to skip if a comparison holds, or fails."""
    return struct.pack("=HBBI", code, yes, no, value)
