"""Explain a job's state: query HTCondor's daemons, and follow the job to other schedds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from condor import why
from condor.call import CallError, call
from condor.why import Finding, JobFacts
from condor.why_pool import PoolFacts, of_pool
from vmjobs.errors import NotFound, Unavailable

#: At how many other schedds a job is looked up, one after the other.
HOPS: Final = 3


@dataclass(frozen=True)
class Place:
    """Where a job is looked up.

    schedd, pool: as in ``condor_q -name`` and ``-pool``; ``""``: this host's own. proc: None: the
    cluster's job that :func:`condor.diagnose.daemon_queries.find` prefers.
    """

    schedd: str
    pool: str
    cluster: int
    proc: int | None = None


@dataclass(frozen=True)
class Explanation:
    """The explanation of a job's state.

    id, state (in words), jobs (number by ``JobStatus``, of its cluster): at the first schedd. route:
    ``ID at SCHEDD`` for each schedd that has it, in order. findings: at least one, the answer first.
    job: at the last schedd. pool: analysis of the pool's nodes, if they were compared with the job.
    """

    id: str
    way: Sequence[str]
    state: str
    findings: Sequence[Finding]
    job: JobFacts
    pool: PoolFacts | None = None
    jobs: Mapping[str, int] = field(default_factory=dict)


Ask = Callable[..., dict[str, Any]]


class Reader:
    """Queries daemons, as this process's user.

    timeout: seconds for each query.
    """

    def __init__(self, timeout: float = 60.0, ask: Ask = call) -> None:
        self._timeout = timeout
        self._ask = ask

    def explain(self, place: Place) -> Explanation:
        """Explain a job's state.

        Raises:
            NotFound: neither queue nor history of the schedd has it.
            Unavailable: the schedd or the pool does not answer.
        """
        job = self.find(place)
        way = [_at(job, place)]
        last, findings, pool = self._follow(job, place, way)
        state = why.STATUS.get(job.status, "in an unknown state") if job.queued else "not in the queue"
        return Explanation(job.id, way, state, findings, last, pool, job.jobs)

    def _follow(
        self, job: JobFacts, place: Place, way: list[str]
    ) -> tuple[JobFacts, list[Finding], PoolFacts | None]:
        """Follow a job to its last schedd: the job there, and findings. Appends to ``route``."""
        if findings := why.of_status(job):
            return job, findings, None
        if not job.remote and not job.routed:
            return job, *self._waiting(job, place)
        at = why.hop(job)
        if at is None or len(way) > HOPS:
            return job, why.of_router(job) if job.routed else why.of_grid(job), None
        there = Place(at.schedd or place.schedd, at.collector or place.pool, at.cluster, at.proc)
        try:
            copy = self.find(there)
            way.append(_at(copy, there))
            return self._follow(copy, there, way)
        except (Unavailable, NotFound) as error:
            return job, why.of_unread(at, error.message), None

    def find(self, place: Place) -> JobFacts:
        """Find a job in the queue or the history of its schedd.

        Raises:
            NotFound: neither queue nor history has it.
            Unavailable: its schedd does not answer.
        """
        answer = self._call(
            "find",
            "schedd",
            schedd=place.schedd,
            pool=place.pool,
            cluster=place.cluster,
            proc=place.proc,
        )
        if not answer["told"]:
            wanted = f"{place.cluster}" if place.proc is None else f"{place.cluster}.{place.proc}"
            where = f"the schedd {place.schedd}" if place.schedd else "this host's schedd"
            raise NotFound(
                f"{where} has no job {wanted}, in its queue or its history",
                hint="--schedd NAME and --pool COLLECTOR ask another one",
            )
        return JobFacts(answer["told"], answer["queued"], answer["ad"], answer["jobs"])

    def _waiting(self, job: JobFacts, place: Place) -> tuple[list[Finding], PoolFacts | None]:
        universe = job.count("JobUniverse")
        if universe != why.VANILLA:
            message = f"it is in HTCondor's universe {universe}, which vmjobs does not analyse"
            return [Finding("UNIVERSE", message, "condor_q -better-analyze")], None
        if not job.ad:
            return [Finding("UNREAD", "its ad is too long to analyse")], None
        answer = self._call("explain", "pool", pool=place.pool, ad=job.ad)
        pool = PoolFacts(**answer)
        return of_pool(job, pool), pool

    def _call(self, verb: str, service: str, **arguments: Any) -> Mapping[str, Any]:
        try:
            return self._ask(verb, self._timeout, **arguments)
        except CallError as error:
            raise Unavailable(service, str(error), hint=_HINT) from error


def _at(job: JobFacts, place: Place) -> str:
    return f"{job.id} at {job.schedd or place.schedd or 'this host'}"


_HINT: Final = "condor_ping -type schedd READ and -type collector READ show whether they give access"
