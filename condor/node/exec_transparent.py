"""Run a transparent job: the job wrapper starts this in place of the job's command.

It runs as long as the job, beside each job of a node: it imports no module that takes long to load.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress

from condor import names
from condor.events import outcomes, progress
from condor.node import scratch
from condor.node.chirp import ChirpReporter
from vmjobs.agent_socket import agent_socket
from vmjobs.errors import VMJobsError, reason_of
from vmjobs.execute_transparent import run_transparent_job
from vmjobs.transparent_job import TransparentJob, account_names, start_script

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

    from vmjobs.transparent_job import RunResult

#: Longer than a schedd takes to restart, shorter than a job's lease (40 minutes, by default).
REPORT_TIMEOUT_SECONDS = 900.0


def main(environment: str, command: Sequence[str]) -> NoReturn:
    """Run an HTCondor job, unchanged, in a VM of the image that its ad names.

    HTCondor's starter runs this in place of the job's ``command``, in the job's scratch directory. This
    process ends with the job's exit status or signal. Failures of the VM go into the job ad as
    ChirpVM* attributes, and the schedd's policy acts on them. Only the job writes to its standard
    error: the agent writes to its own log.

    environment: a file with the job's variables, each followed by a NUL.
    """
    variables = _read_variables(environment)
    pairs: dict[bytes, bytes] = dict(word.partition(b"=")[::2] for word in variables)
    own = os.fsdecode(pairs.get(b"_CONDOR_SCRATCH_DIR", b"."))  # it may not be the current directory
    job_ad, chirp_config = os.path.join(own, names.JOB_AD), os.path.join(own, names.CHIRP_CONFIG)
    reporter = ChirpReporter(chirp_config)

    def on_progress(message: Mapping[str, Any]) -> None:
        progress.publish_progress(reporter, message, unchanged=True)

    def report_job_end(end: RunResult) -> bool:
        if (exit := end.exit) is not None:
            _retry_until_reported(
                lambda: reporter.publish_state(
                    outcomes.job_end_attributes(exit, is_out_of_memory=end.is_out_of_memory)
                )
            )
        return exit is not None or outcomes.is_held(end.code)

    def run() -> RunResult:
        directory = scratch.scratch_directory(pairs)
        ad, slot = scratch.read(job_ad), scratch.read(os.path.join(own, names.MACHINE_AD))
        message = scratch.submit_message(ad, slot, directory, account_names())

        def chirp(job: socket.socket) -> None:
            from condor.node.chirp_relay import ChirpRelay  # noqa: PLC0415 - few jobs need it

            has_full_access = ad.is_true(names.WANT_IO_PROXY)
            ChirpRelay(
                chirp_config, has_full_access=has_full_access, is_checkpointable=message["checkpoint"]
            )(job)

        start = start_script(variables, [os.fsencode(word) for word in command])
        handing = TransparentJob(
            message,
            start,
            directory,
            fields=scratch.ATTRIBUTE_OF_FIELD,
            chirp=chirp,
            report_job_end=report_job_end,
        )
        return run_transparent_job(agent_socket(), handing, on_progress)

    reporter.publish_state(outcomes.start_attributes(time.time()))
    if scratch.was_held(job_ad):  # otherwise a failure of the job itself would count as the old hold
        reporter.publish({names.VM_OUTCOME: outcomes.AGAIN})
    try:
        end = run()
    except VMJobsError as error:
        reporter.publish_later(outcomes.failure_attributes(error.code, error.message, time.time()))
        _exit_without_result(own)
    except Exception as error:
        why = f"the node failed: {reason_of(error)}"
        reporter.publish_later(outcomes.failure_attributes("NODE_FAILED", why, time.time()))
        _exit_without_result(own)
    if end.rejected:
        reporter.publish_later(outcomes.rejected_output_attributes(end.rejected))
    if end.stopped:
        reporter.publish_later(
            outcomes.transparent_eviction_attributes(end, scratch.eviction_count(job_ad))
        )
    if end.exit is not None:
        # An evicted job has not ended for HTCondor, whatever its exit status.
        if not end.stopped:
            report_job_end(end)  # a checkpointable job's end has been settled already
        if end.exit.signal is not None:
            _exit_by_signal(end.exit.signal)
        os._exit(end.exit.code or 0)  # nothing is left to flush; the interpreter's shutdown is slow
    if end.stopped:
        _exit_by_signal(end.stopped)
    reporter.publish_later(outcomes.failure_attributes(end.code, end.why, time.time()))
    _exit_without_result(own)


def _read_variables(environment: str) -> list[bytes]:
    """Read the job's variables, and remove their file.

    The wrapper of an earlier release puts the file into the job's directory, from which HTCondor would
    transfer it to the user as an output.
    """
    try:
        with open(environment, "rb") as file:
            variables = file.read().split(b"\0")
        if not os.path.islink(environment):  # as those of /proc/self/fd are
            os.unlink(environment)
    except OSError:
        _exit_by_signal(signal.SIGKILL)  # without the variables the failure cannot be reported
    return variables


def _retry_until_reported(tell: Callable[[], bool]) -> None:
    """Report the job's own end until the schedd has it, so that a schedd's restart loses none."""
    give_up = time.monotonic() + REPORT_TIMEOUT_SECONDS
    while not tell() and time.monotonic() < give_up:
        time.sleep(2)  # a starter does not signal that its shadow has reconnected


def _exit_without_result(own: str) -> NoReturn:
    """Exit without a result, after creating missing output files, empty.

    HTCondor checks for them first, and would hold the job for a missing one, whatever the outcome is.
    """
    with suppress(VMJobsError, OSError):
        scratch.create_missing_outputs(own)
    _exit_by_signal(signal.SIGKILL)


def _exit_by_signal(number: int) -> NoReturn:
    """End this process by a signal, without a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal does not end a process
