"""The steps of a run. Each is a function of the run; :data:`STEPS` lists them in order."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO, TypeVar

from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.image_source import LazyStart
from vmjobs.agent.run import checkpoint
from vmjobs.agent.run.monitor import await_end, await_ready, collect
from vmjobs.agent.run.outcome import image_failed, run_failed, run_unbootable
from vmjobs.agent.run.state import Run, VmChoice
from vmjobs.agent.vm.console import ConsoleReader
from vmjobs.agent.vm.console_rules import ConsoleRule, ConsoleRuleError, parse_console_rule
from vmjobs.agent.vm.events import ImageLost
from vmjobs.agent.vm.job_disk import (
    JobDescription,
    create_blank_disk,
    create_scratch_disk,
    data_disks,
    write_job_disk,
)
from vmjobs.agent.vm.running_vm import RunningVm, serve_guest
from vmjobs.agent.vm.vm_watch import VmWatch, watching
from vmjobs.errors import (
    DigestMismatch,
    ImageRejected,
    NoHypervisor,
    NotFound,
    StorageFull,
    Unauthenticated,
    Unavailable,
)
from vmjobs.hypervisor.base import ENDPOINT_ADDRESS, BootImage, Hypervisor, Network, VmConfig, VmNeeds
from vmjobs.model import (
    MIB,
    InputFile,
    JobSpec,
    JobState,
    NetworkMode,
    ReasonCode,
    Strategy,
    StreamName,
)

T = TypeVar("T")

#: Bytes on the output disk for tar headers, exit.json, stdout and stderr, beside the outputs.
OUTPUT_OVERHEAD_BYTES = 16 * MIB


#: What a step returns, which the run then stores: a string is the message of the next state.
Made = BootImage | VmChoice | GuestSession | Network | RunningVm | str | None


@dataclass(frozen=True)
class Step:
    """A step: its title, the phase its time counts for, and its action.

    state: the job's state from this step on, where it changes.
    """

    title: str
    phase: str
    action: Callable[[Run], Made]
    state: JobState | None = None


def fetch_image(run: Run) -> BootImage:
    """Lease the verified image on this node until the VM is gone."""
    run.begin_fetch()
    return _lease_image(run, lazy=run.choice.driver.abilities.lazy_start)


_IMAGE_ERRORS = (
    DigestMismatch,
    ImageRejected,
    NotFound,
    StorageFull,
    Unauthenticated,
    Unavailable,
)


def _lease_image(run: Run, *, lazy: bool) -> BootImage:
    """Lease the image. lazy: a VM can start from it before it is complete, if the node allows that."""
    images, event_queue = run.request.services.images, run.request.event_queue
    start = LazyStart(run.directory / "blocks.sock", lambda error: event_queue.put(ImageLost(error)))

    def lease() -> BootImage:
        leased = images.lease(
            run.ticket.image_digest, lambda _done, _all: run.check_stop(), start if lazy else None
        )
        return run.resources.enter_context(leased)

    try:
        return retry_while_unavailable(run, lease)
    except _IMAGE_ERRORS as error:
        raise image_failed(error) from error


def choose_hypervisor(run: Run) -> VmChoice:
    """Choose another hypervisor if the first choice cannot boot the image; journal the choice."""
    journal, attempt = run.request.services.journal, run.request.attempt
    choice = replace(run.choice, driver=_suitable_driver(run))
    if choice.driver is not run.choice.driver:
        journal.reassign(attempt, choice.vm_name, choice.driver)
    run.reports.hypervisor = choice.driver.kind
    if not choice.driver.abilities.lazy_start and run.image.live is not None:
        run.image.live.fetch_rest()
        choice = replace(choice, image=_lease_image(run, lazy=False))
    choice = replace(choice, platform=checkpoint.resume_platform(run, choice.driver))
    resumed, remark = checkpoint.resumable_checkpoint(run, choice)
    if resumed is None:
        return replace(choice, remark=remark)
    # The hypervisor identifies a saved VM by its name.
    journal.reassign(attempt, resumed.machine, choice.driver)
    return replace(choice, vm_name=resumed.machine, sentinel=resumed.sentinel, resumed=resumed)


def _suitable_driver(run: Run) -> Hypervisor:
    """Return the first driver of this node that can run the job with its image. Raises RunEnded."""
    image, spec = run.image, run.spec
    # A demanded hypervisor was checked against the job earlier: only the image matters here.
    kinds = [kind for kind in image.kinds if spec.hypervisor is not None or kind in spec.kinds]
    needs = VmNeeds(spec.hypervisor, kinds, spec.cpus, image.cloud_init, image.architecture)
    try:
        return run.request.services.choose(needs)
    except NoHypervisor as error:
        raise run_unbootable(error.message) from error


def retry_while_unavailable(run: Run, fetch: Callable[[], T]) -> T:
    """Fetch, with retries while the repository is unreachable and the job is still wanted."""
    deadline = time.monotonic() + run.settings.deliver_seconds
    while True:
        try:
            return fetch()
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            run.check_stop(wait=1.0)


def fetch_inputs(run: Run) -> GuestSession:
    """Write the job disk with verified inputs, or fetch the VM's checkpoint."""
    resumed, online = run.choice.resumed, run.spec.network is not NetworkMode.NONE
    guest_session = GuestSession(
        token=secrets.token_urlsafe(32),
        event_queue=run.request.event_queue,
        logs={name.value: run.stream(name) for name in (StreamName.OUT, StreamName.ERR)},
        max_log=run.settings.max_log,
        on_log=run.reports.uploader.wake,
        former=resumed.guest if resumed and online else "",
    )
    if resumed is not None:
        for saved in resumed.files:
            retry_while_unavailable(run, partial(checkpoint.fetch_file, run, saved))
            run.check_stop()
        return guest_session
    run.usage.add("input", 0)  # there may be none
    job_description = JobDescription(
        ticket=run.ticket,
        endpoint=f"http://{ENDPOINT_ADDRESS}" if online else "",
        token=guest_session.token if online else "",
        sentinel=run.choice.sentinel,
    )
    write_job_disk(run.directory / "job.disk", job_description, partial(_fetch_input, run))
    return guest_session


def _fetch_input(run: Run, file: InputFile, disk: BinaryIO) -> None:
    start = disk.tell()

    def fetch() -> None:
        disk.seek(start)
        disk.truncate()  # remove data from before a broken connection
        run.request.source.fetch_input(file, disk)

    retry_while_unavailable(run, fetch)
    run.usage.add("input", file.size)
    run.check_stop()


def make_disks(run: Run) -> Network | None:
    """Make scratch disk, output disk and endpoint. A resumed VM already has its disks."""
    spec, write_seed = run.spec, run.request.services.write_seed
    if run.choice.resumed is None:
        create_scratch_disk(run.directory / "scratch.disk", spec.disk * MIB)
        create_blank_disk(run.directory / "output.disk", spec.disk * MIB + OUTPUT_OVERHEAD_BYTES)
        if run.image.cloud_init and write_seed is not None:
            write_seed(run.directory / "seed.disk", run.ticket)
    if spec.network is NetworkMode.NONE:
        return None
    driver, handlers = run.choice.driver, run.request.port_handlers
    return serve_guest(run.resources, driver, run.guest_session, spec.network, handlers)


def boot(run: Run) -> RunningVm:
    """Start the VM. The journal already names it."""
    directory, resumed = run.directory, run.choice.resumed
    (directory / "machine").mkdir(exist_ok=resumed is not None)
    run.clock.begin_boot()
    config = VmConfig(
        name=run.choice.vm_name,
        cpus=run.spec.cpus,
        memory=run.spec.memory,
        image=run.image,
        disks=data_disks(directory, directory / "scratch.disk"),
        console=run.stream(StreamName.CONSOLE),
        workdir=directory / "machine",
        network=run.network,
        saved=directory / checkpoint.MEMORY_FILE if resumed else None,
    )
    vm = run.resources.enter_context(_running_vm(run, config))
    if resumed is not None:
        run.clock.begin_boot()  # reading its memory does not count as boot time
    (directory / checkpoint.MEMORY_FILE).unlink(missing_ok=True)  # it is in the VM now
    return vm


def _rules(spec: JobSpec) -> dict[str, ConsoleRule]:
    try:
        rules = {"ready": parse_console_rule(spec.ready_rule), "exit": parse_console_rule(spec.exit)}
    except ConsoleRuleError as error:
        raise run_failed(ReasonCode.NO_EXIT_REPORT, str(error)) from error
    return {name: pattern for name, pattern in rules.items() if pattern is not None}


@contextmanager
def _running_vm(run: Run, config: VmConfig) -> Iterator[RunningVm]:
    settings, driver, resumed = run.settings, run.choice.driver, run.choice.resumed
    reader = ConsoleReader(config.console, run.choice.sentinel, _rules(run.spec))
    if resumed is not None:
        reader.offset = resumed.heard
    watch = VmWatch(
        driver=driver,
        vm_name=config.name,
        event_queue=run.request.event_queue,
        reader=reader,
        max_console=settings.max_console,
        silence=settings.silence_seconds,
        heard=lambda: _last_heartbeat(run),
        on_console=run.reports.uploader.wake,
        on_time=run.reports.report_usage,
        disk=run.directory,
    )
    vm = RunningVm(driver, config.name, run.guest_session, watch)
    try:
        driver.start(config)
        with watching(watch):
            yield vm
    finally:
        run.destroy_vm(vm)


def _last_heartbeat(run: Run) -> float:
    """Return when the guest last sent a heartbeat; ``inf`` if none is expected from it.

    A guest of an image job that never asked for signals sends none.
    """
    if run.image.live is not None and run.image.live.is_waiting():
        return time.monotonic()  # the guest is blocked until a part of its image arrives
    is_heartbeat_expected = run.spec.strategy is Strategy.SCRIPT or run.guest_session.has_heartbeat
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
