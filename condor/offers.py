"""The ad of a machine that a cluster could start: what its startd would say. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from condor import names
from condor.chirp import literal
from vmjobs.ports import ClassAdValue, MachineKind

#: What is the same for all machines of a kind, and known from the first of them on only.
_LASTING: Final = re.compile(
    r"Arch|OpSys\w*|Has\w+|has_\w+|Condor(Version|Platform)|Microarch|Utsname(Machine|Release|Sysname)"
    r"|StarterAbilityList|DetectedCpus|DetectedMemory|TotalSlot(Cpus|Memory|Disk)"
)
_MOST: Final = 300
_LONGEST: Final = 1024
#: What is said of a machine that nobody has seen yet.
_ASSUMED: Final[Mapping[str, ClassAdValue]] = {
    "Arch": "X86_64",
    "OpSys": "LINUX",
    "HasFileTransfer": True,
    "HasJobDeferral": True,
    "HasIOProxy": True,
    "HasTDP": True,
}
#: Nobody is there, and nobody is sent there: matches with an offline ad are for its owner to see. It
#: has no StartdIpAddr: a negotiator that notes a match would repeat that alone, and the collector takes
#: two addresses that differ for a lie.
_ADDRESS: Final = "<127.0.0.1:9>"
#: What the startd of a member says, see ``condor/worker/startd.conf``.
_EXPRESSIONS: Final = {
    "Requirements": "START && WithinResourceLimits",
    "WithinResourceLimits": (
        "MY.Cpus > 0 && TARGET.RequestCpus <= MY.Cpus"
        " && MY.Memory > 0 && TARGET.RequestMemory <= MY.Memory"
        " && MY.Disk > 0 && TARGET.RequestDisk <= MY.Disk"
    ),
    # HTCondor's own default; condor_rooster looks at it.
    "Unhibernate": "MY.MachineLastMatchTime =!= undefined",
    "SlotWeight": "Cpus",
}


def lasting(ad: Mapping[str, ClassAdValue]) -> dict[str, ClassAdValue]:
    """What of a machine's ad will be true of the cluster's next machine, too.

    Jobs that take over a machine can have it say anything: what no startd says is left out.
    """
    said = [(n, v) for n, v in sorted(ad.items()) if _LASTING.fullmatch(n) and _plausible(n, v)]
    return dict(said[:_MOST])


def _plausible(name: str, value: ClassAdValue) -> bool:
    if len(name) > _LONGEST or "vmjobs" in name.lower():
        return False
    if isinstance(value, str):
        return len(value) <= _LONGEST and value.isprintable()
    return math.isfinite(value)


def offer(kind: MachineKind) -> dict[str, str]:
    """The ad of a machine of the kind that is switched off: expressions by name."""
    host = f"{kind.cluster}.{names.OFFER_DOMAIN}"
    known = {**_ASSUMED, **kind.known}
    declared = {"Cpus": kind.cpus, "Memory": kind.memory, "Disk": kind.disk * 1024}
    resources = {name: known.get(f"TotalSlot{name}", value) for name, value in declared.items()}
    chosen = {name.lower() for name in kind.attributes}
    default = {} if names.VIRTUAL_CLUSTER.lower() in chosen else {names.VIRTUAL_CLUSTER: kind.cluster}
    said: dict[str, ClassAdValue] = {
        **default,
        **kind.attributes,
        **known,
        **resources,
        **{f"TotalSlot{name}": value for name, value in resources.items()},
        "MyType": "Machine",
        "TargetType": "Job",
        "Name": f"slot1@{host}",
        "Machine": host,
        "MyAddress": _ADDRESS,
        "FileSystemDomain": host,
        "UidDomain": host,
        "Offline": True,
        "PartitionableSlot": True,
        "SlotType": "Partitionable",
        "SlotID": 1,
        "State": "Unclaimed",
        "Activity": "Idle",
        "LoadAvg": 0.0,
        "CurrentRank": 0.0,
        "Rank": 0.0,
        names.CLUSTER: kind.cluster,
        names.ADMITTED: True,
        # Once a machine is up, the ad is another one, and forgets the match that it was started for.
        names.UP: kind.up,
    }
    return {
        **{name: literal(value, limit=0) for name, value in said.items()},
        **_EXPRESSIONS,
        "Start": f"({kind.start})",
    }
