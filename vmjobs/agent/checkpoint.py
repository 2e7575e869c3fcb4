"""A run's machine, saved when the job is vacated, and going on from there in another run.

A saved machine is its memory, its disks and what it has said: all of the files of its run. They go
to the repository as blocks, of which only those that are missing there are sent. What a ``kill -9``
leaves:

======================  ==================================================================
killed                  what becomes of the job
======================  ==================================================================
while it is saved       it goes on from the checkpoint before, or begins anew; that is so, too, if it
                        is its machine that is killed
while files are sent    the same; the repository collects what came of them
once they are kept      it goes on from there
while they are fetched  the same: a checkpoint stays until there is another, or an end
before it goes on       the same
======================  ==================================================================

The machine keeps its name, by which its hypervisor knows what it has saved. Its guest gets another
token, and its clock set right, as soon as it asks for anything (``vmjobs.agent.endpoint``).
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from vmjobs.agent.inbox import Observation, SaveOver, SignalSent
from vmjobs.agent.verdict import STOPPING, VACATING, Ended, Verdict, failed, stopped, unwanted
from vmjobs.errors import (
    DigestMismatch,
    HypervisorError,
    InvalidRequest,
    StorageFull,
    Unavailable,
    VMJobsError,
)
from vmjobs.model import (
    MIB,
    Checkpoint,
    JobState,
    ReasonCode,
    SavedFile,
    StreamName,
    reason,
)
from vmjobs.paths import below
from vmjobs.ports import ContentReceiver

if TYPE_CHECKING:
    from vmjobs.agent.run import Run

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Where a machine's memory is kept, in its run's directory.
MEMORY: Final = "machine.memory"
#: Seconds in which a saved machine has to be at the repository: HTCondor gives a job ten minutes.
SEND_SECONDS: Final = 480.0
#: Bytes that a hypervisor writes beside a machine's memory, at most: its devices, where pages are.
MEMORY_SLACK: Final = 64 * MIB
#: Seconds for answers to the guest that are under way when its machine is to be saved.
HUSH_SECONDS: Final = 10.0
#: How a run may end that was no end of its job, if it did not come to go on.
_NO_END: Final = frozenset(
    {
        ReasonCode.BOOT_FAILED,
        ReasonCode.BOOT_TIMED_OUT,
        ReasonCode.KERNEL_PANIC,
        ReasonCode.GUEST_LOST,
        ReasonCode.INPUT_UNAVAILABLE,
        ReasonCode.NODE_FAILED,
        ReasonCode.NO_HYPERVISOR,
    }
)
_DISKS: Final = ("job.disk", "scratch.disk", "output.disk", "seed.disk")
_STREAMS: Final = tuple(f"stream-{name}" for name in StreamName)
_ALLOWED: Final = re.compile(r"machine/[A-Za-z0-9][A-Za-z0-9._-]*")


def platform(run: Run) -> str:
    """What the run's machine can be resumed by once it is saved; empty if it is not to be, or cannot.
    Only where it is to be is the driver asked.
    """
    wanted = run.ticket.spec.checkpoint and run.parts.carrier is not None
    return run.driver.platform if wanted else ""


def resumable(run: Run) -> Checkpoint | None:
    """What the run can go on from, with the driver that it has."""
    saved = run.ticket.checkpoint
    here = platform(run)
    if saved is None or not here:
        return None
    if (saved.hypervisor, saved.platform) == (run.driver.kind, here):
        return saved
    log.warning("job %s was saved by %s, which is not here", run.job_id, saved.platform)
    run.remark = f"the job begins anew: its machine was saved by {saved.platform}, which is not here"
    return None


def not_resumed(verdict: Verdict) -> Verdict:
    """The verdict on a run that was to go on from what was saved, and ended before it did. That was
    no end of the job, whatever else it was: the repository decides from where it is tried again.
    """
    if verdict.state is not JobState.FAILED or verdict.reason.code not in _NO_END:
        return verdict
    text = f"the machine that was saved does not go on: {verdict.reason.message}"
    why = reason(ReasonCode.NOT_RESUMED, text)
    return replace(verdict, state=JobState.PREEMPTED, reason=why, exit=None)


def save(run: Run, heard: int) -> None:
    """End the run with its machine saved. Returns where it could not be, or is not wanted: it goes on.

    The endpoint is hushed. heard: see ``Checkpoint``. Raises Ended.
    """
    began, ran = time.monotonic(), run.ran()
    try:
        if run.link.lost:
            raise VMJobsError("this node could not keep all that it printed")
        upload = _room(run)
        _save_machine(run)
    except VMJobsError as error:
        log.warning("job %s: its machine is not saved: %s", run.job_id, error)
        return
    run.end_machine()
    log.info("job %s: saving its machine took %.1f s", run.job_id, time.monotonic() - began)
    try:
        sent = _have_it_kept(run, upload, partial(_checkpoint, run, round(ran, 1), heard))
    except Ended:
        raise
    except Exception as error:
        message = error.message if isinstance(error, VMJobsError) else str(error)
        log.warning("job %s: its saved machine was not taken: %s", run.job_id, message)
        raise stopped(f"the machine was saved, but could not be kept: {message}") from error
    text = f"its machine was saved, {sent / MIB:.1f} MiB were sent; the job goes on from there"
    raise Ended(Verdict(JobState.PREEMPTED, reason(ReasonCode.CHECKPOINTED, text)))


def _room(run: Run) -> ContentReceiver | None:
    """Room at the repository for what will be saved; None: it does not answer now.

    Raises VMJobsError: it wants none of it; so nothing need be saved.
    """
    files = sum(path.stat().st_size for path in _paths(run.directory).values())
    memory = run.ticket.spec.memory * MIB
    try:
        return run.source.open_upload(files + memory + memory // 8 + MEMORY_SLACK)
    except Unavailable:
        return None


def _save_machine(run: Run) -> None:
    """Raises HypervisorError: it cannot be. Ended: nobody wants that any more; it is gone then."""
    missed: list[Observation] = []
    with ThreadPoolExecutor(1, "save") as pool:
        saving = pool.submit(run.driver.save, run.machine, run.directory / MEMORY)
        saving.add_done_callback(lambda _: run.inbox.put(SaveOver()))
        try:
            while not isinstance(seen := run.inbox.next(math.inf), SaveOver):
                _look_at(seen)
                if seen is not None:
                    missed.append(seen)
        except Ended:
            run.driver.destroy(run.machine)
            raise
    try:
        saving.result()
    except HypervisorError:
        for seen in missed:
            run.inbox.put(seen)  # it may have ended by itself
        raise


def _heed(run: Run, wait: float = 0.0) -> None:
    """Take what was seen meanwhile, for ``wait`` seconds: its machine is gone. Raises Ended."""
    deadline = time.monotonic() + wait
    while (seen := run.inbox.next(deadline)) is not None:
        _look_at(seen)


def _look_at(seen: Observation | None) -> None:
    """Raises Ended if nobody wants a saved machine any more."""
    if (end := unwanted(seen)) is not None:
        raise end
    if isinstance(seen, SignalSent) and seen.number in STOPPING - {VACATING}:
        raise stopped(f"stopped by signal {seen.number}")


def _have_it_kept(
    run: Run,
    upload: ContentReceiver | None,
    described: Callable[[Sequence[SavedFile]], Checkpoint],
) -> int:
    """Send what was saved, again while the repository is out of reach; bytes that were sent."""
    deadline = time.monotonic() + SEND_SECONDS
    paths = _paths(run.directory)
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    sent = 0

    def open_upload() -> ContentReceiver:
        return upload or run.source.open_upload(sum(sizes.values()))

    def send() -> list[SavedFile]:
        nonlocal sent
        files = []
        for name, path in paths.items():
            digest, moved = _send(run, path, receiver) if sizes[name] else (None, 0)
            sent += moved
            run.usage.add("checkpoint", moved)
            files.append(SavedFile(name=name, size=sizes[name], digest=digest))
        return files

    receiver = _insist(run, deadline, open_upload)
    checkpoint = described(_insist(run, deadline, send))
    _insist(run, deadline, lambda: run.source.keep(receiver, checkpoint))
    return sent


def _insist(run: Run, deadline: float, action: Callable[[], T]) -> T:
    """Do it, again and again until the repository answers. Raises Unavailable, Ended."""
    while True:
        try:
            return action()
        except Unavailable as error:
            if time.monotonic() > deadline:
                raise
            log.warning("job %s: its saved machine is not taken now: %s", run.job_id, error)
            _heed(run, wait=1.0)


def _send(run: Run, path: Path, upload: ContentReceiver) -> tuple[str, int]:
    carrier = run.parts.carrier
    if carrier is None:
        raise InvalidRequest("nothing carries machines that were saved")
    return carrier.send(path, upload, partial(_heed, run))


def _checkpoint(run: Run, ran: float, heard: int, files: Sequence[SavedFile]) -> Checkpoint:
    return Checkpoint(
        machine=run.machine,
        hypervisor=run.driver.kind,
        platform=run.platform,
        sentinel=run.sentinel,
        guest=hashlib.sha256(run.link.token.encode()).hexdigest(),
        ran=ran,
        heard=heard,
        files=tuple(files),
    )


def _paths(directory: Path) -> dict[str, Path]:
    """All that a machine consists of, by name."""
    named = {name: directory / name for name in (*_DISKS, MEMORY, *_STREAMS)}
    inside = {f"machine/{path.name}": path for path in sorted((directory / "machine").iterdir())}
    return {
        name: path
        for name, path in (named | inside).items()
        if path.is_file() and not path.is_symlink() and _known(name)
    }


def _known(name: str) -> bool:
    return name in {*_DISKS, MEMORY, *_STREAMS} or _ALLOWED.fullmatch(name) is not None


def fetch_file(run: Run, file: SavedFile) -> None:
    """Have a file of what was saved in the run's directory.

    Raises:
        NotFound, DigestMismatch: it cannot be had, or is another one, or no machine of ours has such a
        file. Unavailable. Ended: this node has no room for it, or nobody wants it any more.
    """
    carrier = run.parts.carrier
    if carrier is None or not _known(file.name):
        raise DigestMismatch(f"a machine that was saved has no file {file.name[:80]!r}")
    target = below(run.directory, file.name)
    target.parent.mkdir(exist_ok=True)
    try:
        fetched = carrier.fetch(file, run.source.saved(), target, run.check_stop)
    except (StorageFull, InvalidRequest) as error:
        raise failed(ReasonCode.NODE_FAILED, f"the node failed: {error.message}") from error
    run.usage.add("checkpoint", fetched)
