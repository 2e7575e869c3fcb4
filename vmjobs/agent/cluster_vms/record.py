"""The state of one cluster VM over restarts of its agent. Times are seconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from vmjobs.agent.cluster_vms.vm_end import VmEnd
from vmjobs.cluster.vm_state import ClusterVmCode, Phase
from vmjobs.cluster.wire import ClusterVmOrder, ClusterVmReport
from vmjobs.model import FrozenModel, HypervisorKind, LenientModel

MAX_MESSAGE_CHARACTERS = 8192


def _with_default(default: object) -> WrapValidator:
    """Replace an invalid value by another one."""

    def check(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(value)
        except ValidationError:
            return default

    return WrapValidator(check)


class ClusterVmRecord(FrozenModel):
    """One cluster VM: its last order, and the state of its present incarnation.

    machine: name of the VM; empty: there is none. token, sentinel: secrets of its guest.
    admitted: the VM may run jobs. failing: its end counts as a failure.
    retry: when WAITING ends, or STOPPING is tried again. deadline: of BOOTING and of DRAINING.
    renew: when its pool token must be replaced. A time of 0 is none.
    undestroyed: why a VM that is STOPPING could not be destroyed yet.
    """

    order: ClusterVmOrder
    incarnation: int = 0
    phase: Phase = Phase.WAITING
    code: ClusterVmCode = ClusterVmCode.PROGRESS
    message: str = ""
    since: float
    failures: int = 0
    failing: bool = False
    retry: float = 0.0
    deadline: float = 0.0
    renew: float = 0.0
    machine: str = ""
    hypervisor: HypervisorKind | None = None
    token: str = ""
    sentinel: str = ""
    admitted: bool = False
    undestroyed: str = ""
    seconds: dict[str, float] = Field(default_factory=dict)

    def with_changes(self, **changes: object) -> ClusterVmRecord:
        return self.model_copy(update=changes)

    def enter(self, phase: Phase, code: ClusterVmCode, message: str, now: float) -> ClusterVmRecord:
        """Return this record in another phase, beginning now."""
        return self.with_changes(
            phase=phase, code=code, message=message[:MAX_MESSAGE_CHARACTERS], since=now
        )

    def report(self) -> ClusterVmReport:
        waiting = self.phase is Phase.WAITING and self.retry > 0
        message = self.message
        if self.phase is Phase.STOPPING and self.undestroyed:
            message = f"it cannot be destroyed: {self.undestroyed}; {message}"
        return ClusterVmReport(
            id=self.order.id,
            incarnation=self.incarnation,
            phase=self.phase,
            code=self.code,
            message=message[:MAX_MESSAGE_CHARACTERS],
            since=_utc(self.since),
            hypervisor=self.hypervisor,
            failures=self.failures,
            retry=_utc(self.retry) if waiting else None,
            seconds=self.seconds,
        )

    def blocked(self, end: VmEnd) -> ClusterVmReport:
        """Return the report for the service while the next record cannot be stored."""
        message = end.message[:MAX_MESSAGE_CHARACTERS]
        return self.report().model_copy(update={"code": end.code, "message": message})


class IncompatibleRecord(LenientModel):
    """The readable fields of an incompatible record, most likely of another release.

    It and its VM are left alone: an agent that can read it continues with both.
    """

    id: str
    incarnation: Annotated[int, _with_default(0)] = 0
    phase: Annotated[Phase, _with_default(Phase.WAITING)] = Phase.WAITING
    hypervisor: Annotated[HypervisorKind | None, _with_default(None)] = None

    def report(self, path: Path, now: float) -> ClusterVmReport:
        message = (
            f"this agent cannot read {path}, which another release has written: its VM is "
            "left alone. Install that release again; or remove its directory and restart the agent, "
            "which ends the VM"
        )
        return ClusterVmReport(
            id=self.id,
            incarnation=self.incarnation,
            phase=self.phase,
            code=ClusterVmCode.INTERNAL,
            message=message,
            since=_utc(now),
            hypervisor=self.hypervisor,
        )


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
