"""The steps of a run. Each is a function of the run; :data:`STEPS` lists them in order."""

from __future__ import annotations

import math
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from vmjobs.agent.guest.endpoint import serving
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.image_source import LazyStart
from vmjobs.agent.run import checkpoint
from vmjobs.agent.run.console import ConsoleReader
from vmjobs.agent.run.console_rules import ConsoleRule, ConsoleRuleError, parse_console_rule
from vmjobs.agent.run.events import ImageLost
from vmjobs.agent.run.job_disk import JobDescription, create_blank_disk, write_job_disk
from vmjobs.agent.run.monitor import await_end, await_ready, collect
from vmjobs.agent.run.outcome import image_failed, run_failed
from vmjobs.agent.run.vm_watch import VmWatch, watching
from vmjobs.errors import (
    DigestMismatch,
    ImageRejected,
    NoHypervisor,
    NotFound,
    StorageFull,
    Unauthenticated,
    Unavailable,
)
from vmjobs.hypervisor.base import ENDPOINT_ADDRESS, ENDPOINT_PORT, BootImage, DataDisk, VmConfig
from vmjobs.model import (
    MIB,
    HypervisorKind,
    InputFile,
    JobState,
    NetworkMode,
    ReasonCode,
    Strategy,
    StreamName,
)

if TYPE_CHECKING:
    from vmjobs.agent.run.job_run import Run

T = TypeVar("T")

#: Bytes on the output disk for tar headers, exit.json, stdout and stderr, beside the outputs.
OUTPUT_OVERHEAD_BYTES = 16 * MIB


@dataclass(frozen=True)
class Step:
    """A step: its title, the phase its time counts for, and its action.

    state: the job's state from this step on, where it changes.
    """

    title: str
    phase: str
    action: Callable[[Run], None]
    state: JobState | None = None


def fetch_image(run: Run) -> None:
    """Lease the verified image on this node until the VM is gone."""

    run.fetched_before = run.services.images.fetched(run.ticket.image_digest)
    _lease_image(run, lazy=run.driver.kind is not HypervisorKind.UML)


_IMAGE_ERRORS = (
    DigestMismatch,
    ImageRejected,
    NotFound,
    StorageFull,
    Unauthenticated,
    Unavailable,
)


def _lease_image(run: Run, *, lazy: bool) -> None:
    """Lease the image. lazy: a VM can start from it before it is complete, if the node allows that."""
    start = LazyStart(
        run.directory / "blocks.sock", lambda error: run.event_queue.put(ImageLost(error))
    )

    def lease() -> BootImage:
        leased = run.services.images.lease(
            run.ticket.image_digest, lambda _done, _all: run.check_stop(), start if lazy else None
        )
        return run.resources.enter_context(leased)

    try:
        run.image = retry_while_unavailable(run, lease)
    except _IMAGE_ERRORS as error:
        raise image_failed(error) from error


def choose_hypervisor(run: Run) -> None:
    """Choose another hypervisor if the first choice cannot boot the image; journal the choice."""
    run.unbootable = run.image
    here, wanted = platform.machine(), run.image.architecture
    if wanted not in {"", here}:
        raise NoHypervisor(f"the image is for {wanted}, and this node's processors are {here}")
    kinds, spec = run.image.kinds, run.ticket.spec
    able = [kind for kind in kinds if kind in spec.kinds]
    seeded = run.image.cloud_init
    if run.driver.kind not in able or (seeded and not run.driver.abilities.cloud_init):
        # A demanded hypervisor was checked against the job earlier: only the image matters here.
        kinds = kinds if spec.hypervisor is not None else tuple(able)
        run.driver = run.services.choose(spec.hypervisor, kinds, spec.cpus, cloud_init=seeded)
        run.services.journal.reassign(run.attempt, run.machine, run.driver)
    run.has_suitable_driver, run.unbootable = True, None
    if run.driver.kind is HypervisorKind.UML and run.image.live is not None:
        run.image.live.fetch_rest()
        _lease_image(run, lazy=False)
    run.resumed = checkpoint.resumable_checkpoint(run)
    if run.resumed is not None:
        run.sentinel = run.resumed.sentinel
        # The hypervisor identifies a saved VM by its name.
        run.services.journal.reassign(run.attempt, run.resumed.machine, run.driver)
        run.machine = run.resumed.machine


def retry_while_unavailable(run: Run, fetch: Callable[[], T]) -> T:
    """Fetch, with retries while the repository is unreachable and the job is still wanted."""
    deadline = time.monotonic() + run.services.settings.deliver_seconds
    while True:
        try:
            return fetch()
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            run.check_stop(wait=1.0)


def fetch_inputs(run: Run) -> None:
    """Write the job disk with verified inputs, or fetch the VM's checkpoint."""
    online = run.ticket.spec.network is not NetworkMode.NONE
    run.guest_session = GuestSession(
        token=secrets.token_urlsafe(32),
        event_queue=run.event_queue,
        logs={name.value: run.stream(name) for name in (StreamName.OUT, StreamName.ERR)},
        max_log=run.services.settings.max_log,
        on_log=run.uploader.notify_streams,
        former=run.resumed.guest if run.resumed and online else "",
    )
    if run.resumed is not None:
        for saved in run.resumed.files:
            retry_while_unavailable(run, partial(checkpoint.fetch_file, run, saved))
            run.check_stop()
        return
    run.usage.add("input", 0)  # there may be none
    job_description = JobDescription(
        ticket=run.ticket,
        endpoint=f"http://{ENDPOINT_ADDRESS}" if online else "",
        token=run.guest_session.token if online else "",
        sentinel=run.sentinel,
    )
    write_job_disk(run.directory / "job.disk", job_description, partial(_fetch_input, run))


def _fetch_input(run: Run, file: InputFile, disk: BinaryIO) -> None:
    start = disk.tell()

    def fetch() -> None:
        disk.seek(start)
        disk.truncate()  # remove data from before a broken connection
        run.source.fetch_input(file, disk)

    retry_while_unavailable(run, fetch)
    run.usage.add("input", file.size)
    run.check_stop()


def make_disks(run: Run) -> None:
    """Make scratch disk, output disk and endpoint. A resumed VM already has its disks."""
    spec = run.ticket.spec
    if run.resumed is None:
        create_blank_disk(run.directory / "scratch.disk", spec.disk * MIB)
        create_blank_disk(run.directory / "output.disk", spec.disk * MIB + OUTPUT_OVERHEAD_BYTES)
        if run.image.cloud_init and run.services.write_seed is not None:
            run.services.write_seed(run.directory / "seed.disk", run.ticket)
    if spec.network is not NetworkMode.NONE:
        _open_network(run)


def boot(run: Run) -> None:
    """Start the VM. The journal already names it."""
    spec, directory = run.ticket.spec, run.directory
    (directory / "machine").mkdir(exist_ok=run.resumed is not None)
    run.boot_begun, run.platform = time.monotonic(), checkpoint.resume_platform(run)
    machine = VmConfig(
        name=run.machine,
        cpus=spec.cpus,
        memory=spec.memory,
        image=run.image,
        disks=tuple(_disks(directory)),
        console=run.stream(StreamName.CONSOLE),
        workdir=directory / "machine",
        network=run.network,
        saved=directory / checkpoint.MEMORY_FILE if run.resumed else None,
    )
    run.resources.enter_context(_running_vm(run, machine))
    if run.resumed is not None:
        run.boot_begun = time.monotonic()  # reading its memory does not count as boot time
    (directory / checkpoint.MEMORY_FILE).unlink(missing_ok=True)  # it is in the VM now


def _open_network(run: Run) -> None:
    """Make the VM's network, and serve the guest endpoint and the other ports there."""
    mode, ports = run.ticket.spec.network, (ENDPOINT_PORT, *run.port_handlers)
    run.network = run.driver.open_network(mode, ports)
    run.resources.callback(run.network.close)
    listening = run.network.listening
    run.resources.enter_context(serving(run.guest_session, run.network))
    for port, door in run.port_handlers.items():
        run.resources.enter_context(door(listening[port]))


def _disks(directory: Path) -> Iterator[DataDisk]:
    yield DataDisk(directory / "job.disk", read_only=True)
    yield DataDisk(directory / "scratch.disk")
    yield DataDisk(directory / "output.disk")
    if (seed := directory / "seed.disk").exists():
        yield DataDisk(seed, read_only=True)


def _rules(run: Run) -> dict[str, ConsoleRule]:
    spec = run.ticket.spec
    try:
        rules = {"ready": parse_console_rule(spec.ready_rule), "exit": parse_console_rule(spec.exit)}
    except ConsoleRuleError as error:
        raise run_failed(ReasonCode.NO_EXIT_REPORT, str(error)) from error
    return {name: pattern for name, pattern in rules.items() if pattern is not None}


@contextmanager
def _running_vm(run: Run, machine: VmConfig) -> Iterator[None]:
    settings = run.services.settings
    reader = ConsoleReader(machine.console, run.sentinel, _rules(run))
    if run.resumed is not None:
        reader.offset = run.resumed.heard
    run.watch = VmWatch(
        driver=run.driver,
        machine=machine.name,
        event_queue=run.event_queue,
        reader=reader,
        max_console=settings.max_console,
        silence=settings.silence_seconds,
        heard=lambda: _last_heartbeat(run),
        on_console=run.uploader.notify_streams,
        on_time=run.report_usage,
        disk=run.directory,
    )
    try:
        run.driver.start(machine)
        with watching(run.watch):
            yield
    finally:
        run.destroy_vm()


def _last_heartbeat(run: Run) -> float:
    """Return when the guest last sent a heartbeat; ``inf`` if none is expected from it.

    A guest of an image job that never asked for signals sends none.
    """
    if run.image.live is not None and run.image.live.is_waiting():
        return time.monotonic()  # the guest is blocked until a part of its image arrives
    is_heartbeat_expected = (
        run.ticket.spec.strategy is Strategy.SCRIPT or run.guest_session.has_heartbeat
    )
    return run.guest_session.heard if is_heartbeat_expected else math.inf


STEPS = (
    Step("fetch image", "staging", fetch_image, JobState.STAGING),
    Step("choose hypervisor", "staging", choose_hypervisor),
    Step("fetch inputs", "staging", fetch_inputs),
    Step("make disks", "staging", make_disks),
    Step("start machine", "booting", boot, JobState.BOOTING),
    Step("wait for the guest", "booting", await_ready),
    Step("run script", "running", await_end, JobState.RUNNING),
    Step("collect outputs", "collecting", collect, JobState.COLLECTING),
)
