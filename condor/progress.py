"""What an execute node tells about a job, as attributes of its job ad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from condor import names, outcomes
from condor.chirp import ChirpReporter, Told
from vmjobs.agent.protocol import EndMessage, ProgressMessage
from vmjobs.model import JobState, Report
from vmjobs.ports import ClassAdValue

_SECONDS: Final[Mapping[str, str]] = {
    "staging": names.VM_STAGE_SECONDS,
    "booting": names.VM_BOOT_SECONDS,
    "running": names.VM_RUN_SECONDS,
    "collecting": names.VM_COLLECT_SECONDS,
}

_UNDER_WAY: Final = frozenset(
    {JobState.STAGING, JobState.BOOTING, JobState.RUNNING, JobState.COLLECTING}
)

_BYTES: Final[Mapping[str, str]] = {
    "image": names.VM_IMAGE_BYTES,
    "input": names.VM_INPUT_BYTES,
    "memory": names.VM_MEMORY_BYTES,
    "disk": names.VM_DISK_BYTES,
    "console": names.VM_CONSOLE_BYTES,
    "log": names.VM_LOG_BYTES,
    "output": names.VM_OUTPUT_BYTES,
    "checkpoint": names.VM_CHECKPOINT_BYTES,
}


def tell(
    reporter: ChirpReporter, message: ProgressMessage | EndMessage, *, unchanged: bool = False
) -> None:
    """Have the job's ad say what the agent says: a state at once, the rest with HTCondor's numbers.

    unchanged: how the run ended is not how the job did, which is told apart from it.
    """
    report = message.report
    told: dict[str, Told] = {**attributes(message.node, report), **usage(report)}
    if report.state in _UNDER_WAY:
        told |= outcomes.under_way(report.state.value, _sentence(report))
    elif unchanged:
        del told[names.VM_STATE], told[names.VM_REASON]
    if isinstance(message, EndMessage):
        told |= needs(message)
    reporter.publish_state(told, last=isinstance(message, EndMessage))


def needs(message: EndMessage) -> dict[str, ClassAdValue]:
    """The attributes of what the job's image demands of nodes, where this one did not have it."""
    if message.needs is None:
        return {}
    return {
        names.VM_IMAGE_KINDS: ",".join(message.needs.kinds),
        names.VM_IMAGE_ARCH: message.needs.architecture,
        names.VM_IMAGE_NAMED: message.needs.named,
    }


def usage(report: Report) -> dict[str, ClassAdValue]:
    """The attributes of what a report says was moved and used; what is not known is left out."""
    found: dict[str, ClassAdValue] = {
        _BYTES[name]: amount for name, amount in report.bytes.items() if name in _BYTES
    }
    if report.cpu_seconds:
        found[names.VM_CPU_SECONDS] = report.cpu_seconds
    return found


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
