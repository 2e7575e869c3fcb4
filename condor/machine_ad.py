"""An execute node's attributes, as the lines that a STARTD_CRON job prints. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from condor import names
from condor.chirp import literal
from vmjobs.model import HypervisorKind, Node
from vmjobs.ports import ClassAdValue

#: More cached images than this are not announced: the ad goes to the collector every few minutes.
MAX_DIGESTS: Final = 200


def attributes(node: Node) -> dict[str, ClassAdValue]:
    """What the machine ad says of vmjobs. A node that rests, or boots nothing, offers nothing."""
    working = [info.kind.value for info in node.hypervisors if info.works]
    found: dict[str, ClassAdValue] = {
        names.HAS_VMJOBS: bool(working) and not node.fault,
        names.FAULT: node.fault,
        names.VERSION: node.version,
        names.HYPERVISORS: ",".join(working),
        names.UML_CPUS: sum(i.cpus for i in node.hypervisors if i.kind is HypervisorKind.UML),
        names.IMAGE_DIGESTS: ",".join(node.images[:MAX_DIGESTS]),
        names.IMAGE_NAMES: ",".join(node.image_names[:MAX_DIGESTS]),
        names.MEMORY: node.memory,
        names.MEMORY_FREE: max(0, node.memory - node.lent),
        names.DISK: node.disk,
        names.RUNNING: len(node.running),
    }
    return found


def lines(node: Node) -> str:
    """The output of one STARTD_CRON run; its last line has the collector told at once."""
    return _text(attributes(node))


def absent() -> str:
    """The output where no agent answers: jobs must not come here."""
    return _text({names.HAS_VMJOBS: False, names.FAULT: "", names.HYPERVISORS: ""})


def _text(found: Mapping[str, ClassAdValue]) -> str:
    listing = "".join(f"{name} = {literal(value, limit=0)}\n" for name, value in found.items())
    return f"{listing}- update:true\n"
