"""Why a cluster VM ends, in the codes that the service knows."""

from __future__ import annotations

from dataclasses import dataclass

from vmjobs.agent.vm.vm_failures import VmFailure, hypervisor_failure, image_failure
from vmjobs.cluster.vm_state import ClusterVmCode
from vmjobs.errors import HypervisorError, VMJobsError
from vmjobs.model import ExitStatus, ReasonCode


class VmUnwanted(VMJobsError):
    """The VM's end was requested before it was started."""


@dataclass(frozen=True)
class VmEnd:
    code: ClusterVmCode
    message: str


def end_by_failure(failure: VmFailure) -> VmEnd:
    # Both enumerations have the code of a failure, except of a script's end without exit status.
    ended = failure.code is ReasonCode.NO_EXIT_REPORT
    code = ClusterVmCode.GUEST_ENDED if ended else ClusterVmCode(failure.code)
    return VmEnd(code, failure.message)


def end_by_exit(exit: ExitStatus) -> VmEnd:
    if exit.signal is not None:
        how = f"was killed by signal {exit.signal}"
    else:
        how = f"ended with status {exit.code}"
    return VmEnd(ClusterVmCode.GUEST_ENDED, f"the guest's script {how}")


def end_by_error(error: Exception) -> VmEnd:
    """Return why a VM ends after an error of staging or booting."""
    if isinstance(error, VmUnwanted):
        return VmEnd(ClusterVmCode.STOPPED, error.message)
    if isinstance(error, HypervisorError):
        return end_by_failure(hypervisor_failure(error))
    if not isinstance(error, VMJobsError | OSError):
        return VmEnd(ClusterVmCode.INTERNAL, f"the agent failed: {type(error).__name__}")
    return end_by_failure(image_failure(error))
