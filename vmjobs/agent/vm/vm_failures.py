"""Why VMs fail: pure functions from an error, or from how a VM ended, to reason code and message."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from vmjobs.agent.vm.events import GuestSilent, KernelPanicked, RunEvent
from vmjobs.errors import (
    DISK_FULL_ERRNOS,
    DigestMismatch,
    HypervisorError,
    ImageRejected,
    NoHypervisor,
    NotFound,
    Unauthenticated,
    Unavailable,
    VMJobsError,
    reason_of,
)
from vmjobs.hypervisor.base import ShutdownCause
from vmjobs.model import CONSOLE_RULE, POWEROFF, REPORT, ReasonCode

#: Panic message of an x86 kernel that gets no timer interrupt (arch/x86/kernel/apic/io_apic.c).
NO_TIMER_PANIC = "IO-APIC + timer doesn't work"


@dataclass(frozen=True)
class VmFailure:
    """Why a VM failed. node_at_fault: the node is at fault, and would fail any other VM, too."""

    code: ReasonCode
    message: str
    node_at_fault: bool = False


# --------------------------------------------------------------------------- errors

#: Error numbers that mean a faulty node: full or bad disk, no memory, no rights. (EMFILE is not among
#: them: any user who can connect to the agent can make it run out of file descriptors.)
_NODE_FAULT_ERRNOS = DISK_FULL_ERRNOS | {errno.EIO, errno.EROFS, errno.ENOMEM, errno.EACCES}


def is_node_fault(error: BaseException | None) -> bool:
    """Whether an error or one of its causes shows a faulty node."""
    return has_errno(error, _NODE_FAULT_ERRNOS)


def has_errno(error: BaseException | None, numbers: frozenset[int]) -> bool:
    """Whether an error or one of its causes is an ``OSError`` with one of these error numbers."""
    if error is None:
        return False
    told = isinstance(error, OSError) and error.errno in numbers
    return told or has_errno(error.__cause__, numbers)


def node_failure(error: Exception) -> VmFailure:
    at_fault = isinstance(error, OSError) and is_node_fault(error)
    return VmFailure(ReasonCode.NODE_FAILED, f"the node failed: {reason_of(error)}", at_fault)


def hypervisor_failure(error: HypervisorError) -> VmFailure:
    """Return the failure for a VM that could not be started."""
    if isinstance(error, NoHypervisor):
        return VmFailure(ReasonCode.NO_HYPERVISOR, error.message)
    full = has_errno(error, DISK_FULL_ERRNOS)
    return VmFailure(ReasonCode.NODE_FAILED if full else ReasonCode.BOOT_FAILED, error.message, full)


def image_failure(error: Exception) -> VmFailure:
    """Return the failure for an image, or a part of it, that could not be fetched."""
    if not isinstance(error, VMJobsError):
        return node_failure(error)
    if isinstance(error, DigestMismatch | ImageRejected):
        return VmFailure(ReasonCode.IMAGE_REJECTED, error.message)
    if isinstance(error, NotFound | Unavailable):
        return VmFailure(ReasonCode.IMAGE_UNAVAILABLE, error.message)
    # The node fetches images with its own token.
    return VmFailure(ReasonCode.NODE_FAILED, error.message, isinstance(error, Unauthenticated))


# --------------------------------------------------------------------------- a VM that ran


def guest_failure(seen: RunEvent | None) -> VmFailure | None:
    """Return the failure that an event shows, if it shows that the guest has failed."""
    if isinstance(seen, KernelPanicked):
        return _panic(seen.cause)
    if isinstance(seen, GuestSilent):
        message = f"the guest sent no heartbeat for {seen.seconds:.0f} s"
        return VmFailure(ReasonCode.GUEST_LOST, message)
    return None


def _panic(cause: str | None) -> VmFailure:
    """Return the failure for a kernel panic, from the panic message.

    A kernel that misses its timer waited too long for a processor of the node: a transient condition,
    and not the image's fault.
    """
    if cause is not None and cause.startswith(NO_TIMER_PANIC):
        message = f"the node was too busy for the guest's kernel to boot: {cause}"
        return VmFailure(ReasonCode.GUEST_LOST, message)
    message = f"the guest's kernel panicked: {cause or 'no cause given'}"
    return VmFailure(ReasonCode.KERNEL_PANIC, message)


def early_end(
    *,
    panic: str | None,
    ready: bool,
    rule: str = REPORT,
    shutdown_cause: ShutdownCause = ShutdownCause.UNKNOWN,
) -> VmFailure:
    """Return the failure of a VM that ended without a report and without meeting its rule.

    panic: the kernel's panic message on the console, if any. rule: the job's ``exit``.
    """
    if panic is not None or shutdown_cause is ShutdownCause.PANICKED:
        return _panic(panic)
    if shutdown_cause in _LOST_MESSAGES:
        return VmFailure(ReasonCode.GUEST_LOST, _LOST_MESSAGES[shutdown_cause])
    if rule == POWEROFF:
        return _no_power_off(shutdown_cause)
    did = _ENDING_VERBS.get(shutdown_cause, "ended")
    if rule != REPORT:
        wanted = rule.removeprefix(CONSOLE_RULE)
        message = f"the VM {did} before its console had shown a line that matches /{wanted}/"
        return VmFailure(ReasonCode.NO_EXIT_REPORT, message)
    if not ready:
        return VmFailure(ReasonCode.BOOT_FAILED, f"the VM {did} before the guest was ready")
    did = _ENDING_VERBS.get(shutdown_cause, "powered off")
    return VmFailure(ReasonCode.NO_EXIT_REPORT, f"the guest {did} without reporting an exit status")


def _no_power_off(shutdown_cause: ShutdownCause) -> VmFailure:
    if shutdown_cause is ShutdownCause.RESET:
        message = "the guest restarted its VM instead of powering off"
        return VmFailure(ReasonCode.NO_EXIT_REPORT, message)
    message = "the VM is gone, and it is unknown whether it powered off"
    return VmFailure(ReasonCode.GUEST_LOST, message)


_ENDING_VERBS = {ShutdownCause.POWEROFF: "powered off", ShutdownCause.RESET: "restarted"}
_LOST_MESSAGES = {
    ShutdownCause.KILLED: "the VM was killed from outside",
    ShutdownCause.CRASHED: "the VM crashed: its hypervisor ended with an error",
}
