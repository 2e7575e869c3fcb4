"""``vmjobs exec``: the program that HTCondor's starter runs on the execute node."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import click

from condor import names
from condor.events import outcomes
from condor.events.progress import publish_progress
from condor.node import scratch
from condor.node.chirp import ChirpReporter
from vmjobs.agent import protocol
from vmjobs.cli.common import config, read_token
from vmjobs.cli.logs import configure_logging
from vmjobs.errors import Unavailable
from vmjobs.execute import NodeFailure, run_job

log = logging.getLogger(__name__)


@click.command("exec")
@click.option("--job", required=True, help="The job's id.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    default=Path("job.token"),
    show_default=True,
    help="File with the job's token.",
)
def exec_job(job: str, token_file: Path) -> None:
    """Run one job through this node's agent and exit with its script's status.

    Inside an HTCondor job, progress goes into the job ad as ChirpVM* attributes.
    """
    settings = config()
    configure_logging(settings.log_level, settings.log_format)
    reporter, last_line = ChirpReporter(warn=log.warning), ""

    def on_progress(message: protocol.ProgressMessage | protocol.EndMessage) -> None:
        nonlocal last_line
        line = f"{message.node} {message.report.state}: {message.report.reason.message}"
        if line != last_line:  # else the message only updates resource usage
            log.info("%s", line)
        last_line = line
        publish_progress(reporter, message.model_dump(mode="json", exclude_none=True))

    def on_stop() -> None:
        # This start does not count as an attempt.
        reporter.publish_later(outcomes.eviction_attributes(scratch.eviction_count(names.JOB_AD)))

    token = read_token(token_file)
    try:
        sys.exit(run_job(settings.socket, job, token, on_progress, on_stop=on_stop))
    except (Unavailable, NodeFailure) as error:
        # A script may exit with any status, so only a death by signal makes HTCondor requeue the job
        # (on_exit_remove in condor/submit/description.py).
        log.error("%s; the job has to run elsewhere", error.message)
        reporter.publish_later(outcomes.node_failure_attributes(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
