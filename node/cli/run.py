"""``vmjobs run``: runs a job in a VM on this host, in one process."""

from __future__ import annotations

import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.status import Status
from rich.text import Text

from images.cli.oci_ref import resolve_image
from images.store.image_store import ImageStore
from node.parts import make_hypervisors, make_run_parts, run_locally
from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.agent.vm.events import EventQueue, SignalSent
from vmjobs.cli.common import config, echo, json_option, print_json
from vmjobs.cli.spec_options import build_spec, spec_options, split_inputs
from vmjobs.local import LocalJob, describe_inputs
from vmjobs.model import JobState, Report, StreamName
from vmjobs.paths import safe_join
from vmjobs.terminal import ByteSink, guest_output, printable

_STATE_TEXT = {
    JobState.STAGING: "preparing",
    JobState.BOOTING: "booting",
    JobState.COLLECTING: "collecting outputs",
}


@click.command()
@spec_options
@click.option(
    "--output-dir", type=click.Path(path_type=Path, file_okay=False), default=Path(), show_default="."
)
@click.option(
    "--console",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write the VM's console to this file; `-`: print it.",
)
@json_option
def run(
    script: str | None,
    arguments: tuple[str, ...],
    inputs: tuple[str, ...],
    output_dir: Path,
    console: Path | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Run a job in a VM on this host: no scheduler, no server.

    With SCRIPT, its output and exit status become this command's own. Without SCRIPT, the image runs
    its own program, and --exit sets how the end of the job is recognized.

    With --json, standard output has the outcome as one JSON document (state, reason, exit, outputs
    with the file of each, ...) and nothing else: SCRIPT's output goes to standard error. The exit
    status is the same.
    """
    settings = config()
    files = split_inputs(inputs)
    environment = fields.pop("environment")
    fields["image"] = resolve_image(fields["image"])
    spec = build_spec(script, arguments, describe_inputs(files), environment, **fields)
    images = ImageStore(settings.images)
    terminal = Console(stderr=True)
    errors = guest_output(sys.stderr.buffer)
    printed = errors if as_json else guest_output(sys.stdout.buffer)
    with _console_file(console, printed) as console_sink, _status(terminal) as status:
        job = LocalJob(
            job_id=f"local-{uuid.uuid4().hex[:12]}",
            spec=spec,
            image_digest=images.resolve(spec.image),
            files=files,
            output_directory=output_dir,
            on_report=lambda report: None,
            sinks={
                StreamName.OUT: printed,
                StreamName.ERR: errors,
                **({StreamName.CONSOLE: console_sink} if console_sink else {}),
            },
        )
        lease = _TerminalLease(status)
        runs = settings.state_dir / "local" / "runs"
        hypervisors = make_hypervisors(settings, images, settings.state_dir / "local" / "probes.json")
        run_parts = make_run_parts(settings, images, hypervisors, runs)
        run_parts.journal.recover(hypervisors.drivers)  # of earlier runs that were killed
        outcome = run_locally(run_parts, job, _stopped_by_signals(), lease.progress)
    if as_json:
        sys.stderr.flush()
        print_json(_outcome_as_json(outcome, job, lease.last))
    else:
        _print_outcome(outcome, job, lease.last)
    sys.exit(outcome.exit_code)


def _stopped_by_signals() -> EventQueue:
    events = EventQueue()

    def stop(number: int, _frame: object) -> None:
        events.put(SignalSent(number))
        signal.signal(number, signal.default_int_handler)  # a second signal ends this process at once

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    return events


class _TerminalLease:
    def __init__(self, status: Status | None) -> None:
        self._status = status
        self.last: Report | None = None

    def progress(self, report: Report) -> None:
        """Show the job's state while its script does not run."""
        self.last = report
        if self._status is None:
            return
        state_text = _STATE_TEXT.get(report.state)
        if state_text is None:
            self._status.stop()
        else:
            name = f" ({report.hypervisor})" if report.hypervisor else ""
            self._status.update(Text(printable(f"{state_text}{name}: {report.reason.message}")))
            self._status.start()


def _status(terminal: Console) -> Any:
    return terminal.status("preparing") if terminal.is_terminal else nullcontext()


@contextmanager
def _console_file(path: Path | None, printed: ByteSink) -> Iterator[ByteSink | None]:
    if path is None:
        yield None
        return
    if str(path) == "-":
        yield printed
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise click.BadParameter(
            f"cannot write {path}: {error.strerror}", param_hint="--console"
        ) from error
    with file:
        yield file


def _outcome_as_json(outcome: RunOutcome, job: LocalJob, report: Report | None) -> dict[str, Any]:
    """Return the outcome as JSON data. Outputs have path: in the guest; file: here."""
    outputs = [(output, safe_join(job.output_directory, output.path)) for output in job.outputs]
    return {
        **(report.model_dump(mode="json") if report else {}),
        "state": outcome.state,
        "reason": outcome.reason,
        "exit": outcome.exit,
        "image": job.image_digest,
        "outputs": [{**output.model_dump(mode="json"), "file": str(file)} for output, file in outputs],
    }


def _print_outcome(outcome: RunOutcome, job: LocalJob, report: Report | None) -> None:
    for output in job.outputs:
        echo(f"vmjobs: {output.path} ({output.size} bytes)", err=True)
    for entry in report.rejected if report else ():
        echo(f"vmjobs: refused {entry.path}: {entry.why}", err=True)
    if outcome.state is not JobState.COMPLETED:
        echo(f"vmjobs: {outcome.reason.message} [{outcome.reason.code}]", err=True)
