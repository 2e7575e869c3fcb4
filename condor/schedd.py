"""The schedd that jobs are submitted to, behind calls that always come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from condor.call import Ad, CallError, RefusedError, call, submit
from condor.submit import Submission
from vmjobs.errors import ConfigError, Unavailable
from vmjobs.model import JobAction


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

    def submit(self, submission: Submission, held: Sequence[int] = ()) -> int:
        """Queue one job for each item in one transaction, in their order; the cluster.

        held: file descriptors that stay open as long as the submission may go on, should we die.
        Raises ConfigError: the schedd answers other questions, and does not take these jobs.
        """
        try:
            with self._translated():
                text = submission.text()
                return submit(self._timeout, held, schedd=self._name, pool=self._pool, file=text)
        except RefusedError as error:
            self.query("false", ())
            raise ConfigError(f"the schedd takes no such job: {error}") from error

    def act(self, action: JobAction, ids: Sequence[str], why: str) -> None:
        """Remove, hold or release jobs (``cluster.proc``); those that are not there are no error."""
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

        until: where to stop reading: at the first job that this is true for.
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


#: What HTCondor's bindings call it.
_ACTIONS: Final = {
    JobAction.CANCEL: "Remove",
    JobAction.HOLD: "Hold",
    JobAction.RELEASE: "Release",
}
_HINT: Final = "condor_ping -type schedd -table WRITE shows whether it is reachable and lets us in"
