"""Explain the state of an HTCondor job, from data read from its schedd. Pure.

A finding has a stable code, for programs. The first one of a list is the answer, others add to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from condor import names
from condor.events import hold_advice, outcomes

#: ``JobStatus`` in words.
STATUS_TEXT: Final[Mapping[int, str]] = {
    1: "idle",
    2: "running",
    3: "removed",
    4: "completed",
    5: "held",
    6: "transferring output",
    7: "suspended",
}
IDLE, RUNNING, REMOVED, COMPLETED, HELD, TRANSFERRING, SUSPENDED = 1, 2, 3, 4, 5, 6, 7
VANILLA, GRID = 5, 9

_CONSOLE: Final = "; the console's last lines:"
_RESOURCE: Final = re.compile(r"condor +([^ ]+) +([^ ]+)")
_COPY_ID: Final = re.compile(r"([0-9]{1,10})\.([0-9]{1,10})")
_JOB_ID: Final = re.compile(r"condor +([^ ]+) +([^ ]+) +([0-9]{1,10})\.([0-9]{1,10})")


@dataclass(frozen=True)
class JobLocation:
    """Where a job is looked up.

    schedd, pool: as in ``condor_q -name`` and ``-pool``; ``""``: this host's own. proc: None: the
    cluster's job that :func:`condor.diagnose.daemon_queries.find` prefers.
    """

    schedd: str
    pool: str
    cluster: int
    proc: int | None = None


@dataclass(frozen=True)
class JobFinding:
    """Explains a job's state. remedy: what to do about it; ``""`` if there is no advice."""

    code: str
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class JobFacts:
    """Data of a job. attributes: evaluated. is_queued: it is in the queue, not in the history.

    ad: its text, ``""`` if that is too long. jobs: number of its cluster's jobs by ``JobStatus``.
    """

    attributes: Mapping[str, Any]
    is_queued: bool = True
    ad: str = ""
    jobs: Mapping[str, int] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """A string; ``""`` if there is none."""
        value = self.attributes.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> float | None:
        """A number; None if there is none."""
        value = self.attributes.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def count(self, name: str) -> int:
        """A number, rounded down; 0 if there is none."""
        return int(self.number(name) or 0)

    @property
    def status(self) -> int:
        return self.count(names.JOB_STATUS)

    @property
    def tries(self) -> int:
        """The number of starts, without those that ended by eviction."""
        return self.count("NumJobStarts") - self.count(names.VM_VACATED)

    @property
    def id(self) -> str:
        """``CLUSTER.PROC``."""
        return f"{self.count(names.CLUSTER_ID)}.{self.count(names.PROC_ID)}"

    @property
    def schedd(self) -> str:
        return self.text(names.GLOBAL_ID).partition("#")[0]

    @property
    def is_remote(self) -> bool:
        """Whether it goes to another schedd."""
        return self.count("JobUniverse") == GRID

    @property
    def is_routed(self) -> bool:
        """Whether a job router sends a copy of it to another schedd."""
        return self.attributes.get(names.POLICY) == names.ROUTED

    @property
    def wants_vm(self) -> bool:
        """Whether it runs in a VM of vmjobs."""
        return names.WANTED_IMAGE in self.attributes or names.JOB_ID in self.attributes


def status_findings(job: JobFacts) -> list[JobFinding]:
    """Findings for a job that is not idle; empty for an idle one."""
    if job.status == HELD and job.is_queued:
        return [_held(job)]
    if job.status == IDLE and job.is_queued:
        return []
    reason = job.text(names.REMOVE_REASON)
    where = job.text("RemoteHost") or job.text(names.VM_NODE)
    vm = f"; its VM is {state}" if (state := job.text(names.VM_STATE)) else ""
    words = {
        RUNNING: ("RUNNING", f"it runs{f' on {where}' if where else ''}{vm}"),
        TRANSFERRING: ("TRANSFERRING", "it has ended, and its output is transferred"),
        SUSPENDED: ("SUSPENDED", "it is suspended until condor_continue"),
        COMPLETED: ("COMPLETED", f"it has ended, {_ended(job)}"),
        REMOVED: (
            "REMOVING" if job.is_queued else "REMOVED",
            f"it was removed: {reason or 'no reason given'}",
        ),
    }
    code, message = words.get(job.status, ("GONE", "it has left the queue"))
    if code == "REMOVING":
        message += "; it leaves the queue once it is known to have stopped"
    findings = [JobFinding(code, message)]
    if code == "COMPLETED" and job.text(names.VM_REASON).startswith(outcomes.OUT_OF_MEMORY):
        findings.append(
            JobFinding("OUT_OF_MEMORY", outcomes.OUT_OF_MEMORY_REASON, outcomes.OUT_OF_MEMORY_ADVICE)
        )
    return findings


def _ended(job: JobFacts) -> str:
    if job.attributes.get(names.EXIT_BY_SIGNAL) is True:
        return f"by signal {job.count(names.EXIT_SIGNAL)}"
    return (
        f"with status {job.count(names.EXIT_CODE)}"
        if names.EXIT_CODE in job.attributes
        else "with an unknown status"
    )


def _held(job: JobFacts) -> JobFinding:
    code, subcode = job.count(names.HOLD_CODE), job.count(names.HOLD_SUBCODE)
    reason, console, _ = job.text(names.HOLD_REASON).partition(_CONSOLE)
    if code == hold_advice.SPOOLING:
        return JobFinding(
            "SPOOLING", "its input files are on their way into the schedd's spool directory"
        )
    sentence = hold_advice.hold_reason(code, subcode)
    said = f"{sentence} ({reason})" if sentence else reason or "no reason given"
    if sentence and (node := job.text(names.VM_NODE)):
        said += f" on {node}"
    if console:
        said += f"; condor_q -af HoldReason {job.id} has the console's last lines"
    remedy = hold_advice.remedy(code, subcode, job.id, starts=job.tries, is_remote=job.is_remote)
    if job.is_routed and remote_job(job):
        remedy += "; wait until the job router has removed its copy, which would hold the job again"
    return JobFinding("HELD", f"{said} [HoldReasonCode {code}, sub-code {subcode}]", remedy)


def remote_job(job: JobFacts) -> JobLocation | None:
    """The copy that Condor-C or a job router has made of a job; None if there is none.

    A job router's copy is at the job's own schedd: schedd and pool are ``""``.
    """
    if job.is_routed:
        copy = _COPY_ID.fullmatch(job.text(names.ROUTED_TO))
        # The attribute may still name the copy from before a hold.
        taken = job.text(names.MANAGED) == "External"
        return JobLocation("", "", int(copy[1]), int(copy[2])) if copy and taken else None
    found = _JOB_ID.fullmatch(job.text(names.GRID_JOB_ID))
    return JobLocation(found[1], found[2], int(found[3]), int(found[4])) if found else None


def router_finding(job: JobFacts) -> JobFinding:
    """The finding for an idle job that a job router should take."""
    if at := remote_job(job):
        return JobFinding("AT_SITE", f"its copy is job {at.cluster}.{at.proc}")
    return JobFinding(
        "NOT_ROUTED",
        f"the job router at {job.schedd} has not taken it yet{_since(job, 'EnteredCurrentStatus')}",
        "if this lasts for minutes, read JobRouterLog there, and run `vmjobs doctor` there",
    )


def grid_finding(job: JobFacts) -> JobFinding:
    """The finding for an idle grid job."""
    resource = job.text(names.GRID_RESOURCE)
    found = _RESOURCE.fullmatch(resource)
    if not found:
        return JobFinding(
            "NO_ROUTE",
            f"its grid_resource is {resource or 'not set'} (expected 'condor SCHEDD COLLECTOR')",
            "set grid_resource in its submit file",
        )
    if at := remote_job(job):
        return JobFinding("AT_SITE", f"it waits at {at.schedd} as job {at.cluster}.{at.proc}")
    schedd, collector = found[1], found[2]
    if "GridResourceUnavailableTime" in job.attributes:
        since = _since(job, "GridResourceUnavailableTime")
        return JobFinding(
            "SITE_DOWN",
            f"the gridmanager cannot reach the schedd {schedd} (collector {collector}){since}",
            f"condor_ping -pool {collector} -name {schedd} -type schedd WRITE shows why",
        )
    return JobFinding(
        "NOT_SENT",
        f"the gridmanager has not sent it to {schedd} yet",
        "if this lasts for minutes, read its log, GridmanagerLog",
    )


def unreadable_finding(at: JobLocation, why: str) -> JobFinding:
    """The finding for a job at a site whose daemons could not be queried."""
    unknown = "does not know schedd" in why
    where = at.schedd or "the same schedd"
    return JobFinding(
        "NO_ROUTE" if unknown else "SITE_UNREADABLE",
        f"it waits at {where} as job {at.cluster}.{at.proc}; the reason could not be read: {why}",
        f"ask there: vmjobs job why {at.cluster}.{at.proc}",
    )


def _since(job: JobFacts, name: str) -> str:
    now, then = job.number("ServerTime"), job.number(name)
    return "" if not now or not then else f", for {format_seconds(now - then)}"


def format_seconds(count: float) -> str:
    """A time span for people, in its largest suitable unit."""
    whole = max(0, int(count))
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if whole >= 2 * size:
            return f"{whole // size} {unit}"
    return f"{whole} s"


def format_nodes(nodes: Mapping[str, Any]) -> str:
    """Names of nodes, a few of them."""
    found: Sequence[str] = nodes.get("names", [])
    more = int(nodes.get("count", 0)) - len(found)
    return ", ".join(found) + (f" and {more} more" if more > 0 else "")
