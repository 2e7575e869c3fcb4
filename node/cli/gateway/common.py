"""Helpers of the gateway commands: finding the gateway, its supervisor, its state."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console

from vmjobs.cli.common import OWN_COMMAND, config, echo
from vmjobs.errors import Conflict, HypervisorError, InvalidRequest, NotFound, Unavailable
from vmjobs.gateway.assignments import ALIVE_PHASES, GatewayVmState
from vmjobs.gateway.control import SupervisorClient
from vmjobs.gateway.directory import GatewayDirectory, InstalledGateway
from vmjobs.gateway.spec import GATEWAY_HYPERVISOR, Gateway
from vmjobs.hypervisor import procs

if TYPE_CHECKING:
    from images.store.image_store import ImageStore
    from vmjobs.agent.cluster_vms.services import ClusterVmServices
    from vmjobs.gateway.assignments import GatewayAssignments
    from vmjobs.gateway.supervisor import RoleFiles, VmFiles

_F = TypeVar("_F", bound=Callable[..., Any])

#: Seconds in which a supervisor must be ready; it probes the hypervisor first.
READY_SECONDS = 90.0
READY_LINE = b"ready\n"
#: Failures of a VM in a row after which commands do not wait for it.
MAX_FAILURES = 3
#: Seconds between two connection attempts while another process starts the supervisor.
POLL_SECONDS = 0.2


def gateway_options(command: _F) -> _F:
    named = click.option("--gateway", "name", metavar="NAME", help="Needed if there are several.")
    placed = click.option(
        "--state-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Directory of the gateway, if not the default.",
    )
    return named(placed(command))


vms_argument = click.argument("vms", metavar="[VM]...", nargs=-1)


def default_directory() -> Path:
    return config().state_dir / "gateways"


def find_gateway(name: str | None, state_dir: Path | None) -> GatewayDirectory:
    """Find the selected gateway; without a selection, the only one.

    Raises:
        NotFound: there is no such gateway. InvalidRequest: there are several.
    """
    if state_dir is not None:
        return GatewayDirectory(state_dir.absolute())
    there = sorted(path.parent.name for path in default_directory().glob("*/gateway.json"))
    if name is None and len(there) > 1:
        listing = ", ".join(there)
        raise InvalidRequest(
            f"there are several gateways: {listing}", hint="choose one: --gateway NAME"
        )
    if name is None and not there:
        raise NotFound("no gateway is installed here", hint="vmjobs gateway install FILE")
    if name is not None and name not in there:
        listing = ", ".join(there) or "none"
        raise NotFound(f"there is no gateway {name!r}", hint=f"installed gateways: {listing}")
    return GatewayDirectory(default_directory() / (name or there[0]))


def select_vms(gateway: Gateway, names: Sequence[str]) -> list[str]:
    """Return the selected VMs of the gateway, in declared order; all if none is named.

    Raises:
        NotFound: the gateway has no VM of that name.
    """
    known = [vm.name for vm in gateway.machines]
    for name in names:
        if name not in known:
            raise NotFound(
                f"the gateway {gateway.name} has no VM {name!r}",
                hint=f"its VMs: {', '.join(known)}",
            )
    return [name for name in known if name in names or not names]


def images() -> ImageStore:
    from images.store.image_store import ImageStore  # noqa: PLC0415

    return ImageStore(config().images)


def tag_image(installed: InstalledGateway, vm: str) -> None:
    """Tag a VM's image for this gateway, so that it stays if other tags move."""
    digest = installed.images[vm]
    images().tag(*_image_name(installed, vm), digest)


def untag_image(installed: InstalledGateway, vm: str) -> None:
    if vm in installed.images:
        images().untag(*_image_name(installed, vm))


def tagged_images(installed: InstalledGateway, vm: str) -> set[str]:
    """Return the digests of the images that are tagged for a VM."""
    name, tag = _image_name(installed, vm)
    prefix = tag.rpartition("-")[0]
    return {
        entry.digest
        for entry in images().list()
        if entry.name == name and entry.tag.rpartition("-")[0] == prefix
    }


def _image_name(installed: InstalledGateway, vm: str) -> tuple[str, str]:
    hexdigits = str(installed.images[vm]).removeprefix("sha256:")
    return f"gateway-{installed.gateway.name}", f"{vm}-{hexdigits[:12]}"


def role_kit() -> RoleFiles:
    from condor.gateway import GatewayKit  # noqa: PLC0415

    return GatewayKit()


def vm_services_factory(
    place: GatewayDirectory,
) -> Callable[[GatewayAssignments, VmFiles], ClusterVmServices]:
    from node.parts import make_hypervisors  # noqa: PLC0415
    from vmjobs.agent.cluster_vms.journal import ClusterVmJournal  # noqa: PLC0415
    from vmjobs.agent.cluster_vms.services import ClusterVmServices, ClusterVmSettings  # noqa: PLC0415
    from vmjobs.agent.cluster_vms.status_reporter import ConsoleUploader, StatusReporter  # noqa: PLC0415
    from vmjobs.gateway.supervisor import THAW_SIGNAL  # noqa: PLC0415
    from vmjobs.hypervisor.base import VmNeeds  # noqa: PLC0415

    settings = config()
    store = images()
    hypervisors = make_hypervisors(settings, store, settings.state_dir / "local" / "probes.json")
    hypervisors.choose(VmNeeds(GATEWAY_HYPERVISOR))  # fails at once if the hypervisor does not work

    def make(share: GatewayAssignments, files: VmFiles) -> ClusterVmServices:
        reporter = StatusReporter(share)
        return ClusterVmServices(
            images=store,
            choose=hypervisors.choose,
            drivers=hypervisors.drivers,
            journal=ClusterVmJournal(place.vms),
            source=share,
            reporter=reporter,
            console_uploader=ConsoleUploader(share, reporter),
            kit=files,
            settings=ClusterVmSettings(settings.max_console_bytes, admit_signal=THAW_SIGNAL),
        )

    return make


def connect_supervisor(place: GatewayDirectory) -> SupervisorClient:
    """Connect to the gateway's supervisor; start one in the background if none runs.

    Raises:
        NotFound: no gateway is installed there. HypervisorError: the supervisor fails to start.
    """
    place.installed()
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            return SupervisorClient(place.control)
        except Unavailable:
            if _has_no_supervisor(place):
                _start_supervisor(place)
            elif time.monotonic() >= deadline:
                raise
            else:
                time.sleep(POLL_SECONDS)


def _has_no_supervisor(place: GatewayDirectory) -> bool:
    """Whether no supervisor runs, starts or stops."""
    try:
        with place.lock_supervisor():
            return True
    except Conflict:
        return False


def _start_supervisor(place: GatewayDirectory) -> None:
    began = place.log.stat().st_size if place.log.exists() else 0
    argv = [*OWN_COMMAND, "gateway", "run", "--background", "--state-dir", str(place.directory)]
    with place.log.open("ab") as said:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            cwd=place.directory,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
    if child.stdout is None:
        return
    with child.stdout as words:
        up = procs.readable([words.fileno()], READY_SECONDS) and words.readline() == READY_LINE
    if up:
        return
    if child.poll() is None:
        child.kill()
    child.wait()
    if not _has_no_supervisor(place):
        return  # another process was faster
    with place.log.open("rb") as log:
        log.seek(began)
        why = log.read()[-1000:].decode("utf-8", "replace").strip() or "its log is empty"
    raise HypervisorError(f"the gateway's supervisor does not start: {why}")


def watch_vms(control: SupervisorClient, seconds: float) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the state of the VMs, again at each change, for at most ``seconds``."""
    deadline, seen = time.monotonic() + seconds, -1
    while (left := deadline - time.monotonic()) > 0:
        answer = control.ask("show", seen=seen, wait=min(left, 10.0))
        seen = answer["revision"]
        yield answer["machines"]


def wait_for_vms(
    control: SupervisorClient,
    names: Sequence[str],
    seconds: float,
    state: GatewayVmState,
) -> list[tuple[str, dict[str, Any]]]:
    """Wait until all VMs have a state; print state changes; return the other VMs.

    For VMs that are to be up it ends sooner if each of the others is down, or has failed several times
    meanwhile: the supervisor keeps trying.
    """
    terminal = Console(stderr=True)
    last: dict[str, str] = {}
    failures: dict[str, int] = {}
    vms: dict[str, dict[str, Any]] = {}

    def has_failed(name: str) -> bool:
        if state is not GatewayVmState.UP:
            return False
        count = int(vms[name].get("failures", 0))
        before = failures[name] = min(count, failures.get(name, count))
        return count - before >= MAX_FAILURES or vms[name]["state"] == GatewayVmState.DOWN

    with terminal.status("waiting") as status:
        for vms in watch_vms(control, seconds):
            for name in names:
                text = f"{vms[name]['state']} {vms[name]['message']}".strip()
                if last.get(name) != text:
                    echo(f"{name}: {text}")
                    last[name] = text
            waiting = [name for name in names if vms[name]["state"] != state]
            status.update(f"waiting for {', '.join(waiting)}")
            failed = [name for name in waiting if has_failed(name)]
            if failed == waiting:
                break
    return [(name, vms[name]) for name in names if vms[name]["state"] != state]


def end_idle_supervisor(control: SupervisorClient) -> None:
    """Let a supervisor in the background end if no VM is to run."""
    every = control.ask("show")["machines"].values()
    if all(vm["state"] == GatewayVmState.STOPPED and not vm["wanted"] for vm in every):
        control.ask("idle")


def is_stopped(place: GatewayDirectory) -> bool:
    """Whether no VM of the gateway runs, by its records alone."""
    return not any(record.phase in ALIVE_PHASES for record in place.records().values())
