"""The schedd that jobs are submitted to, behind calls that always come back.

Every call is a short-lived process (:mod:`condor.schedd_call`, about 0.1 s) with a deadline.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from condor.submit import Submission
from vmjobs.errors import Unavailable

log = logging.getLogger(__name__)

PROGRAM: Final = Path(__file__).with_name("schedd_call.py")
Ad = Mapping[str, Any]


class Schedd:
    """Calls to one schedd.

    name: as its collector knows it; ``""`` is the local one.
    pool: the collector to ask; ``""`` is the one HTCondor's configuration names.
    timeout: seconds for each call, finding the schedd included.

    Every method raises :class:`vmjobs.errors.Unavailable` with the daemon and its address where
    the call fails, whatever the reason: only trying again can tell.
    """

    def __init__(self, name: str, pool: str, timeout: float) -> None:
        self._name = name
        self._pool = pool
        self._timeout = timeout

    def submit(self, submission: Submission) -> tuple[int, int]:
        """Queue one job for each item in one transaction; cluster and first proc."""
        answer = self._call("submit", description=submission.description, items=submission.items)
        if answer["count"] != len(submission.items):
            raise self._unavailable(f"queued {answer['count']} jobs of {len(submission.items)}")
        return int(answer["cluster"]), int(answer["proc"])

    def remove(self, ids: Sequence[str], why: str) -> None:
        """Remove jobs (``cluster.proc``); those that are not there are no error."""
        refused = self._call("remove", ids=list(ids), why=why)["refused"]
        if refused:
            raise self._unavailable(f"refused to remove {refused} of {len(ids)} jobs")

    def query(self, constraint: str, projection: Sequence[str]) -> list[Ad]:
        """Ads of jobs in the queue."""
        answer = self._call("query", constraint=constraint, projection=list(projection))
        return list(answer["ads"])

    def history(self, constraint: str, projection: Sequence[str], limit: int) -> list[Ad]:
        """Ads of at most ``limit`` jobs that left the queue, the latest first."""
        answer = self._call("history", constraint=constraint, projection=list(projection), limit=limit)
        return list(answer["ads"])

    def _call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        request = {"verb": verb, "schedd": self._name, "pool": self._pool, **arguments}
        try:
            # -P: this folder's modules must not be taken for the standard library's.
            done = subprocess.run(
                [sys.executable, "-P", str(PROGRAM)],
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=self._timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise self._unavailable(f"no answer to '{verb}' within {self._timeout:g} s") from error
        if done.returncode != 0:
            log.warning("%s call: %s", verb, done.stderr.decode("utf-8", "replace")[-2000:].strip())
            raise self._unavailable(f"the '{verb}' call ended with status {done.returncode}")
        answer: dict[str, Any] = json.loads(done.stdout)
        if "error" in answer:
            raise Unavailable("schedd", str(answer["error"]), hint=_HINT)
        return answer

    def _unavailable(self, what: str) -> Unavailable:
        name = self._name or "of this host"
        pool = f" (collector {self._pool})" if self._pool else ""
        return Unavailable("schedd", f"schedd {name}{pool}: {what}", hint=_HINT)


_HINT: Final = "condor_ping -type schedd -table WRITE shows whether it is reachable and lets us in"
