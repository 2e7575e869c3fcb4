"""Explain a job's state: query HTCondor's daemons, and follow the job to other schedds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from condor.daemon_client import CallError, call
from condor.diagnose import findings as rules
from condor.diagnose.findings import JobFacts, JobFinding, JobLocation
from condor.diagnose.pool_findings import PoolFacts, pool_findings
from vmjobs.errors import NotFound, Unavailable

#: At how many other schedds a job is looked up, one after the other.
MAX_REMOTE_SCHEDDS: Final = 3
#: For each query.
TIMEOUT_SECONDS: Final = 60.0


@dataclass(frozen=True)
class JobExplanation:
    """The explanation of a job's state.

    id, state (in words), jobs (number by ``JobStatus``, of its cluster): at the first schedd. route:
    ``ID at SCHEDD`` for each schedd that has it, in order. findings: at least one, the answer first.
    job: at the last schedd. pool: analysis of the pool's nodes, if they were compared with the job.
    """

    id: str
    route: Sequence[str]
    state: str
    findings: Sequence[JobFinding]
    job: JobFacts
    pool: PoolFacts | None = None
    jobs: Mapping[str, int] = field(default_factory=dict)


def explain_job(place: JobLocation) -> JobExplanation:
    """Explain a job's state. Queries daemons as this process's user.

    Raises:
        NotFound: neither queue nor history of the schedd has it.
        Unavailable: the schedd or the pool does not answer.
    """
    job = _find(place)
    route = [_job_at_schedd(job, place)]
    last, findings, pool = _follow(job, place, route)
    state = (
        rules.STATUS_TEXT.get(job.status, "in an unknown state")
        if job.is_queued
        else "not in the queue"
    )
    return JobExplanation(job.id, route, state, findings, last, pool, job.jobs)


def _follow(
    job: JobFacts, place: JobLocation, route: list[str]
) -> tuple[JobFacts, list[JobFinding], PoolFacts | None]:
    """Follow a job to its last schedd: the job there, and rules. Appends to ``route``."""
    if findings := rules.status_findings(job):
        return job, findings, None
    if not job.is_remote and not job.is_routed:
        return job, *_waiting(job, place)
    at = rules.remote_job(job)
    if at is None or len(route) > MAX_REMOTE_SCHEDDS:
        return job, [rules.router_finding(job) if job.is_routed else rules.grid_finding(job)], None
    there = JobLocation(at.schedd or place.schedd, at.pool or place.pool, at.cluster, at.proc)
    try:
        copy = _find(there)
        route.append(_job_at_schedd(copy, there))
        return _follow(copy, there, route)
    except (Unavailable, NotFound) as error:
        return job, [rules.unreadable_finding(at, error.message)], None


def _find(place: JobLocation) -> JobFacts:
    """Find a job in the queue or the history of its schedd."""
    answer = _call("find", "schedd", **asdict(place))
    if not answer["attributes"]:
        wanted = f"{place.cluster}" if place.proc is None else f"{place.cluster}.{place.proc}"
        where = f"the schedd {place.schedd}" if place.schedd else "this host's schedd"
        raise NotFound(
            f"{where} has no job {wanted}, in its queue or its history",
            hint="--schedd NAME and --pool COLLECTOR ask another one",
        )
    return JobFacts(answer["attributes"], answer["queued"], answer["ad"], answer["jobs"])


def _waiting(job: JobFacts, place: JobLocation) -> tuple[list[JobFinding], PoolFacts | None]:
    universe = job.count("JobUniverse")
    if universe != rules.VANILLA:
        message = f"it is in HTCondor's universe {universe}, which vmjobs does not analyse"
        return [JobFinding("UNIVERSE", message, "condor_q -better-analyze")], None
    if not job.ad:
        return [JobFinding("UNREAD", "its ad is too long to analyse")], None
    pool = PoolFacts(**_call("explain", "pool", pool=place.pool, ad=job.ad))
    return pool_findings(job, pool), pool


def _call(verb: str, service: str, **arguments: Any) -> Mapping[str, Any]:
    try:
        return call(verb, TIMEOUT_SECONDS, **arguments)
    except CallError as error:
        raise Unavailable(service, str(error), hint=_HINT) from error


def _job_at_schedd(job: JobFacts, place: JobLocation) -> str:
    return f"{job.id} at {job.schedd or place.schedd or 'this host'}"


_HINT: Final = "condor_ping -type schedd READ and -type collector READ show whether they give access"
