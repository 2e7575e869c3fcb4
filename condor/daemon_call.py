"""The program that calls a daemon: one request on stdin, one answer on stdout, both JSON.

It runs as a separate process (see :mod:`condor.daemon_client`), because calls of HTCondor's bindings
block without a time-out while a schedd hangs, and the history call of some versions crashes the
interpreter when no schedd listens. It imports nothing from vmjobs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from condor import names

Request = Mapping[str, Any]
Verb = Callable[[Any, Any, Request], dict[str, Any]]


class CallFailedError(Exception):
    """A failed call; the message contains the daemon and its address."""


def answer(request: Request) -> dict[str, Any]:
    """Carry out one request; ``{"error": message}`` if that fails."""
    import htcondor2  # noqa: PLC0415  the caller handles a missing module

    try:
        if verb := _COLLECTOR_VERBS.get(str(request["verb"])):
            return _ask_collector(htcondor2, verb, request)
        return _ask_schedd(htcondor2, _SCHEDD_VERBS[str(request["verb"])], request)
    except CallFailedError as error:
        return {"error": str(error)}


def _ask_schedd(htcondor2: Any, verb: Verb | None, request: Request) -> dict[str, Any]:
    ad = _locate(htcondor2, str(request["schedd"]), str(request["pool"]))
    address = str(ad["MyAddress"])
    try:
        if verb is None:
            _submit(ad, request)
        return verb(htcondor2, htcondor2.Schedd(ad), request)
    except _binding_errors(htcondor2) as error:
        where = f"schedd {ad.get('Name', '')} at {address.partition('?')[0].strip('<>')}"
        raise CallFailedError(f"{where}: {_error_text(error)}") from error


def _ask_collector(htcondor2: Any, verb: Verb, request: Request) -> dict[str, Any]:
    pool = str(request["pool"])
    try:
        collector = htcondor2.Collector(pool) if pool else htcondor2.Collector()
        return verb(htcondor2, collector, request)
    except _binding_errors(htcondor2) as error:
        raise CallFailedError(
            f"collector {_collector_name(htcondor2, pool)}: {_error_text(error)}"
        ) from error


def _binding_errors(htcondor2: Any) -> tuple[type[Exception], ...]:
    """Exceptions of the bindings: built-in ones up to version 23, their own since."""
    own = getattr(htcondor2, "HTCondorException", None)
    common = (OSError, RuntimeError, ValueError, TypeError, LookupError)
    return (*common, own) if isinstance(own, type) else common


def _locate(htcondor2: Any, name: str, pool: str) -> Any:
    where = f"collector {_collector_name(htcondor2, pool)}"
    try:
        collector = htcondor2.Collector(pool) if pool else htcondor2.Collector()
        if name:
            ad = collector.locate(htcondor2.DaemonType.Schedd, name)
        elif pool:
            ads = collector.locateAll(htcondor2.DaemonType.Schedd)
            ad = ads[0] if len(ads) == 1 else None
        else:
            ad = collector.locate(htcondor2.DaemonType.Schedd)
    except _binding_errors(htcondor2) as error:
        raise CallFailedError(f"{where}: {_error_text(error)}") from error
    if ad is None or ad.get("MyAddress") is None:
        raise CallFailedError(f"{where} does not know schedd {name or '(the only one)'}")
    return ad


def _collector_name(htcondor2: Any, named: str) -> str:
    return named or str(htcondor2.param.get("COLLECTOR_HOST", "")) or "of this host"


def _error_text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _submit(ad: Any, request: Request) -> NoReturn:
    """Replace this process by ``condor_submit``, so that a time-out kills it too.

    The bindings of 23.9 send the jobs' shared attributes again for each job, and the schedd examines
    all of them each time: 400 jobs keep it busy for 13 s, 1,000 for more than a minute.
    """
    with tempfile.TemporaryFile() as lines:
        lines.write(str(request["file"]).encode())
        lines.seek(0)
        os.dup2(lines.fileno(), 0)
    # By name: condor_submit treats a schedd given by its address as a very old version.
    pool = ["-pool", str(request["pool"])] if request["pool"] else []
    name = ["-name", str(ad["Name"])] if pool or request["schedd"] else []
    command = ["condor_submit", "-terse", *pool, *name, "-"]
    os.execvp(command[0], command)  # noqa: S606  no shell is involved


def _act(htcondor2: Any, schedd: Any, request: Request) -> dict[str, Any]:
    # The bindings accept a reason only as the first item of a tuple.
    why = (str(request["why"]), 0)
    action = getattr(htcondor2.JobAction, str(request["action"]))
    totals = schedd.act(action, list(request["ids"]), why)
    refused = int(totals["TotalPermissionDenied"]) + int(totals["TotalError"])
    return {"refused": refused}


def _query(_: Any, schedd: Any, request: Request) -> dict[str, Any]:
    return {"ads": _literals(schedd.query(request["constraint"], list(request["projection"])))}


def _history(_: Any, schedd: Any, request: Request) -> dict[str, Any]:
    import classad2  # noqa: PLC0415  the caller handles a missing module

    projection = list(request["projection"])
    # Newest first, up to the first job that `until` is true for.
    until = classad2.ExprTree(request["until"]) if request["until"] else None
    limit = int(request["limit"])
    return {"ads": _literals(schedd.history(request["constraint"], projection, limit, until))}


def _startds(htcondor2: Any, collector: Any, request: Request) -> dict[str, Any]:
    kind = htcondor2.AdType.Startd
    projection = list(request["projection"])
    return {"ads": _literals(collector.query(kind, request["constraint"], projection))}


def _withdraw(_: Any, collector: Any, request: Request) -> dict[str, Any]:
    import classad2  # noqa: PLC0415  the caller handles a missing module

    query = classad2.ClassAd({"MyType": "Query", "TargetType": "Machine"})
    query["Requirements"] = classad2.ExprTree(str(request["constraint"]))
    collector.advertise([query], "INVALIDATE_STARTD_ADS", True)
    return {}


def _revoke(htcondor2: Any, collector: Any, request: Request) -> dict[str, Any]:
    """Publish users whose tokens are revoked, for some seconds. Keeps unexpired entries."""
    now = int(time.time())
    until = now + int(request["seconds"])
    said = {str(user): until for user in request["users"]}
    # This ad is not in the slots' table, so no job is matched with it.
    name = json.dumps(names.REVOKED_NAME)
    for ad in collector.query(htcondor2.AdType.Any, f"Name =?= {name}", ["VMJobsRevoked"]):
        for entry in str(ad.get("VMJobsRevoked", "")).split(","):
            expires, _, user = entry.partition(":")
            if expires.isdecimal() and now < int(expires):
                said.setdefault(user, int(expires))
    ad = _ad({"MyType": '"StartD"', "Name": name, "Requirements": "false"})
    ad["MyAddress"] = "<127.0.0.1:9>"
    ad["ClassAdLifetime"] = max(said.values()) - now
    ad["VMJobsRevoked"] = ",".join(f"{expires}:{user}" for user, expires in sorted(said.items()))
    collector.advertise([ad], "UPDATE_STARTD_AD", True)
    return {}


def _idle(htcondor2: Any, collector: Any, request: Request) -> dict[str, Any]:
    from condor.pool import idle_jobs  # noqa: PLC0415  only this verb needs it

    kinds = [idle_jobs.ClusterAd(str(k["cluster"]), _ad(k["ad"])) for k in request["kinds"]]
    groups, problems = [], []
    named = str(request["schedd"])
    for ad in idle_jobs.schedds(htcondor2, collector, named):
        try:
            groups += list(idle_jobs.idle_job_groups(htcondor2.Schedd(ad)))
        except _binding_errors(htcondor2) as error:
            problem = f"schedd {ad.get('Name', '')}: {_error_text(error)}"
            if ad.get("Name") == named:
                raise CallFailedError(problem) from error
            problems.append(problem)
    learn = [str(k["learn"]) for k in request["kinds"] if k["learn"]]
    constraint = "Offline =!= true && DynamicSlot =!= true"
    if not groups:
        constraint += f" && stringListMember(VMJobsMember, {json.dumps(','.join(learn))}) =?= true"
    slots = collector.query(htcondor2.AdType.Startd, constraint) if groups or learn else []
    known = {ad["VMJobsMember"]: _literals([ad])[0] for ad in slots if ad.get("VMJobsMember") in learn}
    waiting = idle_jobs.count_idle_jobs(
        groups, kinds, [idle_jobs.with_full_capacity(ad) for ad in slots]
    )
    return {"waiting": waiting, "known": known, "problems": problems}


def _find(_: Any, schedd: Any, request: Request) -> dict[str, Any]:
    from condor.diagnose import daemon_queries  # noqa: PLC0415  only these verbs need it

    return daemon_queries.find(schedd, int(request["cluster"]), request["proc"])


def _explain(htcondor2: Any, collector: Any, request: Request) -> dict[str, Any]:
    from condor.diagnose import daemon_queries  # noqa: PLC0415  only these verbs need it

    return daemon_queries.explain(htcondor2, collector, str(request["ad"]))


def _offer(htcondor2: Any, collector: Any, request: Request) -> dict[str, Any]:
    """Advertise offline ads that are missing, changed or due for renewal; withdraw all others."""
    ads = {str(ad["Name"]): ad for ad in map(_ad, request["ads"])}
    ours = "Offline =?= true && VMJobsOffer =!= undefined"
    there = {}
    for ad in collector.query(
        htcondor2.AdType.Startd, ours, ["Name", "VMJobsOffer", "LastHeardFrom", "MyCurrentTime"]
    ):
        young = abs(time.time() - int(ad["LastHeardFrom"])) < int(request["renew"])
        there[str(ad["Name"])] = str(ad["VMJobsOffer"]) if young else ""
    if stale := [name for name in there if name not in ads]:
        named = f"stringListMember(Name, {json.dumps(','.join(stale))}) =?= true"
        _withdraw(htcondor2, collector, {"constraint": f"{ours} && {named}"})
    news = [ad for name, ad in ads.items() if there.get(name) != ad["VMJobsOffer"]]
    for ad in news:
        now = int(time.time())
        ad["EnteredCurrentState"] = ad["EnteredCurrentActivity"] = ad["MyCurrentTime"] = now
    if news:
        collector.advertise(news, "UPDATE_STARTD_AD", True)
    return {"advertised": [str(ad["Name"]) for ad in news], "withdrawn": stale}


def _ad(expressions: Mapping[str, str]) -> Any:
    import classad2  # noqa: PLC0415  the caller handles a missing module

    ad = classad2.ClassAd()
    for name, expression in expressions.items():
        ad[str(name)] = classad2.ExprTree(str(expression))
    return ad


def _literals(ads: Any) -> list[dict[str, Any]]:
    """The literals of ads; undefined values and expressions are left out."""
    kinds = (bool, int, float, str)
    return [{str(k): v for k, v in ad.items() if type(v) in kinds} for ad in ads]


_COLLECTOR_VERBS: Final[Mapping[str, Verb]] = {
    "startds": _startds,
    "withdraw": _withdraw,
    "revoke": _revoke,
    "idle": _idle,
    "offer": _offer,
    "explain": _explain,
}
_SCHEDD_VERBS: Final[Mapping[str, Verb | None]] = {
    "submit": None,
    "act": _act,
    "query": _query,
    "history": _history,
    "find": _find,
}


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
