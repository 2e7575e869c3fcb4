"""``vmjobs exec-unchanged``: what the job wrapper starts in place of a job that wants a machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click

from vmjobs.agent import protocol
from vmjobs.cli.support import config
from vmjobs.errors import VMJobsError, reason_of
from vmjobs.model import ExitStatus

#: Longer than a schedd takes to restart, shorter than a job's lease (40 minutes, by default).
INSIST_SECONDS = 900.0


@click.command("exec-unchanged", context_settings={"ignore_unknown_options": True})
@click.option(
    "--environment",
    type=click.Path(path_type=Path),
    required=True,
    help="File with the job's variables, each with a NUL behind it.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_unchanged(environment: Path, command: tuple[str, ...]) -> None:
    """Run an HTCondor job as it is, in a machine of the image that its ad names.

    HTCondor's starter runs this in place of the job's COMMAND, in the job's own directory. It ends as
    the job ends, by the same exit status or signal. What went wrong with the machine goes into the
    job ad as ChirpVM* attributes, and the schedd's policy decides what becomes of the job.
    """
    from condor import names, outcomes, progress, scratch  # noqa: PLC0415
    from condor.chirp import ChirpRelay, ChirpReporter  # noqa: PLC0415
    from vmjobs.unchanged import End, Handing, account, run_handed, start_words  # noqa: PLC0415

    # The job's standard error is the job's alone. What the agent has to say stands in its own log.
    logging.disable()
    variables = _variables(environment)
    pairs = dict(word.partition(b"=")[::2] for word in variables)
    own = Path(os.fsdecode(pairs.get(b"_CONDOR_SCRATCH_DIR", b".")))  # the job may be somewhere else
    reporter = ChirpReporter(own / names.CHIRP_CONFIG)

    def on_progress(message: protocol.ProgressMessage | protocol.EndMessage) -> None:
        progress.tell(reporter, message, unchanged=True)

    def settle(end: End) -> bool:
        if (exit := end.exit) is not None:
            _insist(lambda: reporter.publish_state(outcomes.own(exit, starved=end.starved)))
        return exit is not None or outcomes.is_held(end.code)

    def run() -> End:
        directory = scratch.scratch_directory(pairs)
        ad, slot = scratch.read(own / names.JOB_AD), scratch.read(own / names.MACHINE_AD)
        message = scratch.hand_message(ad, slot, directory, account())
        start = start_words(variables, [os.fsencode(word) for word in command])
        chirp = ChirpRelay(
            own / names.CHIRP_CONFIG,
            everything=ad.flag(names.WANT_IO_PROXY),
            moves=message.checkpoint,
        )
        handing = Handing(message, start, directory, chirp, settle)
        return run_handed(config().socket, handing, on_progress)

    reporter.publish_state(outcomes.begun(time.time()))
    if scratch.was_held(own / names.JOB_AD):  # or else the job's own failure could be taken for that
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
        reporter.publish_later(outcomes.left(end, scratch.times_vacated(own / names.JOB_AD)))
    if end.exit is not None:
        # One that was told to leave is not at its end for HTCondor, however it left.
        if not end.stopped:
            settle(end)  # of a job that is saved it is known by now
        _end_like(end.exit)
    if end.stopped:
        _die(end.stopped)
    reporter.publish_later(outcomes.attributes(end.code, end.why, time.time()))
    _give_up(own)


def _variables(environment: Path) -> list[bytes]:
    """The job's variables. For those an earlier release's wrapper makes a file in the job's directory,
    which would come back to its user as one that the job made.
    """
    try:
        variables = environment.read_bytes().split(b"\0")
        if not environment.is_symlink():  # as those of /proc/self/fd are
            environment.unlink()
    except OSError:
        _die(signal.SIGKILL)  # there is nothing to tell this by
    return variables


def _insist(tell: Callable[[], bool]) -> None:
    """Have the schedd know of the job's own end: while it is away the job must not count as lost."""
    give_up = time.monotonic() + INSIST_SECONDS
    while not tell() and time.monotonic() < give_up:
        time.sleep(2)  # nothing tells when a starter has its shadow back


def _give_up(own: Path) -> NoReturn:
    """End without a result. Files that HTCondor is to bring back are there, empty: it looks for them
    first, and would hold the job for what is missing, whatever the outcome is.
    """
    from condor import scratch  # noqa: PLC0415

    with suppress(VMJobsError, OSError):
        scratch.lay_out_missing(own)
    _die(signal.SIGKILL)


def _end_like(exit: ExitStatus) -> NoReturn:
    if exit.signal is not None:
        _die(exit.signal)
    sys.exit(exit.code)


def _die(number: int) -> NoReturn:
    """End by a signal, without a core of this process."""
    import resource  # noqa: PLC0415

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # a signal that ends nobody
