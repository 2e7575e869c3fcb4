"""Saves a run's VM when HTCondor vacates the job, and resumes it in another run.

A checkpoint is the VM's memory, its disks, its console and its output: all files of the run. They
are sent to the repository as chunks; only chunks missing there are sent. After a ``kill -9`` of the
agent or of the VM:

========================  ================================================================
killed                    the job
========================  ================================================================
while the VM is saved     resumes from the previous checkpoint, or starts again
while files are sent      the same; the repository removes the files that arrived
once all files are kept   resumes from this checkpoint
while they are fetched    the same: a checkpoint stays until the next one or the job's end
before the VM is resumed  the same
========================  ================================================================

The VM keeps its name, because its hypervisor knows the saved state by that name. Its guest gets a new
token and the current time with its first request (``vmjobs.agent.guest.endpoint``).
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
from typing import Final, TypeVar

from vmjobs.agent.run.outcome import (
    STOP_SIGNALS,
    VACATE_SIGNAL,
    RunEnded,
    RunOutcome,
    run_failed,
    run_stopped,
    run_unwanted,
)
from vmjobs.agent.run.state import Run, VmChoice
from vmjobs.agent.vm.events import RunEvent, SaveFinished, SignalSent
from vmjobs.errors import (
    DigestMismatch,
    HypervisorError,
    InvalidRequest,
    StorageFull,
    Unavailable,
    VMJobsError,
)
from vmjobs.file_transfer import ContentReceiver
from vmjobs.hypervisor.base import Hypervisor
from vmjobs.model import MIB, Checkpoint, JobState, ReasonCode, SavedFile, StreamName, reason
from vmjobs.paths import safe_join

T = TypeVar("T")
log = logging.getLogger(__name__)

#: The file of a VM's memory, in its run's directory.
MEMORY_FILE: Final = "machine.memory"
#: Seconds to send a checkpoint to the repository: HTCondor gives a vacated job ten minutes.
SEND_SECONDS: Final = 480.0
#: The most bytes that a hypervisor writes beside a VM's memory: device state and an index of pages.
MEMORY_OVERHEAD_BYTES: Final = 64 * MIB
#: Seconds for answers to the guest that are in progress when its VM is to be saved.
QUIESCE_SECONDS: Final = 10.0
#: Reasons that do not end the job if its VM was to be resumed and was not.
_NOT_FINAL: Final = frozenset(
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
_VM_FILE: Final = re.compile(r"machine/[A-Za-z0-9][A-Za-z0-9._-]*")


def resume_platform(run: Run, driver: Hypervisor) -> str:
    """Return the platform that can resume the VM of a run on this driver; ``""`` if it is not saved."""
    wanted = run.spec.checkpoint and run.request.services.file_transfer is not None
    return driver.platform if wanted else ""


def resumable_checkpoint(run: Run, choice: VmChoice) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint from which the chosen driver can resume, if any, and a remark."""
    saved = run.ticket.checkpoint
    if saved is None or not choice.platform:
        return None, ""
    if (saved.hypervisor, saved.platform) == (choice.driver.kind, choice.platform):
        return saved, ""
    text = f"its VM was saved by {saved.platform}, which this node lacks"
    log.warning("job %s: %s", run.request.job_id, text)
    return None, f"the job starts again: {text}"


def as_not_resumed(outcome: RunOutcome) -> RunOutcome:
    """Return the outcome of a run that was to resume a VM and failed before it did.

    The failure does not end the job: the repository decides from where it is tried again.
    """
    if outcome.state is not JobState.FAILED or outcome.reason.code not in _NOT_FINAL:
        return outcome
    text = f"the saved VM was not resumed: {outcome.reason.message}"
    why = reason(ReasonCode.NOT_RESUMED, text)
    return replace(outcome, state=JobState.PREEMPTED, reason=why, exit=None)


def save(run: Run, heard: int) -> None:
    """Save the run's VM and raise Ended; return if it cannot be saved.

    The caller has quiesced the endpoint. heard: see ``Checkpoint``.
    """
    began, ran, vm = time.monotonic(), run.clock.ran(), run.vm
    try:
        if run.guest_session.lost:
            raise VMJobsError("this node could not store all of its output")
        upload = _open_upload(run)
        _save_vm(run)
    except VMJobsError as error:
        log.warning("job %s: its VM is not saved: %s", run.request.job_id, error)
        return
    run.destroy_vm(vm)
    log.info("job %s: saving its VM took %.1f s", run.request.job_id, time.monotonic() - began)
    try:
        sent = _store(run, upload, partial(_checkpoint, run, round(ran, 1), heard))
    except RunEnded:
        raise
    except Exception as error:
        message = error.message if isinstance(error, VMJobsError) else str(error)
        log.warning("job %s: its checkpoint could not be stored: %s", run.request.job_id, message)
        raise run_stopped(f"the VM was saved, but its checkpoint was not stored: {message}") from error
    text = f"its VM was saved, {sent / MIB:.1f} MiB were sent; the job will resume from there"
    raise RunEnded(RunOutcome(JobState.PREEMPTED, reason(ReasonCode.CHECKPOINTED, text)))


def _open_upload(run: Run) -> ContentReceiver | None:
    """Open an upload for the checkpoint; return None if the repository is unavailable.

    Raises VMJobsError: the repository refuses it, so the VM need not be saved.
    """
    files = sum(path.stat().st_size for path in _checkpoint_files(run.directory).values())
    memory = run.spec.memory * MIB
    try:
        return run.request.source.open_upload(files + memory + memory // 8 + MEMORY_OVERHEAD_BYTES)
    except Unavailable:
        return None


def _save_vm(run: Run) -> None:
    """Save the VM. Raises HypervisorError; Ended: the run is cancelled, the VM gone."""
    deferred: list[RunEvent] = []
    vm, event_queue = run.vm, run.request.event_queue
    with ThreadPoolExecutor(1, "save") as pool:
        saving = pool.submit(vm.driver.save, vm.name, run.directory / MEMORY_FILE)
        saving.add_done_callback(lambda _: event_queue.put(SaveFinished()))
        try:
            while not isinstance(seen := event_queue.next(math.inf), SaveFinished):
                _raise_if_cancelled(seen)
                if seen is not None:
                    deferred.append(seen)
        except RunEnded:
            vm.driver.destroy(vm.name)
            raise
    try:
        saving.result()
    except HypervisorError:
        for seen in deferred:
            event_queue.put(seen)  # the VM may have ended by itself
        raise


def _check_cancelled(run: Run, wait: float = 0.0) -> None:
    """Handle the run's events for ``wait`` seconds. Raises Ended if it is cancelled."""
    deadline = time.monotonic() + wait
    while (seen := run.request.event_queue.next(deadline)) is not None:
        _raise_if_cancelled(seen)


def _raise_if_cancelled(seen: RunEvent | None) -> None:
    if (end := run_unwanted(seen)) is not None:
        raise end
    if isinstance(seen, SignalSent) and seen.number in STOP_SIGNALS - {VACATE_SIGNAL}:
        raise run_stopped(f"stopped by signal {seen.number}")


def _store(
    run: Run,
    upload: ContentReceiver | None,
    describe: Callable[[Sequence[SavedFile]], Checkpoint],
) -> int:
    """Store the checkpoint, retrying while the repository fails; return bytes sent."""
    deadline = time.monotonic() + SEND_SECONDS
    paths = _checkpoint_files(run.directory)
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    sent = 0

    def open_upload() -> ContentReceiver:
        return upload or run.request.source.open_upload(sum(sizes.values()))

    def send() -> list[SavedFile]:
        nonlocal sent
        files = []
        for name, path in paths.items():
            digest, moved = _send(run, path, receiver) if sizes[name] else (None, 0)
            sent += moved
            run.usage.add("checkpoint", moved)
            files.append(SavedFile(name=name, size=sizes[name], digest=digest))
        return files

    receiver = _retry_until(run, deadline, open_upload)
    checkpoint = describe(_retry_until(run, deadline, send))
    _retry_until(run, deadline, lambda: run.request.source.save_checkpoint(receiver, checkpoint))
    return sent


def _retry_until(run: Run, deadline: float, action: Callable[[], T]) -> T:
    """Repeat ``action`` until the repository answers. Raises Unavailable, Ended."""
    while True:
        try:
            return action()
        except Unavailable as error:
            if time.monotonic() > deadline:
                raise
            log.warning("job %s: its checkpoint cannot be stored now: %s", run.request.job_id, error)
            _check_cancelled(run, wait=1.0)


def _send(run: Run, path: Path, upload: ContentReceiver) -> tuple[str, int]:
    file_transfer = run.request.services.file_transfer
    if file_transfer is None:
        raise InvalidRequest("this agent cannot transfer checkpoints")
    return file_transfer.send(path, upload, partial(_check_cancelled, run))


def _checkpoint(run: Run, ran: float, heard: int, files: Sequence[SavedFile]) -> Checkpoint:
    return Checkpoint(
        machine=run.choice.vm_name,
        hypervisor=run.choice.driver.kind,
        platform=run.choice.platform,
        sentinel=run.choice.sentinel,
        guest=hashlib.sha256(run.guest_session.token.encode()).hexdigest(),
        ran=ran,
        heard=heard,
        files=tuple(files),
    )


def _checkpoint_files(directory: Path) -> dict[str, Path]:
    """Return the files of a checkpoint, by name."""
    named = {name: directory / name for name in (*_DISKS, MEMORY_FILE, *_STREAMS)}
    inside = {f"machine/{path.name}": path for path in sorted((directory / "machine").iterdir())}
    return {
        name: path
        for name, path in (named | inside).items()
        if path.is_file() and not path.is_symlink() and _is_checkpoint_file(name)
    }


def _is_checkpoint_file(name: str) -> bool:
    return name in {*_DISKS, MEMORY_FILE, *_STREAMS} or _VM_FILE.fullmatch(name) is not None


def fetch_file(run: Run, file: SavedFile) -> None:
    """Fetch a file of the checkpoint into the run's directory.

    Raises:
        NotFound, Unavailable: it cannot be fetched. DigestMismatch: its content or its name is not
        that of a checkpoint's file. Ended: this node has no room for it, or the run is cancelled.
    """
    file_transfer = run.request.services.file_transfer
    if file_transfer is None or not _is_checkpoint_file(file.name):
        raise DigestMismatch(f"unexpected file in the checkpoint: {file.name[:80]!r}")
    target = safe_join(run.directory, file.name)
    target.parent.mkdir(exist_ok=True)
    try:
        fetched = file_transfer.fetch(file, run.request.source.saved(), target, run.check_stop)
    except (StorageFull, InvalidRequest) as error:
        raise run_failed(ReasonCode.NODE_FAILED, f"the node failed: {error.message}") from error
    run.usage.add("checkpoint", fetched)
