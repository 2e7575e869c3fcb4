"""What a node keeps of one member over restarts of its agent. Times are seconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from vmjobs.cluster.member import MemberCode, Phase
from vmjobs.cluster.wire import MemberOrder, MemberReport
from vmjobs.model import ExitStatus, Frozen, HypervisorKind

LONGEST_MESSAGE = 8192


def _or(otherwise: object) -> WrapValidator:
    """Takes a value that is not understood for another one."""

    def check(value: object, understood: ValidatorFunctionWrapHandler) -> object:
        try:
            return understood(value)
        except ValidationError:
            return otherwise

    return WrapValidator(check)


class Record(Frozen):
    """One member: its order as it was heard last, and how far its present machine is.

    machine: the name of that machine; empty: there is none. token, sentinel: what its guest knows.
    admitted: that machine may take jobs. failing: its end counts as a failure.
    retry: when WAITING ends, or STOPPING is tried again. deadline: of BOOTING and of DRAINING.
    renew: when its pool token is to be replaced. A time of 0 is none.
    undestroyed: why the machine of a member that is STOPPING could not be destroyed yet.
    """

    order: MemberOrder
    incarnation: int = 0
    phase: Phase = Phase.WAITING
    code: MemberCode = MemberCode.PROGRESS
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

    def but(self, **changes: object) -> Record:
        """This record with some fields changed."""
        return self.model_copy(update=changes)

    def enter(self, phase: Phase, code: MemberCode, message: str, now: float) -> Record:
        """This record in another phase, from now on."""
        return self.but(phase=phase, code=code, message=message[:LONGEST_MESSAGE], since=now)

    def report(self) -> MemberReport:
        """What the service is told."""
        waiting = self.phase is Phase.WAITING and self.retry > 0
        message = self.message
        if self.phase is Phase.STOPPING and self.undestroyed:
            message = f"it cannot be destroyed: {self.undestroyed}; {message}"
        return MemberReport(
            id=self.order.id,
            incarnation=self.incarnation,
            phase=self.phase,
            code=self.code,
            message=message[:LONGEST_MESSAGE],
            since=_moment(self.since),
            hypervisor=self.hypervisor,
            failures=self.failures,
            retry=_moment(self.retry) if waiting else None,
            seconds=self.seconds,
        )

    def troubled(self, end: End) -> MemberReport:
        """What the service is told while the next record cannot be kept."""
        message = end.message[:LONGEST_MESSAGE]
        return self.report().model_copy(update={"code": end.code, "message": message})


class Aside(BaseModel):
    """What can be told of a record that this release does not understand: another one's, most likely.

    Nothing is done about it, nor about its machine: an agent that understands it goes on with both.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    incarnation: Annotated[int, _or(0)] = 0
    phase: Annotated[Phase, _or(Phase.WAITING)] = Phase.WAITING
    hypervisor: Annotated[HypervisorKind | None, _or(None)] = None

    def report(self, path: Path, now: float) -> MemberReport:
        """What the service is told."""
        message = (
            f"this agent does not understand {path}, which another release has written: its machine is "
            "left alone. Install that release again; or remove its directory and restart the agent, "
            "which ends the machine"
        )
        return MemberReport(
            id=self.id,
            incarnation=self.incarnation,
            phase=self.phase,
            code=MemberCode.INTERNAL,
            message=message,
            since=_moment(now),
            hypervisor=self.hypervisor,
        )


class End(Frozen):
    """Why a machine cannot or must not go on."""

    code: MemberCode
    message: str


class Facts(Frozen):
    """What is known of a member's present machine beside its record, and goes with this process.

    working: a thread fetches its image, boots it or destroys it. staged: what will run it;
    unenforced: the limits that this will not hold it to, in sentences.
    ready: its guest said so. exit: how the guest's script ended, told at ``exit_at``.
    end: it has ended, or could not be started. destroyed: verified, nothing of it is left.
    renewed: its pool token was replaced; this is when the next is due.
    refused: why it has had no token yet, though it asked. undestroyed: why it could not be destroyed.
    again: though it was GONE, it is to have a machine again.
    """

    working: bool = False
    staged: HypervisorKind | None = None
    unenforced: str = ""
    ready: bool = False
    exit: ExitStatus | None = None
    exit_at: float = 0.0
    end: End | None = None
    destroyed: bool = False
    renewed: float = 0.0
    refused: str = ""
    undestroyed: str = ""
    again: bool = False

    def but(self, **changes: object) -> Facts:
        """These facts with some fields changed."""
        return self.model_copy(update=changes)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
