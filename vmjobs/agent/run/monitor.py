"""The steps of a run while its VM runs: await readiness, await the end, collect.

Each step records every event in the run as soon as it takes it from the queue, then examines the
records.
"""

from __future__ import annotations

import logging
import time

from vmjobs.agent.run import checkpoint
from vmjobs.agent.run.outcome import (
    STOP_SIGNALS,
    VACATE_SIGNAL,
    RunEnded,
    RunOutcome,
    Success,
    image_failed,
    outcome_of_exit,
    run_failed,
    run_stopped,
    run_unwanted,
    success_by_rule,
    timeout_message,
)
from vmjobs.agent.run.outputs import DiskContents, read_output_disk
from vmjobs.agent.run.state import Run
from vmjobs.agent.vm.console import panic_text, with_last_lines
from vmjobs.agent.vm.events import (
    ConsoleFlooded,
    ConsoleLineMatched,
    ExitReported,
    GuestReady,
    ImageLost,
    RuleFailed,
    RunEvent,
    SaveRequested,
    SignalSent,
    VmEnded,
)
from vmjobs.agent.vm.vm_failures import early_end, guest_failure
from vmjobs.hypervisor.base import ShutdownCause
from vmjobs.model import (
    CONSOLE_RULE,
    REPORT,
    STARTED,
    ExitChannel,
    NetworkMode,
    ReasonCode,
    Strategy,
    StreamName,
)

log = logging.getLogger(__name__)

#: Seconds between checks of a job that is close to its time limit: it may be suspended.
MIN_WAIT_SECONDS = 0.1
#: Endings after which the guest's last writes may be incomplete.
_ABRUPT_ENDINGS = (ShutdownCause.PANICKED, ShutdownCause.CRASHED, ShutdownCause.KILLED)

# --------------------------------------------------------------------------- the steps


def await_ready(run: Run) -> str:
    """Wait until the guest is ready by the job's readiness rule; return how that was seen."""
    spec, resumed = run.spec, run.choice.resumed
    how = f"the VM was resumed from its checkpoint, after {resumed.ran:.0f} s" if resumed else ""
    if spec.ready_rule == STARTED:
        return "the VM runs; the job asks for no sign of readiness"
    if resumed is not None and spec.network is NetworkMode.NONE:
        return how  # a resumed guest without network cannot report that it is ready
    while not _is_over(run):
        # Time that the guest waits for parts of its image does not count.
        deadline = run.clock.boot_begun + spec.boot_seconds + run.waited_for_image
        seen = _next_event(run, deadline)
        if isinstance(seen, GuestReady) and spec.ready_rule == REPORT:
            return how
        if isinstance(seen, ConsoleLineMatched) and seen.rule == "ready":
            return f"the console showed the line {seen.line.strip()[:200]!r}"
        if seen is None and run.waited_for_image <= deadline - run.clock.boot_begun - spec.boot_seconds:
            message = f"the guest was not ready within {spec.boot_seconds} s"
            raise _failed(run, ReasonCode.BOOT_TIMED_OUT, message)
    # A guest that left a result was ready; a VM that ended without one was not.
    ended = run.observed.shutdown_cause is not None
    if ended and (outcome := _final_outcome(run, ready=False)).exit is None:
        raise RunEnded(outcome)
    return "the job ended without reporting that it was ready"


def await_end(run: Run) -> None:
    """Wait until the job's work is done, or its time limit is reached."""
    spec, vm = run.spec, run.vm
    if run.image.live is not None:
        run.image.live.fetch_rest()
    run.clock.begin_run()
    if spec.network is not NetworkMode.NONE:
        vm.expect_heartbeats()  # only in this step: the steps before and after have deadlines
    run.control.checkpointable, run.control.suspendable = bool(run.choice.platform), True
    while not _is_over(run):
        left = spec.run_seconds - run.clock.ran()  # excludes time while the job is suspended
        seen = _next_event(run, time.monotonic() + max(left, MIN_WAIT_SECONDS))
        if seen is None and run.clock.ran() >= spec.run_seconds:
            raise _timed_out(run)
    run.control.checkpointable = run.control.suspendable = False
    vm.ignore_silence()


def collect(run: Run) -> None:
    """Receive the guest's outputs until its VM is gone, then end the run with its outcome."""
    settings = run.settings
    deadline = time.monotonic() + settings.collect_seconds
    if run.observed.exit_line is not None:
        run.vm.ask_to_power_off()
        deadline = time.monotonic() + settings.stop_seconds
    heard = False
    while run.observed.shutdown_cause is None:
        if run.observed.reported_exit is not None and not heard:
            # All is delivered: a guest that does not power off in time is destroyed.
            heard, deadline = True, min(deadline, time.monotonic() + settings.grace_seconds)
        if _next_event(run, deadline) is None:
            if run.observed.reported_exit is None and run.observed.exit_line is None:
                raise run_failed(ReasonCode.GUEST_LOST, "the guest did not deliver its outputs in time")
            run.destroy_vm(run.vm)  # before its output disk is read
            break
    raise RunEnded(_final_outcome(run, ready=True))


def _timed_out(run: Run) -> RunEnded:
    spec = run.spec
    message = timeout_message(spec.exit, spec.run_seconds, script=bool(spec.script))
    ended = _failed(run, ReasonCode.TIMED_OUT, message)
    if spec.strategy is not Strategy.SCRIPT:
        # The outputs so far show how far the job came.
        run.destroy_vm(run.vm)
        _read_output_disk(run)
    return ended


def _is_over(run: Run) -> bool:
    return run.observed.is_over(run.spec.exit)


# --------------------------------------------------------------------------- the outcome


def _final_outcome(run: Run, *, ready: bool) -> RunOutcome:
    """Return the outcome once the VM is gone, or its work is done."""
    disk = _read_output_disk(run)
    observed, spec = run.observed, run.spec
    ended, reported = observed.script_ended, observed.reported_exit
    if spec.exit.startswith(CONSOLE_RULE):
        return _outcome_by_line(run, disk, ready=ready)
    by_endpoint = reported and reported.channel is ExitChannel.ENDPOINT
    exits = (reported, disk.exit) if by_endpoint else (disk.exit, reported)
    exit = exits[0] or exits[1] or (ended.exit if ended else None)
    if exit is not None:
        if reported is None and (disk.exit is None or observed.shutdown_cause in _ABRUPT_ENDINGS):
            message = "the VM ended before it had delivered its outputs"
            return run_failed(ReasonCode.GUEST_LOST, message, exit).outcome
        subject = "the script" if spec.script else "the job"
        return _outcome_of_success(run, disk, Success(exit, subject))
    success = success_by_rule(spec.exit, observed.shutdown_cause, None)
    return (
        _outcome_of_success(run, disk, success) if success else _outcome_of_early_end(run, ready=ready)
    )


def _outcome_by_line(run: Run, disk: DiskContents, *, ready: bool) -> RunOutcome:
    observed = run.observed
    line = observed.exit_line.line if observed.exit_line else None
    success = success_by_rule(run.spec.exit, observed.shutdown_cause, line)
    if success is not None:
        return _outcome_of_success(run, disk, success)
    early = _outcome_of_early_end(run, ready=ready)
    return RunOutcome(early.state, early.reason, disk.exit or observed.reported_exit)


def _outcome_of_success(run: Run, disk: DiskContents, success: Success) -> RunOutcome:
    """Return the outcome of a successful end. Raises OSError if the node lost received output."""
    for error in run.guest_session.lost.values():
        raise error
    ended, undelivered = run.observed.script_ended, run.observed.undelivered
    disk_full = ended is not None and ended.disk_full
    cut_off = disk.begun and not disk.complete
    if undelivered and not (disk_full or cut_off or run.output_collector.too_large):
        message = "the guest could not send all of the job's printed output and files"
        return run_failed(ReasonCode.GUEST_LOST, message, success.exit).outcome
    too_large = run.output_collector.too_large or undelivered or cut_off
    return outcome_of_exit(
        success,
        disk_full=disk_full,
        too_large=too_large,
        missing=run.output_collector.missing(),
        lacking=run.output_collector.lacking,
        disk=run.spec.disk,
    )


def _read_output_disk(run: Run) -> DiskContents:
    """Read the output disk; only once."""
    found = run.observed.disk
    if found is None:
        # Streams received through the endpoint are already in these files.
        names = {"stdout": StreamName.OUT, "stderr": StreamName.ERR}
        streams = {n: run.stream(s) for n, s in names.items() if not run.stream(s).exists()}
        disk = run.directory / "output.disk"
        found = read_output_disk(disk, run.output_collector, streams, run.settings.max_log)
        run.observed.disk = found
        if not found.complete and not found.begun:
            run.output_collector.reject("(output disk)", "it does not contain a tar stream")
    return found


def _outcome_of_early_end(run: Run, *, ready: bool) -> RunOutcome:
    failure = early_end(
        panic=panic_text(run.console),
        ready=ready,
        rule=run.spec.exit,
        shutdown_cause=run.observed.shutdown_cause or ShutdownCause.UNKNOWN,
    )
    return _failed(run, failure.code, failure.message).outcome


def _failed(run: Run, code: ReasonCode, message: str) -> RunEnded:
    """Return the end of a run that failed; the message shows the console's last lines."""
    return run_failed(code, with_last_lines(message, run.console))


# --------------------------------------------------------------------------- events


def _next_event(run: Run, deadline: float) -> RunEvent | None:
    """Record and return the next event; handle those that end any step."""
    while isinstance(
        seen := run.request.event_queue.next(min(deadline, run.control.stop_by)),
        SignalSent | SaveRequested,
    ):
        if isinstance(seen, SaveRequested):
            _save_or_stop(run)
        else:
            _forward_signal(run, seen.number)
        if _is_over(run):
            return seen
    _record_event(run, seen)
    _raise_if_fatal(run, seen)
    if run.control.stopped_by and (seen is None or isinstance(seen, VmEnded | ExitReported)):
        exit = seen.exit if isinstance(seen, ExitReported) else None
        raise run_stopped(f"stopped by signal {run.control.stopped_by}", exit)
    return seen


def _forward_signal(run: Run, number: int) -> None:
    if number == VACATE_SIGNAL and run.control.checkpointable and not run.guest_session.former:
        _save(run)
        if _is_over(run):
            return  # it has ended meanwhile: nothing is left to stop
    run.guest_session.send_signal(number)
    if number in STOP_SIGNALS and not _script_handles_stop(run):
        stop_by = time.monotonic() + run.settings.grace_seconds
        run.control.stop_by = min(run.control.stop_by, stop_by)
        run.control.stopped_by = number
        if run.spec.strategy is not Strategy.SCRIPT:
            run.vm.ask_to_power_off()  # its guest may not handle signals


def _save_or_stop(run: Run) -> None:
    """End the run, with its VM saved if possible and without a signal to its script.

    A job that has just ended by itself continues to its end.
    """
    if run.control.checkpointable:
        _save(run)
    if not _is_over(run):
        raise run_stopped("the agent is stopping, and the VM could not be saved")


def _script_handles_stop(run: Run) -> bool:
    """Whether the script itself handles stop signals: it runs and can receive them."""
    online = run.spec.network is not NetworkMode.NONE
    return run.settings.script_handles_stop and online and run.clock.is_running


def _save(run: Run) -> None:
    """Save the VM and end the run, unless the job is ending by itself or saving fails."""
    run.control.checkpointable = False
    watch = run.vm.watch
    listening, watch.listening = watch.listening, False  # it sends no heartbeat while it is saved
    run.control.suspendable = False
    with run.request.shut():  # first: quiescing takes long enough for the guest to notice it
        if run.guest_session.quiesce(checkpoint.QUIESCE_SECONDS):
            processed = watch.processed  # console output from here on is read where the VM resumes
            _record_pending(run)
            if not _is_over(run) and not run.control.stopped_by:
                checkpoint.save(run, processed)
                _record_pending(run)
            _stop_if_lost(run)
    run.guest_session.resume()
    run.guest_session.heard = time.monotonic()
    watch.listening, run.control.suspendable = listening, True


def _stop_if_lost(run: Run) -> None:
    """End the run as stopped if its VM is lost while being saved: the job was being vacated."""
    if run.observed.shutdown_cause is None:
        return
    outcome = _final_outcome(run, ready=True)
    unknown = run.observed.shutdown_cause is ShutdownCause.UNKNOWN
    lost = unknown or outcome.reason.code is ReasonCode.GUEST_LOST
    if outcome.exit is None and lost:
        raise run_stopped(f"its VM was lost while it was being saved: {outcome.reason.message}")


def _record_pending(run: Run) -> None:
    """Record all events so far, without further requests to vacate or save."""
    while (seen := run.request.event_queue.next(time.monotonic())) is not None:
        if isinstance(seen, SignalSent):
            if seen.number != VACATE_SIGNAL:
                _forward_signal(run, seen.number)
            continue
        if isinstance(seen, SaveRequested):
            continue
        _record_event(run, seen)
        _raise_if_fatal(run, seen)


def _record_event(run: Run, seen: RunEvent | None) -> None:
    run.observed.record(seen)
    if isinstance(seen, VmEnded):
        run.observed.shutdown_cause = run.vm.shutdown_cause()


def _raise_if_fatal(run: Run, seen: RunEvent | None) -> None:
    """End the run after an event that makes any step pointless."""
    if (end := run_unwanted(seen)) is not None:
        raise end
    if isinstance(seen, ConsoleFlooded):
        message = f"the console grew beyond {run.settings.max_console} bytes"
        raise _failed(run, ReasonCode.CONSOLE_FLOODED, message)
    if isinstance(seen, ImageLost):
        raise image_failed(seen.error)
    if isinstance(seen, RuleFailed):
        raise run_failed(ReasonCode.NO_EXIT_REPORT, seen.why)
    if (failure := guest_failure(seen)) is not None:
        raise _failed(run, failure.code, failure.message)
