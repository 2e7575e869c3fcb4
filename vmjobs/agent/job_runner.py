"""Runs jobs for the agent's clients: jobs of the repository, and transparent jobs.

The client's connection is the lease of the run that it started.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from shutil import disk_usage

from vmjobs.agent import protocol
from vmjobs.agent.active_runs import ActiveRun, ActiveRuns
from vmjobs.agent.background import start_thread
from vmjobs.agent.checks import MIN_FREE_BYTES
from vmjobs.agent.condor_job.condor_job import receive_job
from vmjobs.agent.condor_job.job_access import JobAccess
from vmjobs.agent.condor_job.services import CondorJobServices, slot_job_name
from vmjobs.agent.job_source import JobSource
from vmjobs.agent.journal import InterruptedRun
from vmjobs.agent.lease import SocketLease
from vmjobs.agent.node_health import FAILURE_LIMIT, NodeHealth
from vmjobs.agent.run.job_run import ReportUndelivered, execute
from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.agent.run.services import RunServices
from vmjobs.agent.run.state import Run, RunRequest
from vmjobs.agent.run.suspend import suspending
from vmjobs.errors import (
    AttemptSuperseded,
    Conflict,
    Forbidden,
    JobFinal,
    StorageFull,
    Unauthenticated,
    Unavailable,
    VMJobsError,
    reason_of,
)
from vmjobs.local import LocalJob
from vmjobs.model import MIB, REQUEUE_REASONS, JobState, ReasonCode, Report

log = logging.getLogger(__name__)


@dataclass
class JobRunner:
    """Runs each job in a VM, in the thread of its client's connection.

    open_job: returns the repository's view of one job, from job id and job token.
    condor_jobs: for transparent jobs; None: this node runs none.
    health: of this node, from its recent jobs.
    interrupted_runs: outcomes that are perhaps not reported yet, by job.
    """

    services: RunServices
    open_job: Callable[[str, str], JobSource]
    condor_jobs: CondorJobServices | None = None
    health: NodeHealth = field(default_factory=NodeHealth)
    active: ActiveRuns = field(default_factory=ActiveRuns)
    interrupted_runs: dict[str, InterruptedRun] = field(default_factory=dict)

    def keep_interrupted_runs(self, leftovers: list[InterruptedRun]) -> None:
        """Keep outcomes of an earlier agent's runs, which may not have been reported."""
        self.interrupted_runs = {left.record.job: left for left in leftovers if left.outcome}

    # ------------------------------------------------------------------ jobs of the repository

    def run_job(
        self,
        message: protocol.RunMessage,
        lease: SocketLease,
        peer: protocol.PeerCredentials,
        messages: Iterator[protocol.Message],
    ) -> None:
        """Run a job of the repository. messages: of the client."""
        with self._report_errors(message.job, lease):
            if why := self._why_not_allowed(peer):
                lease.report_node_fault(why)  # perhaps the settings are at fault
                return
            source = self.open_job(message.job, message.token)
            with suppress(Conflict):  # not ended yet; the answer itself proves that the token is valid
                source.end()
            active = ActiveRun(message.job, peer.uid, lease)
            with self.active.register(active):
                outcome = self._earlier_outcome(message.job, source, lease)
                if outcome is None:
                    active.watch_client(messages)
                    outcome = self._run_claimable(active, source, peer)
            lease.end(outcome)

    def _run_claimable(
        self, active: ActiveRun, source: JobSource, peer: protocol.PeerCredentials
    ) -> RunOutcome:
        """Run a job, unless the repository knows that it has ended."""
        lease, name, events = active.lease, active.name, active.event_queue
        attempt, told = uuid.uuid4().hex, lease.progress
        request = RunRequest(source, told, self.services, name, attempt, events, on_usage=told)
        run = active.run = Run(request)
        try:
            with suspending(run, peer.pid):
                outcome = execute(run)
        except JobFinal:
            return self._outcome_at_repository(active.name, source, active.lease)
        self._update_node_health(run, outcome)
        return outcome

    def _why_not_allowed(self, peer: protocol.PeerCredentials) -> str:
        """Return why a client may not start jobs; empty: it may, as root and the agent's user."""
        if self.condor_jobs is None or peer.uid in (0, os.getuid()):
            return ""
        try:
            self.condor_jobs.find_slot(peer)
        except Forbidden as error:
            return f"{error.message}; starters run as root or as the user of the setting condor_user"
        return ""

    def _earlier_outcome(self, job: str, source: JobSource, lease: SocketLease) -> RunOutcome | None:
        """Report the outcome of an earlier run, which may be undelivered; None: run the job anew."""
        left = self.interrupted_runs.get(job)
        if left is None:
            return None
        report = Report.model_validate_json(left.outcome)
        # A stopped job runs again here; one that this node failed is requeued.
        anew = report.state is JobState.PREEMPTED and report.reason.code not in REQUEUE_REASONS
        if not anew:
            try:
                source.resume(left.record.attempt)
                source.report(report)
            except JobFinal:
                self.interrupted_runs.pop(job, None)
                return self._outcome_at_repository(job, source, lease)
            except AttemptSuperseded:
                log.info("job %s: a later attempt has superseded the earlier run", job)
                anew = True
            except Conflict:
                log.info("job %s: its final report was delivered before", job)
        self.interrupted_runs.pop(job, None)
        return None if anew else _report_again(report, lease)

    def _outcome_at_repository(self, job: str, source: JobSource, lease: SocketLease) -> RunOutcome:
        """Return the outcome of an ended job whose scheduler missed the end, and starts it again."""
        report = source.end()
        log.info("job %s has ended before: it is %s", job, report.state)
        if report.state is JobState.CANCELED:  # the scheduler shall remove it, not see it end
            raise Unavailable("agent", f"job {job} is canceled and will be removed")
        return _report_again(report, lease)

    # ------------------------------------------------------------------ transparent jobs

    def run_condor_job(
        self,
        message: protocol.SubmitMessage,
        lease: SocketLease,
        peer: protocol.PeerCredentials,
        messages: Iterator[protocol.Message],
    ) -> None:
        """Run a transparent job. messages: of the client, with the job's files."""
        with self._report_errors(message.job, lease), ExitStack() as stack:
            condor_jobs = self._condor_jobs()
            slot = condor_jobs.find_slot(peer)
            name = slot_job_name(slot)
            stack.enter_context(self.active.reserve_memory(name, message.memory, condor_jobs.memory))
            job = stack.enter_context(receive_job(message, name, peer, condor_jobs.spool, messages))
            lease.connection.settimeout(None)  # a client may stall only after the submission
            attempt = uuid.uuid4().hex
            try:
                start_point = condor_jobs.begin(message, attempt, slot)
            except Unauthenticated:  # the node's own token is invalid: other jobs fail, too
                self.health.count_failure()
                raise
            stack.callback(start_point.close)
            job_access = JobAccess(message, lease.send, start_point.relay_token)
            self.active.await_removal(message.job, peer.uid)
            active = ActiveRun(name, peer.uid, lease, message.job, job_access)
            stack.enter_context(self.active.register(active))
            log.info("%s is job %s of uid %d", name, message.job, peer.uid)
            active.watch_client(messages, job_access.take)
            source = job.source(start_point, lease.send, job_access)
            run = self._make_condor_run(active, source, job_access, attempt, start_point.remark)
            with suspending(run, peer.pid):
                outcome = execute(run)
            self.active.end_access(active)
            self._update_node_health(run, outcome)
            # A stopping agent waits for this, too.
            job.send_outputs(lease.send)
            needs = _image_requirements(run, outcome, message.image)
            lease.end(outcome, job.ended(), needs, job.rejected())
            if message.checkpoint and active.wait_received():
                start_point.remove_checkpoint()

    def _make_condor_run(
        self, active: ActiveRun, source: LocalJob, job_access: JobAccess, attempt: str, remark: str
    ) -> Run:
        max_log = source.spec.disk * MIB
        settings = replace(self.services.settings, max_log=max_log, script_handles_stop=True)
        services = replace(self.services, settings=settings)
        lease, name, events = active.lease, active.name, active.event_queue
        request = RunRequest(
            source,
            lease.progress,
            services,
            name,
            attempt,
            events,
            port_handlers=job_access.port_handlers,
            shut=job_access.shut,
            on_usage=lease.progress,
            remark=remark,
        )
        run = active.run = Run(request)
        job_access.console = run.console
        return run

    def find_access(self, peer: protocol.PeerCredentials) -> tuple[str, JobAccess]:
        """Return the name of the job that the client belongs to, and the access to its VM.

        Raises:
            Forbidden: the client belongs to no job that has a VM. Unavailable: try again later.
        """
        name = slot_job_name(self._condor_jobs().find_slot(peer))
        return name, self.active.access(name, peer.uid)

    def _condor_jobs(self) -> CondorJobServices:
        if self.condor_jobs is None:
            raise Forbidden("this node accepts only jobs of the repository")
        return self.condor_jobs

    # ------------------------------------------------------------------ health and errors

    def _update_node_health(self, run: Run, outcome: RunOutcome) -> None:
        """Update the node's health; after several failed boots in a row, probe the hypervisor."""
        if outcome.reason.code is ReasonCode.NODE_FAILED and not outcome.node_at_fault:
            self._note_full_disk()
        if self.health.count_run(outcome) and self.services.reprobe is not None:
            kind = run.choice.driver.kind
            log.warning("%s VMs in a row did not boot: probing %s", FAILURE_LIMIT, kind)
            start_thread("recheck", self.services.reprobe, kind)

    def _note_full_disk(self) -> None:
        """Count a node failure if the disk is too full for any job, not just for a large one."""
        if (
            self.condor_jobs is not None
            and disk_usage(self.condor_jobs.spool.parent).free < MIN_FREE_BYTES
        ):
            self.health.count_failure()

    @contextmanager
    def _report_errors(self, job: str, lease: SocketLease) -> Iterator[None]:
        """Report errors of the context to the client that asked for the job."""
        try:
            yield
        except ReportUndelivered as undelivered:
            log.error("job %s: %s; the job's next run delivers it", job, undelivered)
            self.interrupted_runs[job] = undelivered.left
            lease.refuse(undelivered, retry=True)
        except VMJobsError as error:
            log.warning("job %s: %s", job, error)
            if isinstance(error, StorageFull):
                self._note_full_disk()
            lease.refuse(error, retry=isinstance(error, Unavailable))
        except OSError as error:
            log.exception("job %s failed on this node", job)
            self._note_full_disk()
            lease.report_node_fault(f"the node failed: {reason_of(error)}")
        except Exception as error:
            log.exception("job %s", job)
            fault = VMJobsError(f"the agent failed: {type(error).__name__}")
            lease.refuse(fault, retry=False)


def _report_again(report: Report, lease: SocketLease) -> RunOutcome:
    lease.progress(report)
    return RunOutcome(report.state, report.reason, report.exit)


def _image_requirements(run: Run, outcome: RunOutcome, named: str) -> protocol.ImageRequirements | None:
    """Return the image's requirements if no hypervisor here boots it. named: as the job does.

    None, too, if the job excludes all hypervisors that boot the image: only its user can correct that.
    """
    if not outcome.image_unbootable:
        return None
    image = run.image
    able = [kind for kind in image.kinds if kind in run.spec.kinds]
    if not able:
        return None
    return protocol.ImageRequirements(named=named, kinds=tuple(able), architecture=image.architecture)
