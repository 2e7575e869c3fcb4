"""Explain why an idle job has no node, from an analysis of its pool's nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from condor import names
from condor.diagnose.findings import JobFacts, JobFinding, format_nodes, format_seconds
from condor.events import outcomes

#: Resources: the job's attribute, the node's, the submit command; units of the attribute in one unit
#: of the message, and the name of the latter.
_RESOURCES: Final = (
    ("RequestCpus", "Cpus", "request_cpus", 1, "processors"),
    ("RequestMemory", "Memory", "request_memory", 1, "MiB of memory"),
    ("RequestDisk", "Disk", "request_disk", 1024, "MiB of disk"),
    ("RequestGPUs", "GPUs", "request_gpus", 1, "GPUs"),
)
#: Reasons of a negotiator for not matching a job because of a limit.
_LIMIT: Final = re.compile(r"limit|quota|ceiling|share", re.IGNORECASE)
_PRIORITY: Final = re.compile(r"priority|preempt|preferred", re.IGNORECASE)
_FAULT_ADVICE: Final = (
    "`vmjobs doctor` on the node shows the fault, `vmjobs node list` the results of probes"
)
#: Requirements of a job's image that a node has determined, by attribute.
_IMAGE_REQUIREMENTS: Final = (
    (names.VM_IMAGE_ARCH, "its image is for a CPU architecture that no node has or emulates"),
    (names.VM_IMAGE_KINDS, "no hypervisor that boots its image works on any node"),
)


@dataclass(frozen=True)
class PoolFacts:
    """Data of a pool for one job: see :func:`condor.diagnose.daemon_queries.explain`."""

    nodes: Mapping[str, Mapping[str, Any]]
    clauses: Sequence[Mapping[str, Any]] = ()
    largest: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    agents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hypervisors: Sequence[str] = ()
    negotiator: Mapping[str, Any] = field(default_factory=dict)
    schedd: Mapping[str, Any] = field(default_factory=dict)
    group: Mapping[str, Any] = field(default_factory=dict)
    problems: Sequence[str] = ()

    def count(self, state: str) -> int:
        """Number of nodes in a :data:`condor.diagnose.slot_analysis.MatchState`."""
        return int(self.nodes.get(state, {}).get("count", 0))

    @property
    def total(self) -> int:
        return sum(int(nodes.get("count", 0)) for nodes in self.nodes.values())


def pool_findings(job: JobFacts, pool: PoolFacts) -> list[JobFinding]:
    """Findings for an idle job without a node; the first is the answer."""
    found = [*_main_findings(job, pool), *_additional_findings(job, pool)]
    return list({finding.code + finding.message: finding for finding in found}.values())


def _main_findings(job: JobFacts, pool: PoolFacts) -> Iterator[JobFinding]:
    if _lacks_policy(job):
        yield _policy_finding(job)
    if not pool.total:
        yield JobFinding(
            "NO_NODES", "no node is in its pool now", "condor_status; do nodes reach the collector?"
        )
    elif job.attributes.get(names.WAITS) is True:
        next_try = job.count(names.VM_TRIED) + outcomes.retry_delay_seconds(job.tries)
        left = format_seconds(next_try - job.count("ServerTime"))
        message = f"its last attempt failed; the next one is in {left} or later"
        yield JobFinding("BACKS_OFF", message, "wait")
    elif pool.count("fits"):
        yield from _limit_findings(job, pool)
        yield _waiting_finding(job, pool)
    elif pool.count("busy"):
        nodes = pool.nodes["busy"]
        where = f"{_nodes(nodes['count'])}: {format_nodes(nodes)}"
        yield from _limit_findings(job, pool)
        yield JobFinding(
            "BUSY",
            f"all nodes that it fits are taken by other jobs ({where})",
            "wait; condor_userprio shows the users' priorities",
        )
    elif pool.count("off"):
        yield JobFinding(
            "ASLEEP",
            f"it fits only nodes that are switched off ({format_nodes(pool.nodes['off'])})",
            "virtual clusters start VMs for it: `vmjobs cluster list`",
        )
    elif pool.count("draining"):
        where = format_nodes(pool.nodes["draining"])
        yield JobFinding(
            "DRAINING",
            f"the nodes that it fits are being drained ({where})",
            "wait; the pool's operators may stop that: condor_drain -cancel",
        )
    else:
        yield from _mismatch_findings(job, pool)


def _lacks_policy(job: JobFacts) -> bool:
    return names.WANTED_IMAGE in job.attributes and names.POLICY not in job.attributes


def _policy_finding(job: JobFacts) -> JobFinding:
    if job.attributes.get("WantContainer") is True or job.attributes.get("WantDocker") is True:
        return JobFinding(
            "NO_POLICY",
            "it asks for a container besides its VMJobImage, and no node takes such a job",
            "ask for one of the two",
        )
    return JobFinding(
        "NO_POLICY",
        "its schedd had no policy for jobs with VMJobImage, and nodes reject them without it",
        "put condor/config/schedd.conf into the schedd's config.d, condor_reconfig, submit it again",
    )


def _waiting_finding(job: JobFacts, pool: PoolFacts) -> JobFinding:
    free = pool.nodes["fits"]
    could = f"{_nodes(free['count'])} could take it now ({format_nodes(free)})"
    unread = any(problem.startswith("negotiator") for problem in pool.problems)
    if not pool.negotiator and not unread:
        return JobFinding(
            "NO_NEGOTIATOR",
            f"{could}, but the collector knows no negotiator",
            "condor_status -negotiator; is condor_negotiator in the central manager's DAEMON_LIST?",
        )
    if said := _rejection(job):
        could += f"; the negotiator's last answer was '{said}'{_rejection_age(job)}"
    return JobFinding(
        "WAITING",
        f"it waits for the negotiator: {could}{_cycle(job, pool)}",
        "wait a minute, ask again",
    )


def _rejection(job: JobFacts) -> str:
    """Why the negotiator last did not match the job; empty if it has matched it since."""
    is_recent = job.count("LastRejMatchTime") > job.count("LastMatchTime")
    return job.text("LastRejMatchReason") if is_recent else ""


def _cycle(job: JobFacts, pool: PoolFacts) -> str:
    """When the negotiator's last cycle ended, if the collector has it."""
    now, end = job.number("ServerTime"), _number(pool.negotiator, "LastNegotiationCycleEnd0")
    if not now or not end:
        return ""
    return f"; the last known negotiation cycle ended {format_seconds(now - end)} ago"


def _limit_findings(job: JobFacts, pool: PoolFacts) -> Iterator[JobFinding]:
    """Limits that keep a job from nodes that it fits."""
    said = _rejection(job)
    quota = _number(pool.group, "EffectiveQuota")
    used = _number(pool.group, "WeightedResourcesUsed")
    if 0 < quota < used + 1:
        group = pool.group.get("Name", "")
        yield JobFinding(
            "QUOTA",
            f"its accounting group {group} may use {quota:g}, and uses {used:g}",
            "wait, or ask the pool's operators about GROUP_QUOTA; condor_userprio -quotas",
        )
    elif _LIMIT.search(said):
        yield JobFinding(
            "LIMIT",
            f"the negotiator gave it no node because of a limit: {said}{_rejection_age(job)}",
            "wait; condor_userprio shows shares, condor_userprio -quotas those of groups",
        )
    elif _PRIORITY.search(said):
        yield JobFinding(
            "PRIORITY",
            f"other jobs go first: {said}{_rejection_age(job)}",
            "wait; condor_userprio shows the users' priorities",
        )
    most, running = _number(pool.schedd, "MaxJobsRunning"), _number(pool.schedd, "TotalRunningJobs")
    if 0 < most <= running:
        yield JobFinding(
            "SCHEDD_FULL",
            f"its schedd runs {running:g} jobs, and may run {most:g}",
            "wait, or have its operators raise MAX_JOBS_RUNNING",
        )


def _mismatch_findings(job: JobFacts, pool: PoolFacts) -> Iterator[JobFinding]:
    mentioned = {names.POLICY.lower()} if _lacks_policy(job) else set()
    if job.wants_vm and not pool.agents.get("works", {}).get("count"):
        mentioned |= {names.HAS_VMJOBS.lower(), names.VM_IMAGE_KINDS.lower()}
        yield _agent_finding(pool)
    elif wanted := _missing_hypervisor(job, pool):
        mentioned |= {names.WANTED_HYPERVISOR.lower(), names.VM_IMAGE_KINDS.lower()}
        there = ", ".join(pool.hypervisors) or "none"
        yield JobFinding(
            "NO_HYPERVISOR",
            f"it requests the hypervisor {wanted}, which works on no node: nodes have {there}",
            f"condor_qedit {job.id} {names.WANTED_HYPERVISOR} undefined",
        )
    for asked, has, option, unit, words in _RESOURCES:
        wish, most = job.number(asked), pool.largest.get(has)
        if wish is None or most is None or wish <= most[0]:
            continue
        mentioned.add(asked.lower())
        yield JobFinding(
            "TOO_LARGE",
            f"it asks for {round(wish / unit)} {words}, and no node has more than "
            f"{round(most[0] / unit)} ({most[1]})",
            f"ask for less with {option}: condor_qedit {job.id} {asked} NUMBER",
        )
    for clause in pool.clauses:
        if clause["nodes"]["count"] < pool.total or _mentions(clause, mentioned):
            continue
        values = f" ({listed})" if (listed := format_values(clause)) else ""
        if clause["side"] == "job":
            yield _requirement_finding(job, clause, values)
        else:
            yield JobFinding(
                "REFUSED",
                f"every node refuses it: {clause['text']} is not true{values}",
                "the nodes' operators set that (START in their configuration)",
            )
    if not any(clause["nodes"]["count"] == pool.total for clause in pool.clauses):
        yield JobFinding(
            "NO_NODE",
            f"each of the {_nodes(pool.total)} fails a different requirement",
            "compare the requirements with the nodes; to drop one may be enough",
        )


def _missing_hypervisor(job: JobFacts, pool: PoolFacts) -> str:
    """The hypervisor that the job requests, if no node has it."""
    wanted = job.text(names.WANTED_HYPERVISOR).lower()
    return "" if wanted in pool.hypervisors else wanted


def _image_finding(job: JobFacts, clause: Mapping[str, Any], values: str) -> JobFinding | None:
    """The finding for a requirement of the job's image, if the clause is one."""
    demanded = {name.lower() for name in clause["job"]}
    message = next((said for name, said in _IMAGE_REQUIREMENTS if name.lower() in demanded), None)
    if message is None:
        return None
    another = f"condor_qedit {job.id} {names.WANTED_IMAGE} '\"NAME\"'"
    again = f"condor_qedit {job.id} {names.VM_IMAGE_NAMED} undefined"
    return JobFinding(
        "NO_HYPERVISOR",
        message + values,
        f"use an image that boots there: {another}; if the image has changed since: {again}",
    )


def _requirement_finding(job: JobFacts, clause: Mapping[str, Any], values: str) -> JobFinding:
    if (found := _image_finding(job, clause, values)) is not None:
        return found
    own = names.OWN_REQUIREMENTS if names.POLICY in job.attributes else "Requirements"
    return JobFinding(
        "REQUIREMENTS",
        f"no node meets its requirement {clause['text']}{values}",
        f"change its requirements: condor_qedit {job.id} {own} 'EXPRESSION'",
    )


def _agent_finding(pool: PoolFacts) -> JobFinding:
    if faults := _faults(pool):
        return JobFinding("NO_AGENT", f"vmjobs works on no node: {faults}", _FAULT_ADVICE)
    missing = pool.agents.get("missing", {})
    return JobFinding(
        "NO_AGENT",
        "no node of its pool has vmjobs "
        f"({_nodes(int(missing.get('count', 0)))}: {format_nodes(missing)})",
        "send it to a pool with it, or add the agent to nodes of this one (docs/operators.md)",
    )


def _faults(pool: PoolFacts) -> str:
    """Faults of nodes' agents, in words; ``""`` if there are none."""
    said = []
    for kind, words in (
        ("silent", "the agent does not answer"),
        ("boots-nothing", "no hypervisor booted the agent's probe"),
        ("rests", "several jobs in a row failed because of the node: it accepts none for a while"),
    ):
        if (nodes := pool.agents.get(kind, {})).get("count"):
            said.append(f"on {format_nodes(nodes)} {words}")
    return ", ".join(said)


def _mentions(clause: Mapping[str, Any], said: set[str]) -> bool:
    return bool({name.lower() for name in (*clause["job"], *clause["node"])} & said)


def _additional_findings(job: JobFacts, pool: PoolFacts) -> Iterator[JobFinding]:
    starts, most = job.tries, job.count(names.MAX_STARTS)
    if starts and job.text(names.VM_OUTCOME) == "again":
        where = f" on {node}" if (node := job.text(names.VM_NODE)) else ""
        limit = f" of {most}" if most else ""
        yield JobFinding(
            "TRIED",
            f"it was started {starts} times{limit}, the last time{where}: {job.text(names.VM_REASON)}",
        )
    works = pool.agents.get("works", {}).get("count")
    if job.wants_vm and works and (faults := _faults(pool)):
        yield JobFinding("AGENT_FAILS", faults, _FAULT_ADVICE)
    if names.WANTED_IMAGE in job.attributes and job.text("ShouldTransferFiles").upper() == "NO":
        yield JobFinding(
            "NO_TRANSFER",
            "it will be held: its VM sees no file system of its node",
            "submit it again with should_transfer_files = YES",
        )
    for problem in pool.problems:
        yield JobFinding("UNREAD", f"not everything could be read: {problem}")


def format_values(clause: Mapping[str, Any]) -> str:
    """The job's and the nodes' values of the attributes in a clause, in words."""
    said = [f"the job's {name} is {value}" for name, value in clause["job"].items()]
    said += [f"the nodes' {name} is {value}" for name, value in clause["node"].items()]
    return "; ".join(said)


def _rejection_age(job: JobFacts) -> str:
    now, then = job.number("ServerTime"), job.number("LastRejMatchTime")
    return f", {format_seconds(now - then)} ago" if now and then else ""


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _number(ad: Mapping[str, Any], name: str) -> float:
    """A number; 0 if there is none."""
    value = ad.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0
