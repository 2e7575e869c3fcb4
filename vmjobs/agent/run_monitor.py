"""The steps of a run while its VM runs: await readiness, await the end, collect.

Each step records every event in the run as soon as it takes it from the queue, then examines the
records.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from vmjobs.agent import checkpoint
from vmjobs.agent.console import last_lines, panic_text
from vmjobs.agent.inbox import (
    ConsoleFlooded,
    ExitReported,
    GuestSilent,
    ImageLost,
    LineSeen,
    MachineGone,
    Observation,
    Panicked,
    Ready,
    RuleFailed,
    SaveWanted,
    ScriptEnded,
    SignalSent,
)
from vmjobs.agent.outputs import DiskContents, read_output_disk
from vmjobs.agent.verdict import (
    STOPPING,
    VACATING,
    Ended,
    Success,
    Verdict,
    by_rule,
    failed,
    judge,
    judge_early_end,
    overdue,
    panicked,
    stopped,
    unwanted,
    with_console,
    without_image,
)
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import Ending
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

if TYPE_CHECKING:
    from vmjobs.agent.run import Run

log = logging.getLogger(__name__)

#: Seconds between checks of a job that is close to its time limit: it may be suspended.
LAST_SECONDS = 0.1
#: Endings after which the guest's last writes may be incomplete.
_CUT_SHORT = (Ending.PANICKED, Ending.CRASHED, Ending.KILLED)

# --------------------------------------------------------------------------- the steps


def await_ready(run: Run) -> None:
    """Wait until the guest is ready by the job's readiness rule."""
    spec = run.ticket.spec
    if run.resumed is not None:
        run.remark = f"the VM was resumed from its checkpoint, after {run.resumed.ran:.0f} s"
    if spec.readiness == STARTED:
        run.remark = "the VM runs; the job asks for no sign of readiness"
        return
    if run.resumed is not None and spec.network is NetworkMode.NONE:
        return  # a resumed guest without network cannot report that it is ready
    while not _over(run):
        # Time that the guest waits for parts of its image does not count.
        deadline = run.boot_begun + spec.boot_seconds + run.live.waited()
        seen = _observe(run, deadline)
        if isinstance(seen, Ready) and spec.readiness == REPORT:
            return
        if isinstance(seen, LineSeen) and seen.rule == "ready":
            run.remark = f"the console showed the line {seen.line.strip()[:200]!r}"
            return
        if seen is None and run.live.waited() <= deadline - run.boot_begun - spec.boot_seconds:
            message = f"the guest was not ready within {spec.boot_seconds} s"
            raise failed(ReasonCode.BOOT_TIMED_OUT, with_console(message, _last_lines(run)))
    # A guest that left a result was ready; a VM that ended without one was not.
    if run.ending is not None and (verdict := _judge(run, ready=False)).exit is None:
        raise Ended(verdict)
    run.remark = "the job ended without reporting that it was ready"


def await_end(run: Run) -> None:
    """Wait until the job's work is done, or its time limit is reached."""
    spec = run.ticket.spec
    run.live.ready()
    run.run_begun = time.monotonic()
    # Heartbeats are expected only in this step: the steps before and after have deadlines.
    run.link.heard = time.monotonic()
    if run.watch is not None:
        run.watch.listening = spec.network is not NetworkMode.NONE
    run.savable, run.pausable = bool(run.platform), True
    while not _over(run):
        left = spec.run_seconds - run.ran()  # excludes time while the job is suspended
        seen = _observe(run, time.monotonic() + max(left, LAST_SECONDS))
        if seen is None and run.ran() >= spec.run_seconds:
            raise _overdue(run)
    run.savable = run.pausable = False
    if run.watch is not None:
        run.watch.listening = False


def collect(run: Run) -> None:
    """Receive the guest's outputs until its VM is gone, then end the run with its outcome."""
    settings = run.parts.settings
    deadline = time.monotonic() + settings.collect_seconds
    if run.matched is not None:
        _ask_to_power_off(run)
        deadline = time.monotonic() + settings.stop_seconds
    heard = False
    while run.ending is None:
        if run.reported is not None and not heard:
            # All is delivered: a guest that does not power off in time is destroyed.
            heard, deadline = True, min(deadline, time.monotonic() + settings.grace_seconds)
        if _observe(run, deadline) is None:
            if run.reported is None and run.matched is None:
                raise failed(ReasonCode.GUEST_LOST, "the guest did not deliver its outputs in time")
            run.end_machine()  # before its output disk is read
            break
    raise Ended(_judge(run, ready=True))


def _overdue(run: Run) -> Ended:
    spec = run.ticket.spec
    text = overdue(spec.exit, spec.run_seconds, script=bool(spec.script))
    message = with_console(text, _last_lines(run))
    if spec.strategy is not Strategy.SCRIPT:
        # The outputs so far show how far the job came.
        run.end_machine()
        _read_output_disk(run)
    return failed(ReasonCode.TIMED_OUT, message)


def _over(run: Run) -> bool:
    """Whether only outputs remain to be waited for."""
    if run.ending is not None or run.matched is not None:
        return True
    # If a console line decides, a status that the guest reports does not.
    told = run.reported is not None or run.script_ended is not None
    return told and not run.ticket.spec.exit.startswith(CONSOLE_RULE)


def _ask_to_power_off(run: Run) -> None:
    try:
        run.driver.stop(run.machine)
    except HypervisorError as error:
        log.warning("job %s: cannot ask its VM to power off: %s", run.job_id, error)


# --------------------------------------------------------------------------- the outcome


def _judge(run: Run, *, ready: bool) -> Verdict:
    """Return the outcome once the VM is gone, or its work is done."""
    disk = _read_output_disk(run)
    ended, spec = run.script_ended, run.ticket.spec
    if spec.exit.startswith(CONSOLE_RULE):
        return _judge_by_line(run, disk, ready=ready)
    by_endpoint = run.reported and run.reported.channel is ExitChannel.ENDPOINT
    told = (run.reported, disk.exit) if by_endpoint else (disk.exit, run.reported)
    exit = told[0] or told[1] or (ended.exit if ended else None)
    if exit is not None:
        if run.reported is None and (disk.exit is None or run.ending in _CUT_SHORT):
            message = "the VM ended before it had delivered its outputs"
            return failed(ReasonCode.GUEST_LOST, message, exit).verdict
        subject = "the script" if spec.script else "the job"
        return _judge_success(run, disk, Success(exit, subject))
    success = by_rule(spec.exit, run.ending, None)
    return _judge_success(run, disk, success) if success else _early_end(run, ready=ready)


def _judge_by_line(run: Run, disk: DiskContents, *, ready: bool) -> Verdict:
    line = run.matched.line if run.matched else None
    success = by_rule(run.ticket.spec.exit, run.ending, line)
    if success is not None:
        return _judge_success(run, disk, success)
    early = _early_end(run, ready=ready)
    return Verdict(early.state, early.reason, disk.exit or run.reported)


def _judge_success(run: Run, disk: DiskContents, success: Success) -> Verdict:
    """Return the outcome of a successful end. Raises OSError if the node lost received output."""
    for error in run.link.lost.values():
        raise error
    disk_full = run.script_ended is not None and run.script_ended.disk_full
    cut_off = disk.begun and not disk.complete
    if run.undelivered and not (disk_full or cut_off or run.tray.too_large):
        message = "the guest could not send all of the job's printed output and files"
        return failed(ReasonCode.GUEST_LOST, message, success.exit).verdict
    run.tray.too_large = run.tray.too_large or run.undelivered or cut_off
    return judge(
        success.exit,
        disk_full=disk_full,
        too_large=run.tray.too_large,
        missing=run.tray.missing(),
        lacking=run.tray.lacking,
        disk=run.ticket.spec.disk,
        subject=success.subject,
        deed=success.deed,
    )


def _read_output_disk(run: Run) -> DiskContents:
    """Read the output disk; only once."""
    if run.disk is None:
        # Streams received through the endpoint are already in these files.
        names = {"stdout": StreamName.OUT, "stderr": StreamName.ERR}
        streams = {n: run.stream(s) for n, s in names.items() if not run.stream(s).exists()}
        disk = run.directory / "output.disk"
        run.disk = read_output_disk(disk, run.tray, streams, run.parts.settings.max_log)
        if not run.disk.complete and not run.disk.begun:
            run.tray.refuse("(output disk)", "it does not contain a tar stream")
    return run.disk


def _early_end(run: Run, *, ready: bool) -> Verdict:
    return judge_early_end(
        panic=panic_text(run.stream(StreamName.CONSOLE)),
        ready=ready,
        last_lines=_last_lines(run),
        rule=run.ticket.spec.exit,
        ending=run.ending or Ending.UNKNOWN,
    )


def _last_lines(run: Run) -> str:
    return last_lines(run.stream(StreamName.CONSOLE))


# --------------------------------------------------------------------------- events


def _observe(run: Run, deadline: float) -> Observation | None:
    """Record and return the next event; handle those that end any step."""
    while isinstance(seen := run.inbox.next(min(deadline, run.stop_by)), SignalSent | SaveWanted):
        if isinstance(seen, SaveWanted):
            _save_or_leave(run)
        else:
            _pass_on(run, seen.number)
        if _over(run):
            return seen
    _note(run, seen)
    _give_up_on(run, seen)
    if run.stopped_by and (seen is None or isinstance(seen, MachineGone | ExitReported)):
        exit = seen.exit if isinstance(seen, ExitReported) else None
        raise stopped(f"stopped by signal {run.stopped_by}", exit)
    return seen


def _pass_on(run: Run, number: int) -> None:
    if number == VACATING and run.savable and not run.link.former:
        _save(run)
        if _over(run):
            return  # it has ended meanwhile: nothing is left to stop
    run.link.send_signal(number)
    if number in STOPPING and not _is_the_scripts(run):
        run.stop_by = min(run.stop_by, time.monotonic() + run.parts.settings.grace_seconds)
        run.stopped_by = number
        if run.ticket.spec.strategy is not Strategy.SCRIPT:
            _ask_to_power_off(run)  # its guest may not handle signals


def _save_or_leave(run: Run) -> None:
    """End the run, with its VM saved if possible and without a signal to its script.

    A job that has just ended by itself continues to its end.
    """
    if run.savable:
        _save(run)
    if not _over(run):
        raise stopped("the agent is stopping, and the VM could not be saved")


def _is_the_scripts(run: Run) -> bool:
    """Whether the script itself handles stop signals: it runs and can receive them."""
    online = run.ticket.spec.network is not NetworkMode.NONE
    return run.parts.settings.patient and online and run.run_begun < math.inf


def _save(run: Run) -> None:
    """Save the VM and end the run, unless the job is ending by itself or saving fails."""
    run.savable = False
    watch = run.watch
    if watch is None:
        return
    listening, watch.listening = watch.listening, False  # it sends no heartbeat while it is saved
    run.pausable = False
    with run.shut():  # first: quiescing takes long enough for the guest to notice it
        if run.link.hush(checkpoint.HUSH_SECONDS):
            told = watch.told  # console output from here on is read where the VM resumes
            _take_in(run)
            if not _over(run) and not run.stopped_by:
                checkpoint.save(run, told)
                _take_in(run)
            _leave_if_lost(run)
    run.link.speak()
    run.link.heard = time.monotonic()
    watch.listening, run.pausable = listening, True


def _leave_if_lost(run: Run) -> None:
    """End the run as stopped if its VM is lost while being saved: the job was being vacated."""
    if run.ending is None:
        return
    verdict = _judge(run, ready=True)
    lost = verdict.reason.code is ReasonCode.GUEST_LOST or run.ending is Ending.UNKNOWN
    if verdict.exit is None and lost:
        raise stopped(f"its VM was lost while it was being saved: {verdict.reason.message}")


def _take_in(run: Run) -> None:
    """Record all events so far, without further requests to vacate or save."""
    while (seen := run.inbox.next(time.monotonic())) is not None:
        if isinstance(seen, SignalSent):
            if seen.number != VACATING:
                _pass_on(run, seen.number)
            continue
        if isinstance(seen, SaveWanted):
            continue
        _note(run, seen)
        _give_up_on(run, seen)


def _note(run: Run, seen: Observation | None) -> None:
    if isinstance(seen, ScriptEnded):
        run.script_ended = seen
    elif isinstance(seen, ExitReported):
        # The guest reports it twice, at its endpoint and on its console, in either order.
        if run.reported is None or seen.exit.channel is ExitChannel.ENDPOINT:
            run.reported = seen.exit
        run.undelivered = run.undelivered or seen.undelivered
    elif isinstance(seen, LineSeen) and seen.rule == "exit":
        run.matched = seen
    elif isinstance(seen, MachineGone):
        run.ending = _ending(run)


def _ending(run: Run) -> Ending:
    try:
        return run.driver.ending(run.machine)
    except HypervisorError as error:
        log.warning("job %s: cannot determine how its VM ended: %s", run.job_id, error)
        return Ending.UNKNOWN


def _give_up_on(run: Run, seen: Observation | None) -> None:
    """End the run after an event that makes any step pointless."""
    if (end := unwanted(seen)) is not None:
        raise end
    if isinstance(seen, ConsoleFlooded):
        message = f"the console grew beyond {run.parts.settings.max_console} bytes"
        raise failed(ReasonCode.CONSOLE_FLOODED, with_console(message, _last_lines(run)))
    if isinstance(seen, ImageLost):
        raise without_image(seen.error)
    if isinstance(seen, RuleFailed):
        raise failed(ReasonCode.NO_EXIT_REPORT, seen.why)
    if isinstance(seen, Panicked):
        code, message = panicked(seen.cause)
        raise failed(code, with_console(message, _last_lines(run)))
    if isinstance(seen, GuestSilent):
        message = f"the guest sent no heartbeat for {seen.seconds:.0f} s"
        raise failed(ReasonCode.GUEST_LOST, with_console(message, _last_lines(run)))
