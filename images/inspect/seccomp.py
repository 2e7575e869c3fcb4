"""The seccomp filter for programs that read hostile files (:mod:`vmjobs.seccomp`).

It forbids system calls that such a program never needs and an exploit wants: sockets, other
processes, new namespaces, mounts, tracing, kernel interfaces with a history of vulnerabilities.
Threads are allowed.
"""

from __future__ import annotations

from typing import Final

from vmjobs import seccomp

_FORBIDDEN: Final = (
    *("socket", "connect", "bind", "socketpair", "fork", "vfork", "ptrace", "personality"),
    *("pivot_root", "chroot", "mount", "umount2", "init_module", "add_key", "request_key", "keyctl"),
    *("unshare", "perf_event_open", "open_by_handle_at", "setns", "process_vm_readv"),
    *("process_vm_writev", "finit_module", "kexec_file_load", "bpf", "userfaultfd", "io_uring_setup"),
    *("open_tree", "move_mount", "fsopen", "pidfd_getfd"),
)


def program(machine: str | None = None) -> bytes:
    """The filter for an architecture, by default this host's.

    Raises:
        Unavailable: there is no filter for the architecture.
    """
    return seccomp.build_filter(_FORBIDDEN, clone_without=seccomp.CLONE_THREAD, machine=machine)
