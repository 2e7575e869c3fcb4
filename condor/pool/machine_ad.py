"""An execute node's attributes, as the lines that a STARTD_CRON job prints. Pure.

``node`` is a :class:`vmjobs.model.Node` as the agent's socket sends it.
"""

from __future__ import annotations

from condor import names
from condor.node.chirp import literal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final

    from vmjobs.cluster.pool import ClassAdValue

#: At most this many cached images are advertised: the ad goes to the collector every few minutes.
MAX_DIGESTS: Final = 200


def attributes(node: Mapping[str, Any]) -> dict[str, ClassAdValue]:
    """Attributes for the machine ad; HasVMJobs is false on a fault or without hypervisors."""
    hypervisors, fault = node["hypervisors"], node.get("fault", "")
    working = [info["kind"] for info in hypervisors if info["works"]]
    emulated = {name for info in hypervisors if info["works"] for name in info.get("architectures", ())}
    uml: Mapping[str, Any] = next((info for info in hypervisors if info["kind"] == "uml"), {})
    return {
        names.HAS_VMJOBS: bool(working) and not fault,
        names.FAULT: fault,
        names.VERSION: node["version"],
        names.HYPERVISORS: ",".join(working),
        names.UML_CPUS: uml.get("cpus", 0),
        names.UML_CLOUD_INIT: uml.get("cloud_init", False),
        names.ARCHITECTURES: ",".join(sorted(emulated)),
        names.NETWORKS: ",".join(node["networks"]),
        names.IMAGE_DIGESTS: ",".join(node["images"][:MAX_DIGESTS]),
        names.IMAGE_NAMES: ",".join(node.get("image_names", ())[:MAX_DIGESTS]),
        names.MEMORY: node["memory"],
        names.MEMORY_FREE: max(0, node["memory"] - node.get("lent", 0)),
        names.DISK: node["disk"],
        names.RUNNING: len(node["running"]),
    }


def lines(node: Mapping[str, Any]) -> str:
    """The output of one STARTD_CRON run; its last line triggers an update of the collector.

    Raises:
        LookupError, TypeError: ``node`` is not a node.
    """
    return _text(attributes(node))


def lines_without_agent() -> str:
    """The output if no agent answers: the node must get no jobs."""
    return _text({names.HAS_VMJOBS: False, names.FAULT: "", names.HYPERVISORS: ""})


def _text(found: Mapping[str, ClassAdValue]) -> str:
    listing = "".join(f"{name} = {literal(value, limit=0)}\n" for name, value in found.items())
    return f"{listing}- update:true\n"
