"""Turn an agent's reports about a job into attributes of its job ad.

``report`` is a :class:`vmjobs.model.Report` as the agent's socket sends it. Processes that run beside
each job import this: it imports no module that takes long to load.
"""

from __future__ import annotations

from condor import names
from condor.events import outcomes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final

    from condor.node.chirp import AttributeValue, ChirpReporter
    from vmjobs.cluster.pool import ClassAdValue

_SECONDS: Final[Mapping[str, str]] = {
    "staging": names.VM_STAGE_SECONDS,
    "booting": names.VM_BOOT_SECONDS,
    "running": names.VM_RUN_SECONDS,
    "collecting": names.VM_COLLECT_SECONDS,
}

_UNDER_WAY: Final = frozenset({"STAGING", "BOOTING", "RUNNING", "COLLECTING"})

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


def publish_progress(
    reporter: ChirpReporter, message: Mapping[str, Any], *, unchanged: bool = False
) -> None:
    """Write the contents of an agent's message, ``progress`` or ``end``, into the job's ad.

    The state is written immediately, the rest with HTCondor's next update.

    unchanged: a transparent job, whose own end is reported separately from the run's.
    """
    report = message["report"]
    published: dict[str, AttributeValue] = {
        **attributes(message["node"], report),
        **usage_attributes(report),
    }
    if report["state"] in _UNDER_WAY:
        published |= outcomes.progress_attributes(report["state"], _sentence(report))
    elif unchanged:
        del published[names.VM_STATE], published[names.VM_REASON]
    published |= image_requirement_attributes(message.get("needs"))
    reporter.publish_state(published, last=message["type"] == "end")


def image_requirement_attributes(image: Mapping[str, Any] | None) -> dict[str, ClassAdValue]:
    """Attributes for the requirements of the job's image, if this node does not meet them."""
    if image is None:
        return {}
    return {
        names.VM_IMAGE_KINDS: ",".join(image["kinds"]),
        names.VM_IMAGE_ARCH: image.get("architecture", ""),
        names.VM_IMAGE_NAMED: image["named"],
    }


def usage_attributes(report: Mapping[str, Any]) -> dict[str, ClassAdValue]:
    """Attributes for the bytes and CPU time in a report; unknown values are left out."""
    amounts = report.get("bytes", {})
    found: dict[str, ClassAdValue] = {
        _BYTES[name]: amount for name, amount in amounts.items() if name in _BYTES
    }
    if report.get("cpu_seconds"):
        found[names.VM_CPU_SECONDS] = report["cpu_seconds"]
    return found


def attributes(node: str, report: Mapping[str, Any]) -> dict[str, ClassAdValue]:
    """The ``ChirpVM*`` attributes of one report; unknown values are left out."""
    found: dict[str, ClassAdValue] = {
        names.VM_STATE: report["state"],
        names.VM_NODE: node,
        names.VM_REASON: _sentence(report),
    }
    if report.get("hypervisor") is not None:
        found[names.VM_HYPERVISOR] = report["hypervisor"]
    if report.get("exit") is not None:
        found[names.VM_EXIT_CHANNEL] = report["exit"]["channel"]
    seconds = report.get("seconds", {})
    for phase, name in _SECONDS.items():
        if phase in seconds:
            found[name] = round(seconds[phase], 3)
    return found


def _sentence(report: Mapping[str, Any]) -> str:
    code, message = report["reason"]["code"], report["reason"].get("message", "")
    return f"{code}: {message}" if message else code
