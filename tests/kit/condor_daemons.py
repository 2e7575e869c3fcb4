"""ClassAds of jobs and nodes as in HTCondor, and daemons that serve only these."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import classad2
import htcondor2

from condor.daemon_client import CallError
from condor.diagnose import daemon_queries

#: The bindings of this version provide the string-list functions that policies use.
HTCONDOR = htcondor2.version()
#: A job's ad, as made by the schedd's drop-in and condor_submit.
JOB = {
    "ClusterId": "3",
    "ProcId": "0",
    "RequestCpus": "1",
    "RequestMemory": "128",
    "RequestDisk": "65536",
    "VMJobImage": '"hep"',
    "VMJobPolicy": "1",
    "Requirements": "(VMJobOwnRequirements) && (TARGET.HasVMJobs =?= true)"
    ' && (stringListIMember(VMJobHypervisor, "kvm,qemu,uml") =!= true'
    " || stringListIMember(VMJobHypervisor, TARGET.VMJobsHypervisors))",
    "VMJobOwnRequirements": '(TARGET.Arch == "X86_64") && (TARGET.OpSys == "LINUX")'
    " && (TARGET.Disk >= RequestDisk) && (TARGET.Memory >= RequestMemory)",
}
#: The ad of a node of HTCondor 23.9 with the node's drop-in, while a job uses half of the node.
NODE = {
    "Machine": '"node1.grid"',
    "Name": '"slot1@node1.grid"',
    "PartitionableSlot": "true",
    "State": '"Unclaimed"',
    "Arch": '"X86_64"',
    "OpSys": '"LINUX"',
    "Cpus": "2",
    "TotalSlotCpus": "4",
    "Memory": "2048",
    "TotalSlotMemory": "4096",
    "Disk": "79315393",
    "TotalSlotDisk": "79581632.0",
    "GPUs": "0",
    "TotalSlotGPUs": "0",
    "HasVMJobs": "true",
    "VMJobsHypervisors": '"uml,qemu"',
    "Start": "(true) && (TARGET.VMJobImage =?= undefined || TARGET.VMJobPolicy =?= 1)",
    "Requirements": "START && (WithinResourceLimits)",
    "WithinResourceLimits": "(MY.Cpus > 0 && TARGET.RequestCpus <= MY.Cpus && MY.Memory > 0"
    " && TARGET.RequestMemory <= MY.Memory && MY.Disk > 0 && TARGET.RequestDisk <= MY.Disk"
    " && (TARGET.RequestGPUs =?= undefined || MY.GPUs >= TARGET.RequestGPUs))",
}


def ad(base: dict[str, str], **more: str) -> Any:
    """Make an ad. more: expressions; ``""`` removes an attribute."""
    made = classad2.ClassAd()
    for name, expression in {**base, **more}.items():
        if expression:
            made[name] = classad2.ExprTree(expression)
    return made


def node(name: str = "node1.grid", **more: str) -> Any:
    return ad(NODE, **{"Machine": f'"{name}"', "Name": f'"slot1@{name}"', **more})


def job(**more: str) -> Any:
    return ad(JOB, **more)


def queued(cluster: int = 3, proc: int = 0, schedd: str = "site.grid", **more: str) -> Any:
    """An idle job in a schedd's queue."""
    own = {
        "ClusterId": str(cluster),
        "ProcId": str(proc),
        "GlobalJobId": f'"{schedd}#{cluster}.{proc}#1795228077"',
        "JobStatus": "1",
        "JobUniverse": "5",
        "QDate": "1795228077",
        "ServerTime": "1795228200",
        "NumJobStarts": "0",
    }
    return job(**{**own, **more})


@dataclass
class Schedd:
    """A schedd: its queue, and its history."""

    jobs: Sequence[Any] = ()
    ended: Sequence[Any] = ()

    def query(self, constraint: str, _projection: Sequence[str], limit: int = -1) -> list[Any]:
        return chosen(self.jobs, constraint)[: limit if limit >= 0 else None]

    def history(self, constraint: str, _projection: Sequence[str], limit: int) -> list[Any]:
        return chosen(self.ended, constraint)[:limit]


@dataclass
class Collector:
    """A collector: ads by kind. silent: kinds whose queries fail."""

    ads: dict[str, Sequence[Any]] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()

    def query(self, kind: str, constraint: str = "true", _projection: Sequence[str] = ()) -> list[Any]:
        if kind in self.silent:
            raise OSError("no right to read")
        return chosen(self.ads.get(kind, ()), constraint)


def chosen(ads: Sequence[Any], constraint: str) -> list[Any]:
    return [ad for ad in ads if classad2.ExprTree(constraint).eval(ad) is True]


#: Its last cycle ended ten seconds before jobs of :func:`queued` are examined.
NEGOTIATOR = {"Name": '"site.grid"', "LastNegotiationCycleEnd0": "1795228190"}


@dataclass
class Daemons:
    """Stands in for :func:`condor.daemon_client.call`.

    Schedds and collectors by name; ``""``: this host's.
    """

    schedds: dict[str, Schedd] = field(default_factory=dict)
    collectors: dict[str, Collector] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def __call__(self, verb: str, _timeout: float, **said: Any) -> dict[str, Any]:
        self.asked.append(verb)
        pool = said["pool"]
        if pool not in self.collectors:
            raise CallError(f"collector {pool}: no answer", named=True)
        if verb == "explain":
            kinds = ("Startd", "Negotiator", "Schedd", "Accounting")
            bindings = SimpleNamespace(AdType=SimpleNamespace(**{kind: kind for kind in kinds}))
            try:
                answer = daemon_queries.explain(bindings, self.collectors[pool], said["ad"])
            except OSError as error:  # as condor.daemon_call does
                raise CallError(f"collector {pool}: {error}", named=True) from error
        elif said["schedd"] not in self.schedds:
            raise CallError(f"collector {pool} does not know schedd {said['schedd']}", named=True)
        else:
            answer = daemon_queries.find(self.schedds[said["schedd"]], said["cluster"], said["proc"])
        found: dict[str, Any] = json.loads(json.dumps(answer))
        return found


def daemons(
    *jobs: Any, nodes: Sequence[Any] = (), ended: Sequence[Any] = (), **ads: Sequence[Any]
) -> Daemons:
    """A host with a schedd and its pool. ads: the collector's other ads, by kind."""
    kinds = {"Startd": nodes, "Negotiator": [ad(NEGOTIATOR)], **ads}
    return Daemons({"": Schedd(jobs, ended)}, {"": Collector(kinds)})
