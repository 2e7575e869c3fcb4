"""Reads of HTCondor's daemons what explains where a job is, and follows it to where it was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from condor import why
from condor.call import CallError, call
from condor.why import Finding, JobFacts
from condor.why_pool import PoolFacts, of_pool
from vmjobs.errors import NotFound, Unavailable

#: Schedds that a job is followed through, one after the other.
HOPS: Final = 3


@dataclass(frozen=True)
class Place:
    """Where a job is looked for. schedd, pool: as in ``condor_q -name`` and ``-pool``; ``""``: this
    host's own. proc: None: the one of the cluster that is of most interest.
    """

    schedd: str
    pool: str
    cluster: int
    proc: int | None = None


@dataclass(frozen=True)
class Explanation:
    """Why a job is where it is.

    id: where it was asked for. way: ``ID at SCHEDD``, each place it was sent to, the last one last.
    state: in words, where it was asked for. findings: at least one, the answer first. job: as the last
    place has it. pool: what its nodes are to it, if those were looked at. jobs: of its cluster in the
    queue where it was asked for, by ``JobStatus``.
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
    """Asks daemons, as this process's user.

    timeout: seconds for each question.
    """

    def __init__(self, timeout: float = 60.0, ask: Ask = call) -> None:
        self._timeout = timeout
        self._ask = ask

    def explain(self, place: Place) -> Explanation:
        """Why a job is where it is.

        Raises:
            NotFound: neither queue nor history of the schedd has it.
            Unavailable: the schedd does not answer, or the pool does not.
        """
        job = self.find(place)
        way = [_at(job, place)]
        last, findings, pool = self._follow(job, place, way)
        state = why.STATUS.get(job.status, "in an unknown state") if job.queued else "not in the queue"
        return Explanation(job.id, way, state, findings, last, pool, job.jobs)

    def _follow(
        self, job: JobFacts, place: Place, way: list[str]
    ) -> tuple[JobFacts, list[Finding], PoolFacts | None]:
        """The job as the last place has it that it was sent to, and why; ``way`` gets the places."""
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
        """A job.

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
            message = f"it is of HTCondor's universe {universe}, which is not looked at here"
            return [Finding("UNIVERSE", message, "condor_q -better-analyze")], None
        if not job.ad:
            return [Finding("UNREAD", "its ad is too long to be looked at")], None
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


_HINT: Final = "condor_ping -type schedd READ and -type collector READ show what lets us in"
