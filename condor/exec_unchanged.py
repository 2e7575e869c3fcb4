"""What the job wrapper starts in place of a job that wants a machine.

It runs beside each job of a node, for as long as that: no module that takes long to import is needed.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress

from condor import names, outcomes, progress, scratch
from condor.chirp import ChirpReporter
from vmjobs.agent_socket import agent_socket
from vmjobs.errors import VMJobsError, reason_of
from vmjobs.unchanged import run_handed
from vmjobs.unchanged_job import Handing, account, start_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

    from vmjobs.unchanged_job import End, Exit

#: Longer than a schedd takes to restart, shorter than a job's lease (40 minutes, by default).
INSIST_SECONDS = 900.0


def main(environment: str, command: Sequence[str]) -> NoReturn:
    """Run an HTCondor job as it is, in a machine of the image that its ad names.

    HTCondor's starter runs this in place of the job's ``command``, in the job's own directory. It ends
    as the job ends, by the same exit status or signal. What went wrong with the machine goes into the
    job ad as ChirpVM* attributes, and the schedd's policy decides what becomes of the job. The job's
    standard error is the job's alone: what the agent has to say stands in its own log.

    environment: a file with the job's variables, each with a NUL behind it.
    """
    variables = _variables(environment)
    pairs: dict[bytes, bytes] = dict(word.partition(b"=")[::2] for word in variables)
    own = os.fsdecode(pairs.get(b"_CONDOR_SCRATCH_DIR", b"."))  # the job may be somewhere else
    job_ad, chirp_config = os.path.join(own, names.JOB_AD), os.path.join(own, names.CHIRP_CONFIG)
    reporter = ChirpReporter(chirp_config)

    def on_progress(message: Mapping[str, Any]) -> None:
        progress.tell(reporter, message, unchanged=True)

    def settle(end: End) -> bool:
        if (exit := end.exit) is not None:
            _insist(lambda: reporter.publish_state(outcomes.own(exit, starved=end.starved)))
        return exit is not None or outcomes.is_held(end.code)

    def run() -> End:
        directory = scratch.scratch_directory(pairs)
        ad, slot = scratch.read(job_ad), scratch.read(os.path.join(own, names.MACHINE_AD))
        message = scratch.hand_message(ad, slot, directory, account())

        def chirp(job: socket.socket) -> None:
            from condor.chirp_relay import ChirpRelay  # noqa: PLC0415 - few jobs need it

            everything = ad.flag(names.WANT_IO_PROXY)
            ChirpRelay(chirp_config, everything=everything, moves=message["checkpoint"])(job)

        start = start_words(variables, [os.fsencode(word) for word in command])
        handing = Handing(message, start, directory, fields=scratch.FIELDS, chirp=chirp, settle=settle)
        return run_handed(agent_socket(), handing, on_progress)

    reporter.publish_state(outcomes.begun(time.time()))
    if scratch.was_held(job_ad):  # or else the job's own failure could be taken for that
        reporter.publish({names.VM_OUTCOME: outcomes.AGAIN})
    try:
        end = run()
    except VMJobsError as error:
        reporter.publish_later(outcomes.failure(error, time.time()))
        _give_up(own)
    except Exception as error:
        why = f"the node failed: {reason_of(error)}"
        reporter.publish_later(outcomes.attributes("NODE_FAILED", why, time.time()))
        _give_up(own)
    if end.rejected:
        reporter.publish_later(outcomes.rejected(end.rejected))
    if end.stopped:
        reporter.publish_later(outcomes.left(end, scratch.times_vacated(job_ad)))
    if end.exit is not None:
        # One that was told to leave is not at its end for HTCondor, however it left.
        if not end.stopped:
            settle(end)  # of a job that is saved it is known by now
        _end_like(end.exit)
    if end.stopped:
        _die(end.stopped)
    reporter.publish_later(outcomes.attributes(end.code, end.why, time.time()))
    _give_up(own)


def _variables(environment: str) -> list[bytes]:
    """The job's variables. For those an earlier release's wrapper makes a file in the job's directory,
    which would come back to its user as one that the job made.
    """
    try:
        with open(environment, "rb") as file:
            variables = file.read().split(b"\0")
        if not os.path.islink(environment):  # as those of /proc/self/fd are
            os.unlink(environment)
    except OSError:
        _die(signal.SIGKILL)  # there is nothing to tell this by
    return variables


def _insist(tell: Callable[[], bool]) -> None:
    """Have the schedd know of the job's own end: while it is away the job must not count as lost."""
    give_up = time.monotonic() + INSIST_SECONDS
    while not tell() and time.monotonic() < give_up:
        time.sleep(2)  # nothing tells when a starter has its shadow back


def _give_up(own: str) -> NoReturn:
    """End without a result. Files that HTCondor is to bring back are there, empty: it looks for them
    first, and would hold the job for what is missing, whatever the outcome is.
    """
    with suppress(VMJobsError, OSError):
        scratch.lay_out_missing(own)
    _die(signal.SIGKILL)


def _end_like(exit: Exit) -> NoReturn:
    if exit.signal is not None:
        _die(exit.signal)
    os._exit(exit.code or 0)  # nothing is left to be flushed; an interpreter takes its time to end


def _die(number: int) -> NoReturn:
    """End by a signal, without a core of this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # a signal that ends nobody
