"""The steps of a run, in their order. Each is a function of the run; :data:`STEPS` is the list."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vmjobs.agent.console import ConsoleReader, last_lines, panic_text
from vmjobs.agent.endpoint import GuestLink, serving
from vmjobs.agent.inbox import (
    ConsoleFlooded,
    ExitReported,
    GuestSilent,
    LeaseLost,
    MachineGone,
    Observation,
    Ready,
    ScriptEnded,
    SignalSent,
    Superseded,
)
from vmjobs.agent.jobdisk import Briefing, blank_disk, write_job_disk, write_job_tar
from vmjobs.agent.outputs import DiskContents, read_output_disk
from vmjobs.agent.verdict import Ended, Verdict, failed, judge, judge_early_end, stopped, with_console
from vmjobs.agent.watch import Watch, watching
from vmjobs.errors import DigestMismatch, NotFound, Unavailable
from vmjobs.hypervisor.base import ENDPOINT_ADDRESS, DataDisk, Machine, Network
from vmjobs.model import (
    MIB,
    ExitChannel,
    ExitStatus,
    InputFile,
    JobState,
    NetworkMode,
    ReasonCode,
    StreamName,
)
from vmjobs.paths import below

if TYPE_CHECKING:
    from vmjobs.agent.run import Run

T = TypeVar("T")

#: Room on the output disk for what is not payload: tar headers, exit.json, stdout, stderr.
OUTPUT_SLACK = 16 * MIB
#: Signals that mean "stop": the script gets them, and then a few seconds.
STOPPING = frozenset({2, 3, 15})


@dataclass(frozen=True)
class Step:
    """A step: its title, the phase its time counts for, and what it does.

    state: the job's state from this step on, where it changes.
    """

    title: str
    phase: str
    action: Callable[[Run], None]
    state: JobState | None = None


def fetch_image(run: Run) -> None:
    """Have the image on this node, verified."""
    try:
        run.image = patiently(
            run,
            lambda: run.parts.images.prepare(
                run.ticket.image_digest, lambda _done, _all: run.check_stop()
            ),
        )
    except DigestMismatch as error:
        raise failed(ReasonCode.IMAGE_REJECTED, error.message) from error
    except (NotFound, Unavailable) as error:
        raise failed(ReasonCode.IMAGE_UNAVAILABLE, error.message) from error


def patiently(run: Run, fetch: Callable[[], T]) -> T:
    """Fetch, and again while the repository is out of reach and the job is still wanted."""
    deadline = time.monotonic() + run.parts.settings.deliver_seconds
    while True:
        try:
            return fetch()
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            run.check_stop(wait=1.0)


def fetch_inputs(run: Run) -> None:
    """Have script and inputs on this node, verified."""
    inputs = run.directory / "inputs"
    inputs.mkdir()
    for file in run.ticket.spec.inputs:
        target = below(inputs, file.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        patiently(run, partial(_fetch_input, run, file, target))
        run.check_stop()


def _fetch_input(run: Run, file: InputFile, target: Path) -> None:
    with target.open("wb") as sink:
        run.source.fetch_input(file, sink)


def make_disks(run: Run) -> None:
    """Lay out what the guest will find: job disk, scratch disk, output disk, endpoint."""
    spec, inputs = run.ticket.spec, run.directory / "inputs"
    online = spec.network is not NetworkMode.NONE
    run.link = GuestLink(
        token=secrets.token_urlsafe(32),
        inbox=run.inbox,
        tray=run.tray,
        job_tar=run.directory / "job.tar",
        logs={name.value: run.stream(name) for name in (StreamName.OUT, StreamName.ERR)},
        max_log=run.parts.settings.max_log,
        on_log=run.courier.streams_grew,
    )
    briefing = Briefing(
        ticket=run.ticket,
        endpoint=f"http://{ENDPOINT_ADDRESS}" if online else "",
        token=run.link.token if online else "",
        sentinel=run.sentinel,
        epoch=int(time.time()),
    )
    write_job_disk(run.directory / "job.disk", briefing, None if online else inputs)
    blank_disk(run.directory / "scratch.disk", spec.disk * MIB)
    # A guest with an endpoint delivers there; its output disk only keeps the others' places.
    blank_disk(run.directory / "output.disk", MIB if online else spec.disk * MIB + OUTPUT_SLACK)
    if online:
        with run.link.job_tar.open("xb") as sink:
            write_job_tar(sink, run.ticket, inputs)
    shutil.rmtree(inputs)
    if online:
        run.resources.enter_context(serving(run.link, run.directory / "endpoint.sock"))


def boot(run: Run) -> None:
    """Start the machine. The journal names it already."""
    spec, directory = run.ticket.spec, run.directory
    (directory / "machine").mkdir()
    run.boot_begun = time.monotonic()
    online = spec.network is not NetworkMode.NONE
    machine = Machine(
        name=run.machine,
        cpus=spec.cpus,
        memory=spec.memory,
        image=run.image,
        disks=(
            DataDisk(directory / "job.disk", read_only=True),
            DataDisk(directory / "scratch.disk"),
            DataDisk(directory / "output.disk"),
        ),
        console=run.stream(StreamName.CONSOLE),
        workdir=directory / "machine",
        network=Network(spec.network, directory / "endpoint.sock") if online else None,
    )
    run.resources.enter_context(_running(run, machine))


@contextmanager
def _running(run: Run, machine: Machine) -> Iterator[None]:
    settings = run.parts.settings
    reader = ConsoleReader(machine.console, run.sentinel)
    run.watch = Watch(
        driver=run.driver,
        machine=machine.name,
        inbox=run.inbox,
        reader=reader,
        max_console=settings.max_console,
        silence=settings.silence_seconds,
        heard=lambda: run.link.heard,
        on_console=run.courier.streams_grew,
    )
    try:
        run.driver.start(machine)
        with watching(run.watch):
            yield
    finally:
        run.driver.destroy(machine.name)


def await_ready(run: Run) -> None:
    """Wait until the guest says that it is ready."""
    deadline = run.boot_begun + run.ticket.spec.boot_seconds
    while True:
        seen = _observe(run, deadline)
        if isinstance(seen, Ready):
            return
        if isinstance(seen, MachineGone):
            raise Ended(_early_end(run, ready=False))
        if seen is None:
            message = f"the guest was not ready within {run.ticket.spec.boot_seconds} s"
            raise failed(ReasonCode.BOOT_TIMED_OUT, with_console(message, _last_lines(run)))


def await_script(run: Run) -> None:
    """Wait until the script has ended, or its time is over."""
    deadline = time.monotonic() + run.ticket.spec.run_seconds
    # Only now is the guest heard of all the time: before and after it has deadlines of its own.
    run.link.heard = time.monotonic()
    if run.watch is not None:
        run.watch.listening = run.ticket.spec.network is not NetworkMode.NONE
    while True:
        seen = _observe(run, deadline)
        if isinstance(seen, ScriptEnded | ExitReported) and run.watch is not None:
            run.watch.listening = False
        if isinstance(seen, ScriptEnded):
            run.script_ended = seen
            return
        if isinstance(seen, ExitReported | MachineGone):
            run.inbox.put(seen)
            return
        if seen is None:
            message = f"the script was still running after {run.ticket.spec.run_seconds} s"
            raise failed(ReasonCode.TIMED_OUT, message)


def collect(run: Run) -> None:
    """Take what the guest delivers until its machine is gone, then judge."""
    deadline = time.monotonic() + run.parts.settings.collect_seconds
    reported: ExitStatus | None = None
    while not isinstance(seen := _observe(run, deadline), MachineGone):
        if isinstance(seen, ExitReported):
            # The guest says it twice, by its endpoint and on its console, in no certain order.
            if reported is None or seen.exit.channel is ExitChannel.ENDPOINT:
                reported = seen.exit
            # All is delivered; a guest that does not power off now is switched off.
            deadline = min(deadline, time.monotonic() + run.parts.settings.grace_seconds)
        elif seen is None:
            if reported is None:
                raise failed(ReasonCode.GUEST_LOST, "the guest did not deliver its outputs in time")
            break
    raise Ended(_judge(run, reported))


STEPS = (
    Step("fetch image", "staging", fetch_image, JobState.STAGING),
    Step("fetch inputs", "staging", fetch_inputs),
    Step("make disks", "staging", make_disks),
    Step("start machine", "booting", boot, JobState.BOOTING),
    Step("wait for the guest", "booting", await_ready),
    Step("run script", "running", await_script, JobState.RUNNING),
    Step("collect outputs", "collecting", collect, JobState.COLLECTING),
)


def _judge(run: Run, reported: ExitStatus | None) -> Verdict:
    """The verdict once the machine is gone."""
    disk = _read_output_disk(run)
    ended = run.script_ended
    exit = disk.exit or reported or (ended.exit if ended else None)
    if exit is None:
        return _early_end(run, ready=True)
    if disk.exit is not None and not disk.complete:
        run.tray.too_large = True
    elif reported is None and disk.exit is None:
        message = "the machine ended before it had delivered its outputs"
        return Verdict(JobState.FAILED, failed(ReasonCode.GUEST_LOST, message).verdict.reason, exit)
    return judge(
        exit,
        disk_full=bool(ended and ended.disk_full),
        too_large=run.tray.too_large,
        missing=run.tray.missing(),
        disk=run.ticket.spec.disk,
    )


def _read_output_disk(run: Run) -> DiskContents:
    if run.ticket.spec.network is not NetworkMode.NONE:
        return DiskContents(None, complete=True)
    streams = {"stdout": run.stream(StreamName.OUT), "stderr": run.stream(StreamName.ERR)}
    return read_output_disk(
        run.directory / "output.disk", run.tray, streams, run.parts.settings.max_log
    )


def _early_end(run: Run, *, ready: bool) -> Verdict:
    panic = panic_text(run.stream(StreamName.CONSOLE))
    return judge_early_end(panic=panic, ready=ready, last_lines=_last_lines(run))


def _last_lines(run: Run) -> str:
    return last_lines(run.stream(StreamName.CONSOLE))


def _observe(run: Run, deadline: float) -> Observation | None:
    """The next observation that a step decides on; what ends any step is dealt with here."""
    while isinstance(seen := run.inbox.next(min(deadline, run.stop_by)), SignalSent):
        run.link.send_signal(seen.number)
        if seen.number in STOPPING:
            run.stop_by = min(run.stop_by, time.monotonic() + run.parts.settings.grace_seconds)
            run.stopped_by = seen.number
    if isinstance(seen, LeaseLost):
        raise stopped("whoever had asked for this run is gone")
    if isinstance(seen, Superseded):
        raise stopped(f"the repository takes no more word from this attempt: {seen.why}")
    if isinstance(seen, ConsoleFlooded):
        message = f"the console grew beyond {run.parts.settings.max_console} bytes"
        raise failed(ReasonCode.CONSOLE_FLOODED, message)
    if isinstance(seen, GuestSilent):
        message = f"the guest was not heard of for {seen.seconds:.0f} s"
        raise failed(ReasonCode.GUEST_LOST, with_console(message, _last_lines(run)))
    if run.stopped_by and (seen is None or isinstance(seen, MachineGone | ExitReported)):
        exit = seen.exit if isinstance(seen, ExitReported) else None
        raise stopped(f"stopped by signal {run.stopped_by}", exit)
    return seen
