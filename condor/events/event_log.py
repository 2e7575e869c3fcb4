"""Follow jobs by their event logs, which is prompt and costs no query.

:func:`apply_event` is pure and turns events into the latest observation of each job.
:class:`EventLogs` reads the files, remembers its position, and starts over after a restart: the logs
contain all it needs, and the note of each submit event names the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import htcondor2
from htcondor2 import JobEventType

from condor import names
from vmjobs.batch import BatchStatus, Observation
from vmjobs.model import CondorRef

log = logging.getLogger(__name__)

#: The line that ends each event.
_END: Final = b"...\n"

Key = tuple[int, int]
Event = Mapping[str, Any]

#: Event -> status, and the attribute with the reason. Other events change no status.
_STATUS: Final[Mapping[int, tuple[BatchStatus, str]]] = {
    JobEventType.EXECUTE: (BatchStatus.RUNNING, ""),
    JobEventType.JOB_EVICTED: (BatchStatus.IDLE, "Reason"),
    JobEventType.JOB_TERMINATED: (BatchStatus.COMPLETED, ""),
    JobEventType.SHADOW_EXCEPTION: (BatchStatus.IDLE, "Message"),
    JobEventType.JOB_ABORTED: (BatchStatus.REMOVED, "Reason"),
    JobEventType.JOB_SUSPENDED: (BatchStatus.SUSPENDED, ""),
    JobEventType.JOB_UNSUSPENDED: (BatchStatus.RUNNING, ""),
    JobEventType.JOB_HELD: (BatchStatus.HELD, "HoldReason"),
    JobEventType.JOB_RELEASED: (BatchStatus.IDLE, "Reason"),
    JobEventType.JOB_DISCONNECTED: (BatchStatus.RUNNING, "DisconnectReason"),
    JobEventType.JOB_RECONNECTED: (BatchStatus.RUNNING, ""),
    JobEventType.JOB_RECONNECT_FAILED: (BatchStatus.IDLE, "Reason"),
}

#: A job with one of these has left the queue; later events of it are bookkeeping.
_FINAL: Final = frozenset({BatchStatus.COMPLETED, BatchStatus.REMOVED})


def apply_event(observations: dict[Key, Observation], kind: int, event: Event, schedd: str) -> None:
    """Update ``observations`` with one event; ignore jobs that vmjobs did not submit."""
    key = (int(event.get("Cluster", -1)), int(event.get("Proc", -1)))
    if kind == JobEventType.SUBMIT:
        job_id = _job_of(event)
        if job_id:
            ref = CondorRef(schedd=schedd, cluster=key[0], proc=key[1])
            observations[key] = Observation(job_id, BatchStatus.IDLE, ref)
        return
    seen = observations.get(key)
    if seen is None or seen.status in _FINAL:
        return
    if kind == JobEventType.GRID_SUBMIT:
        grid_job_id = str(event.get("GridJobId", ""))
        observations[key] = replace(seen, ref=seen.ref.model_copy(update={"grid_job_id": grid_job_id}))
    elif kind == JobEventType.GRID_RESOURCE_DOWN:
        resource = event.get("GridResource", "the grid resource")
        observations[key] = replace(seen, reason=f"{resource} does not answer")
    elif kind == JobEventType.GRID_RESOURCE_UP:
        observations[key] = replace(seen, reason="")
    elif kind in _STATUS:
        observations[key] = _with_event(seen, kind, event)


def _with_event(seen: Observation, kind: int, event: Event) -> Observation:
    status, attribute = _STATUS[kind]
    reason = " ".join(str(event.get(attribute, "")).split()) if attribute else ""
    changed = replace(seen, status=status, reason=reason, exit_code=None, exit_signal=None)
    if kind != JobEventType.JOB_TERMINATED:
        return changed
    if event.get("TerminatedNormally", True):
        return replace(changed, exit_code=_number(event, "ReturnValue"))
    return replace(changed, exit_signal=_number(event, "TerminatedBySignal"))


def _job_of(event: Event) -> str:
    for line in str(event.get("LogNotes", "")).splitlines():
        word, _, job_id = line.strip().partition(" ")
        if word == names.EVENT_NOTE:
            return job_id
    return ""


def _number(event: Event, name: str) -> int | None:
    value = event.get(name)
    return int(value) if isinstance(value, (int, float)) else None


@dataclass
class _LogRecord:
    """The position up to which a log was read, and its observations."""

    seen: tuple[int, int, int] = (0, 0, 0)  # inode, size, mtime in ns
    state: Any = None
    observations: dict[Key, Observation] = field(default_factory=dict)


class EventLogs:
    """Reads the event logs of arrays: only the events added since the last time.

    A log with unchanged inode, size and time is not opened. An event that is partly written is
    read once it is complete.
    """

    def __init__(self, path_of: Callable[[str], Path], schedd: str) -> None:
        self._path_of = path_of
        self._schedd = schedd
        self._logs: dict[str, _LogRecord] = {}

    def latest(self, arrays: Iterable[str]) -> list[Observation]:
        """The latest observation of each job of these arrays; none for an array without a log.

        For a job that was queued more than once, the last time counts.
        """
        found: dict[str, Observation] = {}
        for array in arrays:
            self._read(array)
            observations = self._logs.get(array, _LogRecord()).observations
            for key in sorted(observations):
                found[observations[key].job_id] = observations[key]
        return list(found.values())

    def forget(self, array: str) -> None:
        """Drop the array's position and observations."""
        self._logs.pop(array, None)

    def _read(self, array: str) -> None:
        path = self._path_of(array)
        try:
            status = path.stat()
        except OSError:
            self.forget(array)
            return
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        record = self._logs.get(array)
        if record is None or record.seen[0] != seen[0] or seen[1] < record.seen[1]:
            record = self._logs[array] = _LogRecord()
        try:
            # An incomplete event is left for the next time: given a part of one, the bindings wait a
            # second for the rest, and may lose their position.
            if record.seen != seen and _ends_with_event(path, status.st_size):
                self._advance(path, record)
                record.seen = seen
        except OSError as error:
            log.warning("cannot read event log %s: %s", path, error)

    def _advance(self, path: Path, record: _LogRecord) -> None:
        """Apply the events after the remembered position, and remember the new one."""
        reader = htcondor2.JobEventLog(str(path))
        try:
            if record.state is not None:
                # As unpickling does; a closed reader keeps its position without a file handle.
                reader.__setstate__(record.state)
            for event in reader.events(stop_after=0):
                apply_event(record.observations, int(event["EventTypeNumber"]), event, self._schedd)
            state = reader.__getstate__()
        finally:
            reader.close()
        # Otherwise the same events are applied again next time, which changes nothing.
        if _ends_with_event(path, int(state[1])):
            record.state = state


def _ends_with_event(path: Path, offset: int) -> bool:
    """Whether the file's first ``offset`` bytes end with the end of an event."""
    with path.open("rb") as file:
        file.seek(max(0, offset - len(_END)))
        return offset == 0 or file.read(min(offset, len(_END))) == _END
