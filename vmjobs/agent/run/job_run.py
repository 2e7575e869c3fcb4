"""Runs one job: takes the steps of :mod:`vmjobs.agent.run.steps`, undoes them, and reports.

The run verifies that its VM is gone, then delivers everything, then removes its directory. See
:mod:`vmjobs.agent.journal` for the state that a ``kill -9`` leaves at each point.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.journal import InterruptedRun, RunRecord
from vmjobs.agent.run import checkpoint
from vmjobs.agent.run.outcome import (
    RunEnded,
    RunOutcome,
    blame_full_disk,
    outcome_of_error,
    outcome_of_node_error,
    requeue_if_retryable,
    run_failed,
)
from vmjobs.agent.run.outputs import CollectedFile, OutputCollector
from vmjobs.agent.run.report_uploader import ReportUploader
from vmjobs.agent.run.reports import RunReports
from vmjobs.agent.run.state import Run, VmChoice
from vmjobs.agent.run.steps import STEPS, Made, Step
from vmjobs.agent.vm.running_vm import RunningVm
from vmjobs.agent.vm.vm_failures import is_node_fault
from vmjobs.errors import Conflict, HypervisorError, NoHypervisor, Unavailable, VMJobsError, reason_of
from vmjobs.hypervisor.base import BootImage, Hypervisor, Network, VmNeeds
from vmjobs.model import MIB, AttemptClaim, JobState, ReasonCode, Report, StreamName, check_cpus, now

log = logging.getLogger(__name__)


class ReportUndelivered(Unavailable):
    """A run ended, but its repository did not receive the final report; ``left`` keeps it."""

    def __init__(self, left: InterruptedRun) -> None:
        super().__init__("api", "the job's final report could not be delivered to its repository")
        self.left = left


def execute(run: Run) -> RunOutcome:
    """Run the job to its end, undo everything and report. Call it once for each run.

    Raises:
        VMJobsError: the job could not be claimed, or the VM could not be removed.
    """
    request, services = run.request, run.request.services
    run.ticket = request.source.claim(
        AttemptClaim(attempt=request.attempt, node=services.settings.node)
    )
    run.claimed = True
    try:
        driver = _choose_driver(run)
    except NoHypervisor as error:
        return _report_early_end(run, run_failed(ReasonCode.NO_HYPERVISOR, error.message).outcome)
    vm_name = services.journal.vm_name(request.attempt)
    run.choice = VmChoice(driver, vm_name, sentinel=secrets.token_hex(16))
    record = RunRecord(request.attempt, request.job_id, vm_name, driver.kind)
    with ExitStack() as stack:
        try:
            run.directory = stack.enter_context(services.journal.run(record, driver))
            _prepare_outputs(run)
        except OSError as error:
            log.exception("job %s cannot begin on this node", request.job_id)
            return _report_early_end(run, outcome_of_node_error(error))
        try:
            outcome = _deliver(run, _run_steps(run), record)
        finally:
            run.reports.uploader.stop()
    run.reports.end(outcome)
    return outcome


def _choose_driver(run: Run) -> Hypervisor:
    """Return the driver that saved the job's VM, if this node has it, or the one for the job."""
    spec, saved, choose = run.spec, run.ticket.checkpoint, run.request.services.choose
    if why := check_cpus(spec.hypervisor, spec.cpus):
        raise NoHypervisor(why)
    if saved is not None and spec.hypervisor is None:
        with suppress(NoHypervisor):
            return choose(VmNeeds(saved.hypervisor, spec.kinds, spec.cpus))
    return choose(VmNeeds(spec.hypervisor, spec.kinds, spec.cpus))


def _report_early_end(run: Run, outcome: RunOutcome) -> RunOutcome:
    outcome = requeue_if_retryable(outcome, run.ticket.tries_left)
    for state in (JobState.STAGING, outcome.state):
        report = Report(state=state, reason=outcome.reason, time=now())
        run.request.source.report(report)
        run.request.on_report(report)
    return outcome


def _prepare_outputs(run: Run) -> None:
    request = run.request
    run.output_collector = OutputCollector(run.spec.outputs, run.spec.disk * MIB)
    streams = {name: run.stream(name) for name in StreamName}
    run.reports = RunReports(
        on_report=request.on_report,
        uploader=ReportUploader(request.source, request.event_queue, streams),
        rejected=run.output_collector.rejected,
        usage=run.usage,
        measure=run.measure_usage,
        on_usage=request.on_usage,
    )


# --------------------------------------------------------------------------- steps


def _run_steps(run: Run) -> RunOutcome:
    outcome = _outcome_of_steps(run)
    if run.running_vm is not None and run.running_vm.watch.disk_was_full:
        outcome = blame_full_disk(outcome)
    resumed = run.choice.resumed is None or run.clock.is_running
    return outcome if resumed else checkpoint.as_not_resumed(outcome)


def _outcome_of_steps(run: Run) -> RunOutcome:
    try:
        with run.resources:
            for step in STEPS:
                _take(run, step)
    except RunEnded as end:
        return end.outcome
    except HypervisorError as error:
        return _check_hypervisor(run, error)
    except VMJobsError as error:
        return outcome_of_error(error)
    except OSError as error:
        log.exception("job %s failed on this node", run.request.job_id)
        return outcome_of_node_error(error)
    except Exception as error:
        log.exception("job %s", run.request.job_id)
        return run_failed(ReasonCode.INTERNAL, f"the agent failed: {type(error).__name__}").outcome
    return run_failed(ReasonCode.INTERNAL, "the agent failed: the run ended without an outcome").outcome


def _check_hypervisor(run: Run, error: HypervisorError) -> RunOutcome:
    """Blame the job or its image only if the hypervisor still boots its probe."""
    reprobe, kind = run.request.services.reprobe, run.choice.driver.kind
    if isinstance(error, NoHypervisor) or reprobe is None:
        return outcome_of_error(error)
    found = reprobe(kind)
    if found.works:
        return outcome_of_error(error)
    message = f"{kind} no longer works on this node ({found.detail}): {error.message}"
    outcome = run_failed(ReasonCode.NO_HYPERVISOR, message).outcome
    return replace(outcome, image_unbootable=run.reports.hypervisor is not None)


def _take(run: Run, step: Step) -> None:
    if step.state is not None:
        message, run.remark = run.remark or step.title, ""
        run.reports.progress(step.state, message)
    if run.running_vm is None:
        run.check_stop()
    with _timer(run, step.phase, step.title):
        _store(run, step.action(run))


def _store(run: Run, made: Made) -> None:
    match made:
        case BootImage():
            run.image = made
        case VmChoice():
            run.choice, run.remark = made, made.remark
            run.image = made.image or run.image
            run.clock.ran_before = made.resumed.ran if made.resumed else 0.0
        case GuestSession():
            run.guest_session = made
        case Network():
            run.network = made
        case RunningVm():
            run.running_vm = made
        case str():
            run.remark = made


@contextmanager
def _timer(run: Run, phase: str, title: str) -> Iterator[None]:
    """Add the time spent in the context to one of the run's phases."""
    begun = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - begun
        run.reports.add_seconds(phase, took)
        run.request.services.on_step_timed(title, took)
        log.info("job %s: %s took %.3f s", run.request.job_id, title, took)


# --------------------------------------------------------------------------- delivery


def _deliver(run: Run, outcome: RunOutcome, record: RunRecord) -> RunOutcome:
    """Verify that the VM is gone, then deliver outputs, streams and the final report."""
    run.choice.driver.destroy(run.choice.vm_name)
    patience, reports, uploader = run.settings.deliver_seconds, run.reports, run.reports.uploader
    if not uploader.superseded and outcome.state is not JobState.PREEMPTED:
        with _timer(run, "collecting", "deliver"):
            outcome = _deliver_outputs(run, outcome)
            uploader.flush(patience)
    outcome = requeue_if_retryable(outcome, run.ticket.tries_left)
    run.measure_usage()
    report = left = reports.make(outcome)
    if outcome.state is not JobState.PREEMPTED and uploader.has_undelivered():
        # This run's files are removed: a report delivered later must not promise this output.
        message = f"the job's printed output could not be delivered within {patience:.0f} s"
        left = reports.make(run_failed(ReasonCode.INTERNAL, message, outcome.exit).outcome)
    try:
        run.request.services.journal.record_outcome(run.request.attempt, left.model_dump_json())
    except OSError as error:  # a full disk may have ended the run: report it all the same
        log.error("job %s: its final report cannot be stored here: %s", run.request.job_id, error)
    uploader.report(report)
    if uploader.flush(patience):
        return outcome
    if not uploader.superseded:
        raise ReportUndelivered(InterruptedRun(record, left.model_dump_json()))
    log.warning("job %s: its final report was refused: %s", run.request.job_id, uploader.superseded)
    return outcome


def _deliver_outputs(run: Run, outcome: RunOutcome) -> RunOutcome:
    """Deliver all accepted outputs; return the outcome, which a failure replaces."""
    deadline = time.monotonic() + run.settings.deliver_seconds
    run.usage.add("output", 0)  # there may be none
    for collected in run.output_collector.collected.values():
        try:
            _deliver_output(run, collected, deadline)
        except Conflict as error:
            log.warning("job %s: outputs are no longer wanted: %s", run.request.job_id, error)
            return outcome
        except (VMJobsError, OSError) as error:
            message = f"output {collected.path} could not be delivered: {reason_of(error)}"
            here = isinstance(error, OSError)
            code = ReasonCode.NODE_FAILED if here else ReasonCode.INTERNAL
            node_at_fault = here and is_node_fault(error)
            return run_failed(code, message, outcome.exit, node_at_fault=node_at_fault).outcome
    return outcome


def _deliver_output(run: Run, collected: CollectedFile, deadline: float) -> None:
    pause = ReportUploader.first_pause
    while True:
        try:
            with collected.open() as source:
                run.request.source.put_output(collected.path, source, collected.size)
            run.usage.add("output", collected.size)
            return
        except Unavailable:
            if time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)  # no event signals that the repository is back
            pause = min(2 * pause, ReportUploader.max_pause)
