"""What this agent observes of a cluster VM's present incarnation: events, and the resulting state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vmjobs.agent.cluster_vms.vm_end import VmEnd
from vmjobs.agent.vm.events import ExitReported, GuestReady, RunEvent
from vmjobs.model import ExitStatus, HypervisorKind


@dataclass(frozen=True)
class ImageStaged:
    """The image is on this node. kind: the chosen hypervisor; unenforced: limits it ignores."""

    kind: HypervisorKind
    unenforced: str = ""


@dataclass(frozen=True)
class ActionFinished:
    """A thread has finished its action. failed: why it failed."""

    failed: VmEnd | None = None


@dataclass(frozen=True)
class VmDestroyed:
    """The VM is verified gone. failed: why it could not be verified."""

    failed: VmEnd | None = None


@dataclass(frozen=True)
class TokenRenewed:
    """A guest's token was replaced; the next one is due then (seconds since 1970)."""

    due: float


@dataclass(frozen=True)
class TokenRefused:
    """The service refused the guest its first token."""

    why: str


@dataclass(frozen=True)
class InstanceEnded:
    """The VM has ended, or its guest is lost."""

    end: VmEnd


@dataclass(frozen=True)
class RestartRequested:
    """Starts a cluster VM that is GONE again, with its persistent disks."""


ClusterVmEvent = (
    RunEvent
    | ImageStaged
    | ActionFinished
    | VmDestroyed
    | TokenRenewed
    | TokenRefused
    | InstanceEnded
    | RestartRequested
)


@dataclass(frozen=True)
class ObservedState:
    """The observed state of a cluster VM's present incarnation, in memory only.

    working: a thread fetches its image, boots it or destroys it. staged: its hypervisor;
    unenforced: the limits that this hypervisor cannot enforce, in sentences.
    ready: its guest reported so. exit: exit status of the guest's script, reported at ``exit_at``.
    end: it has ended, or could not be started. destroyed: it is verified gone.
    renewed: its pool token was replaced, and must be again at this time.
    refused: why the service refused it its first token. undestroyed: why it could not be destroyed.
    again: start it again although it was GONE.
    """

    working: bool = False
    staged: HypervisorKind | None = None
    unenforced: str = ""
    ready: bool = False
    exit: ExitStatus | None = None
    exit_at: float = 0.0
    end: VmEnd | None = None
    destroyed: bool = False
    renewed: float = 0.0
    refused: str = ""
    undestroyed: str = ""
    again: bool = False

    def with_event(self, event: ClusterVmEvent, now: float) -> ObservedState:
        state = self
        match event:
            case ImageStaged():
                state = replace(self, working=False, staged=event.kind, unenforced=event.unenforced)
            case ActionFinished():
                state = replace(self, working=False, end=self.end or event.failed)
            case VmDestroyed():
                why = event.failed.message if event.failed else ""
                state = replace(self, working=False, destroyed=event.failed is None, undestroyed=why)
            case GuestReady():
                state = replace(self, ready=True)
            case ExitReported() if self.exit is None:
                state = replace(self, exit=event.exit, exit_at=now)
            case InstanceEnded():
                state = replace(self, end=self.end or event.end)
            case TokenRenewed():
                state = replace(self, renewed=event.due, refused="")
            case TokenRefused():
                state = replace(self, refused=event.why)
            case RestartRequested():
                state = replace(self, again=True)
        return state
