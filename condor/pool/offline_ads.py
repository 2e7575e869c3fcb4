"""Offline ads: machine ads of VMs that a cluster could start. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from condor import names
from condor.node.chirp import literal
from vmjobs.cluster.pool import ClassAdValue, WorkerVmProfile

#: Attributes that all VMs of a cluster share, and that the first VM's ad reveals.
_STABLE_NAMES: Final = re.compile(
    r"Arch|OpSys\w*|Has\w+|has_\w+|Condor(Version|Platform)|Microarch|Utsname(Machine|Release|Sysname)"
    r"|StarterAbilityList|DetectedCpus|DetectedMemory|TotalSlot(Cpus|Memory|Disk)"
)
_MAX_ATTRIBUTES: Final = 300
_MAX_LENGTH: Final = 1024
#: Attributes of a cluster that has had no VM yet.
_DEFAULT_ATTRIBUTES: Final[Mapping[str, ClassAdValue]] = {
    "Arch": "X86_64",
    "OpSys": "LINUX",
    "HasFileTransfer": True,
    "HasJobDeferral": True,
    "HasIOProxy": True,
    "HasTDP": True,
}
#: No daemon listens there, and no schedd connects: only the ad's owner uses its matches. The ad has no
#: StartdIpAddr: a negotiator that records a match would repeat only that one, and the collector rejects
#: an ad with two different addresses.
_ADDRESS: Final = "<127.0.0.1:9>"
#: Expressions of a cluster VM's startd, see ``condor/worker/startd.conf``.
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


def stable_attributes(ad: Mapping[str, ClassAdValue]) -> dict[str, ClassAdValue]:
    """The attributes of a VM's ad that hold for the cluster's next VM, too.

    A job that takes over a VM can write anything into the ad: other attributes are left out.
    """
    said = [(n, v) for n, v in sorted(ad.items()) if _STABLE_NAMES.fullmatch(n) and _plausible(n, v)]
    return dict(said[:_MAX_ATTRIBUTES])


def _plausible(name: str, value: ClassAdValue) -> bool:
    if len(name) > _MAX_LENGTH or "vmjobs" in name.lower():
        return False
    if isinstance(value, str):
        return len(value) <= _MAX_LENGTH and value.isprintable()
    return math.isfinite(value)


def offline_ad(kind: WorkerVmProfile) -> dict[str, str]:
    """The offline ad of a VM of this kind: expressions by name."""
    host = f"{kind.cluster}.{names.OFFER_DOMAIN}"
    known = {**_DEFAULT_ATTRIBUTES, **kind.known}
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
        # Changes when a VM is up: the ad is then replaced, without the match that started the VM.
        names.UP: kind.up,
    }
    return {
        **{name: literal(value, limit=0) for name, value in said.items()},
        **_EXPRESSIONS,
        "Start": f"({kind.start})",
    }
