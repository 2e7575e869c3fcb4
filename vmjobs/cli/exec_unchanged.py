"""``vmjobs exec-unchanged``: what the job wrapper starts in place of a job that wants a machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import click

from vmjobs.agent import protocol
from vmjobs.cli.support import config
from vmjobs.errors import VMJobsError
from vmjobs.model import ExitStatus


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
    from condor.chirp import ChirpReporter  # noqa: PLC0415
    from vmjobs.unchanged import End, Handing, account, run_handed, start_words  # noqa: PLC0415

    # The job's standard error is the job's alone. What the agent has to say stands in its own log.
    logging.disable()
    reporter = ChirpReporter(Path(names.CHIRP_CONFIG))

    def on_progress(message: protocol.ProgressMessage | protocol.EndMessage) -> None:
        reporter.publish(progress.attributes(message.node, message.report))

    def run() -> End:
        variables = environment.read_bytes().split(b"\0")
        pairs = dict(word.partition(b"=")[::2] for word in variables)
        directory = scratch.scratch_directory(pairs)
        ad, slot = scratch.read(Path(names.JOB_AD)), scratch.read(Path(names.MACHINE_AD))
        message = scratch.hand_message(ad, slot, directory, account())
        start = start_words(variables, [os.fsencode(word) for word in command])
        return run_handed(config().socket, Handing(message, start, directory), on_progress)

    reporter.publish(outcomes.attributes(outcomes.LOST, "the job began"))
    try:
        end = run()
    except VMJobsError as error:
        reporter.publish(outcomes.failure(error))
        _die(signal.SIGKILL)
    except Exception as error:
        reporter.publish(outcomes.attributes("NODE_FAILED", f"the node failed: {error!r}"))
        _die(signal.SIGKILL)
    if end.exit is not None:
        reporter.publish(outcomes.attributes("", ""))
        _end_like(end.exit)
    if end.stopped:
        _die(end.stopped)
    reporter.publish(outcomes.attributes(end.code, end.why))
    _die(signal.SIGKILL)


def _end_like(exit: ExitStatus) -> NoReturn:
    if exit.signal is not None:
        _die(exit.signal)
    sys.exit(exit.code)


def _die(number: int) -> NoReturn:
    """End by a signal, without a core of this process."""
    import resource  # noqa: PLC0415

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)  # a signal that ends nobody
