"""Calls to the schedd that jobs are submitted to, with a time-out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from condor.daemon_client import Ad, CallError, RefusedError, call, submit
from condor.submit.description import Submission
from vmjobs.errors import ConfigError, Unavailable
from vmjobs.model import JobAction


class Schedd:
    """Calls to one schedd.

    name: its name in the collector; ``""`` is the local one.
    pool: the collector to ask; ``""`` is the one that HTCondor's configuration names.
    timeout: seconds for each call, including finding the schedd.

    Every method raises :class:`vmjobs.errors.Unavailable` with the daemon and its address if the call
    fails for any reason; a retry may succeed.
    """

    def __init__(self, name: str, pool: str, timeout: float) -> None:
        self._name = name
        self._pool = pool
        self._timeout = timeout

    def submit(self, submission: Submission, held: Sequence[int] = ()) -> int:
        """Queue one job for each item, in order, in one transaction, and return their cluster.

        held: file descriptors that stay open until the submission ends, even if this process dies.
        Raises ConfigError: the schedd answers queries, but rejects these jobs.
        """
        try:
            with self._translated():
                text = submission.text()
                return submit(self._timeout, held, schedd=self._name, pool=self._pool, file=text)
        except RefusedError as error:
            self.query("false", ())
            raise ConfigError(f"the schedd rejects the job: {error}") from error

    def act(self, action: JobAction, ids: Sequence[str], why: str) -> None:
        """Remove, hold or release jobs (``cluster.proc``); unknown ones are no error."""
        refused = self._call("act", action=_ACTIONS[action], ids=list(ids), why=why)["refused"]
        if refused:
            raise self._unavailable(f"refused to {action} {refused} of {len(ids)} jobs")

    def query(self, constraint: str, projection: Sequence[str]) -> list[Ad]:
        """Ads of jobs in the queue."""
        answer = self._call("query", constraint=constraint, projection=list(projection))
        return list(answer["ads"])

    def history(
        self, constraint: str, projection: Sequence[str], limit: int, until: str = ""
    ) -> list[Ad]:
        """Ads of at most ``limit`` jobs that left the queue, the latest first.

        until: reading stops at the first job for which this expression is true.
        """
        answer = self._call(
            "history", constraint=constraint, projection=list(projection), limit=limit, until=until
        )
        return list(answer["ads"])

    def _call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        with self._translated():
            return call(verb, self._timeout, schedd=self._name, pool=self._pool, **arguments)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except CallError as error:
            if error.named:
                raise Unavailable("schedd", str(error), hint=_HINT) from error
            raise self._unavailable(str(error)) from error

    def _unavailable(self, what: str) -> Unavailable:
        name = self._name or "of this host"
        pool = f" (collector {self._pool})" if self._pool else ""
        return Unavailable("schedd", f"schedd {name}{pool}: {what}", hint=_HINT)


#: Names of the actions in HTCondor's bindings.
_ACTIONS: Final = {
    JobAction.CANCEL: "Remove",
    JobAction.HOLD: "Hold",
    JobAction.RELEASE: "Release",
}
_HINT: Final = "condor_ping -type schedd -table WRITE shows whether it answers and gives access"
