"""What an execute node tells about a job, as attributes of its job ad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from condor import names
from vmjobs.model import Report
from vmjobs.ports import ClassAdValue

_SECONDS: Final[Mapping[str, str]] = {
    "staging": names.VM_STAGE_SECONDS,
    "booting": names.VM_BOOT_SECONDS,
    "running": names.VM_RUN_SECONDS,
    "collecting": names.VM_COLLECT_SECONDS,
}


def attributes(node: str, report: Report) -> dict[str, ClassAdValue]:
    """The ``ChirpVM*`` attributes of one report; what is not known yet is left out."""
    found: dict[str, ClassAdValue] = {
        names.VM_STATE: report.state.value,
        names.VM_NODE: node,
        names.VM_REASON: _sentence(report),
    }
    if report.hypervisor is not None:
        found[names.VM_HYPERVISOR] = report.hypervisor.value
    if report.exit is not None:
        found[names.VM_EXIT_CHANNEL] = report.exit.channel.value
    for phase, name in _SECONDS.items():
        if phase in report.seconds:
            found[name] = round(report.seconds[phase], 3)
    return found


def _sentence(report: Report) -> str:
    code, message = report.reason.code.value, report.reason.message
    return f"{code}: {message}" if message else code
