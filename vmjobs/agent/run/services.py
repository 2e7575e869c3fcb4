"""The services of a node that its runs share, and their settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vmjobs.agent.image_source import ImageSource
from vmjobs.agent.journal import Journal
from vmjobs.file_transfer import FileTransfer
from vmjobs.hypervisor.base import DriverChooser, ProbeResult
from vmjobs.model import HypervisorKind, JobTicket


@dataclass(frozen=True)
class RunSettings:
    """Limits (bytes) and deadlines (seconds) of runs.

    grace_seconds: for a guest that has delivered everything, or whose script got a stop signal.
    stop_seconds: for a VM whose work is done to power off on request.
    script_handles_stop: without a deadline here: the client that sends stop signals has one, and closes
        its connection then.
    """

    node: str
    max_console: int
    max_log: int
    collect_seconds: float = 1800.0
    deliver_seconds: float = 1800.0
    grace_seconds: float = 10.0
    stop_seconds: float = 60.0
    silence_seconds: float = 120.0
    script_handles_stop: bool = False


@dataclass(frozen=True)
class RunServices:
    """The services of this node that its runs share.

    write_seed: writes the disk with a job's NoCloud data, for images that use cloud-init; raises
        HypervisorError.
    on_step_timed: receives the title and duration (seconds) of each step.
    file_transfer: transfers VM checkpoints to and from the repository; None: no VM is saved.
    reprobe: probes again whether a hypervisor works; None: not possible.
    """

    images: ImageSource
    choose: DriverChooser
    journal: Journal
    settings: RunSettings
    write_seed: Callable[[Path, JobTicket], object] | None = None
    on_step_timed: Callable[[str, float], object] = lambda _title, _seconds: None
    file_transfer: FileTransfer | None = None
    reprobe: Callable[[HypervisorKind], ProbeResult] | None = None
