"""``vmjobs doctor``: checks this host and tells how to fix what does not work."""

from __future__ import annotations

import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click

from images.inspect import sandbox
from images.store.image_store import ImageStore
from node.cli.doctor_condor import DoctorFinding, HostRole, check_condor
from vmjobs import __version__
from vmjobs.agent import protocol
from vmjobs.agent.checks import account_fault, disk_fault
from vmjobs.agent_socket import ANSWER_SECONDS
from vmjobs.cli.common import config, echo, json_option, print_json, print_table, read_token
from vmjobs.config import Config
from vmjobs.errors import Forbidden, InvalidRequest, NotFound, VMJobsError, reason_of
from vmjobs.hypervisor.libvirt import firmware, qemu_sandbox, qemu_wrapper
from vmjobs.hypervisor.network import guest_network
from vmjobs.hypervisor.sandbox import bubblewrap as isolation
from vmjobs.hypervisor.uml import kernel_boot
from vmjobs.model import Node


@click.command()
@click.option("--no-boot", is_flag=True, help="Do not boot guests to probe hypervisors.")
@click.option(
    "--for",
    "role",
    type=click.Choice([role.value for role in HostRole]),
    callback=lambda _context, _parameter, value: value and HostRole(value),
    help="Also exit with 1 if this host lacks what a node, schedd or negotiator of HTCondor needs.",
)
@json_option
def doctor(no_boot: bool, role: HostRole | None, as_json: bool) -> None:
    """Check this host and report faults.

    Exits with 1 if no hypervisor works here, or if a configured API does not answer.
    """
    settings = config()
    findings = [
        *_run_check("programs", _check_programs),
        *_run_check("UEFI firmware", _check_firmware),
        *_run_check("python", _check_libraries),
        *_run_check("sandbox", _check_sandbox),
        *_run_check("isolation", partial(_check_isolation, settings)),
        *_run_check("network", _check_networks),
        *_run_check("settings", partial(_check_cluster_settings, settings)),
    ]
    condor = _run_check("HTCondor", check_condor)
    if any(f.role is HostRole.NODE for f in condor):
        findings += _run_check("agent", partial(_check_agent, settings.socket), HostRole.NODE)
        findings += _run_check("node", partial(_check_node, settings), HostRole.NODE)
    findings += condor
    if role is not None and not any(f.role is role for f in condor):
        detail = "DAEMON_LIST of HTCondor has no such daemon, or condor_config_val is not installed"
        findings.append(DoctorFinding(f"HTCondor: {role}", False, detail, "this role", role))
    boots = not no_boot and role in (None, HostRole.NODE)
    hypervisors = _run_check("hypervisors", partial(_check_hypervisors, settings)) if boots else []
    api = _run_check("API", partial(_check_api, settings))
    findings += hypervisors + api
    if as_json:
        print_json([vars(finding) for finding in findings])
    else:
        echo(f"vmjobs {__version__}, Python {platform.python_version()}, {platform.platform()}")
        rows = [(f.what, "ok" if f.ok else "no", f.needed_for, f.detail) for f in findings]
        print_table(("WHAT", "", "NEEDED FOR", "DETAIL"), rows)
    broken = (hypervisors and not any(f.ok for f in hypervisors)) or any(not f.ok for f in api)
    lacking = role is not None and any(f.role is role and not f.ok for f in findings)
    sys.exit(1 if broken or lacking else 0)


def _run_check(
    what: str, check: Callable[[], Iterable[DoctorFinding]], role: HostRole | None = None
) -> list[DoctorFinding]:
    """Return the findings of a check. A check that raises becomes a finding itself."""
    found = []
    try:
        for finding in check():
            found.append(finding)  # noqa: PERF402 - findings before an exception count
    except Exception as error:
        why = error.message if isinstance(error, VMJobsError) else reason_of(error)
        found.append(DoctorFinding(what, False, f"the check failed: {why}", "this report", role))
    return found


def _check_node(settings: Config) -> Iterator[DoctorFinding]:
    """Check what jobs need on this node beside HTCondor and a hypervisor."""
    use = "running VMs here"
    if settings.job_users:
        why = account_fault(settings.job_users)
        there = f"accounts exist: {', '.join(settings.job_users)}"
        yield DoctorFinding("account", not why, why or there, use, HostRole.NODE)
    else:
        why = "job_users is not set: the agent does not notice a missing account of jobs"
        yield DoctorFinding("account", False, why, "jobs of the service")
    why = disk_fault(settings.state_dir)
    yield DoctorFinding("disk", not why, why or f"{settings.state_dir} has room", use, HostRole.NODE)
    if settings.agent_token_file is not None:
        why = _token_refusal(settings, settings.agent_token_file)
        detail = why or f"{settings.api_url} accepts the token in {settings.agent_token_file}"
        yield DoctorFinding("agent's token", not why, detail, use, HostRole.NODE)


def _token_refusal(settings: Config, file: Path) -> str:
    """Return why the service refuses a token; "" if it accepts it.

    The check asks for an image that does not exist.
    """
    from vmjobs.client import Images, Retries  # noqa: PLC0415 - slow import, network only

    try:
        if not (token := read_token(file)):
            return f"{file} is empty"
        with Images(settings.api_url, token, retries=Retries(deadline=5.0)) as client:
            client.detail("vmjobs-doctor:none")
    except (NotFound, Forbidden):  # the token itself is valid
        return ""
    except VMJobsError as error:
        return error.message
    return ""


def _check_agent(path: Path) -> Iterator[DoctorFinding]:
    """Check that the agent of this node answers and offers a hypervisor."""
    if (reply := _ask_agent(path)) is None:
        detail = f"no agent answers at {path}; see its log: condor_config_val VMJOBS_AGENT_LOG"
        yield DoctorFinding("agent", False, detail, "running VMs here", HostRole.NODE)
        return
    works = [found.kind for found in reply.hypervisors if found.works]
    detail = f"offers {', '.join(works) or 'no hypervisor'}, runs {len(reply.running)} jobs"
    if reply.fault:
        detail += f"; {reply.fault}"
    yield DoctorFinding(
        "agent", bool(works) and not reply.fault, detail, "running VMs here", HostRole.NODE
    )


def _ask_agent(path: Path) -> Node | None:
    """Return the agent's description of its node; None if no agent answers."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(path))
            protocol.send(connection, protocol.StatusMessage())
            answer = next(protocol.receive(connection), None)
    except (OSError, InvalidRequest):
        return None
    return answer.node if isinstance(answer, protocol.StatusMessage) else None


def _check_programs() -> Iterator[DoctorFinding]:
    wanted = {
        kernel_boot.find_kernel(): ("the uml hypervisor", "apt-get install user-mode-linux"),
        "qemu-system-x86_64": ("the qemu and kvm hypervisors", "apt-get install qemu-system-x86"),
        "qemu-img": ("the qemu and kvm hypervisors", "apt-get install qemu-utils"),
        "nbdkit": ("lazy starts", "apt-get install nbdkit nbdkit-plugin-python"),
        "mmdebstrap": ("building images", "apt-get install mmdebstrap"),
        "sshd": ("condor_ssh_to_job into VMs here", "apt-get install openssh-server"),
    }
    for program, (use, remedy) in wanted.items():
        path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
        yield DoctorFinding(Path(program).name, path is not None, path or remedy, use)


def _check_firmware() -> Iterator[DoctorFinding]:
    found = firmware.find()
    detail = str(found.code) if found else "apt-get install ovmf"
    yield DoctorFinding("UEFI firmware", found is not None, detail, "images that boot by UEFI")


def _check_libraries() -> Iterator[DoctorFinding]:
    wanted = {
        "libvirt": ("the qemu and kvm hypervisors", "apt-get install python3-libvirt"),
        "htcondor2": ("submitting to HTCondor", "pip install 'vmjobs[server]'"),
        "h11": ("the agent", "pip install 'vmjobs[agent]'"),
        "flask": ("the API", "pip install 'vmjobs[server]'"),
        "sqlalchemy": ("the API", "pip install 'vmjobs[server]'"),
    }
    for module, (use, remedy) in wanted.items():
        found = find_spec(module) is not None
        yield DoctorFinding(f"python: {module}", found, "importable" if found else remedy, use)


def _check_sandbox() -> Iterator[DoctorFinding]:
    """Check, by a test run, the sandbox that opens images of other formats than raw."""
    try:
        sandbox.require()
    except VMJobsError as error:
        yield DoctorFinding("sandbox", False, error.message, "images that are not raw")
        return
    yield DoctorFinding("sandbox", True, "bubblewrap ran a program", "images that are not raw")


def _check_isolation(settings: Config) -> Iterator[DoctorFinding]:
    """Check the sandbox of VMs, and the program that starts QEMU in it."""
    preferred = settings.isolation == "preferred"  # then VMs also run without a sandbox
    fault = isolation.unavailable_reason()
    detail = f"{fault}: {isolation.HINT}" if fault else isolation.ISOLATION
    use = "VMs isolated from this node"
    yield DoctorFinding("isolation", not fault, detail, use, None if preferred else HostRole.NODE)
    path = qemu_sandbox.find()
    yield DoctorFinding(
        qemu_wrapper.PROGRAM,
        path is not None,
        str(path or qemu_sandbox.HINT),
        "the same, of the qemu and kvm hypervisors",
    )


def _check_networks() -> Iterator[DoctorFinding]:
    for name, fault, use in (
        ("network", guest_network.unavailable_reason(), "VMs with a network"),
        ("network outbound", guest_network.outbound_unavailable_reason(), "VMs with outbound network"),
    ):
        yield DoctorFinding(
            name, not fault, fault or "everything needed is installed", use, HostRole.NODE
        )


def _check_cluster_settings(settings: Config) -> Iterator[DoctorFinding]:
    for faults, use in (
        (_cluster_offer_faults(settings), "cluster VMs here"),
        (_pool_faults(settings), "serving clusters"),
    ):
        yield from (DoctorFinding("settings", False, fault, use) for fault in faults)


def _cluster_offer_faults(settings: Config) -> Iterator[str]:
    offer = {"cluster_cpus": settings.cluster_cpus, "cluster_memory": settings.cluster_memory}
    given = [f"{name} is {value}" for name, value in offer.items() if value]
    if not given and settings.cluster_disk:
        yield f"cluster_disk is {settings.cluster_disk}, but cluster_cpus and cluster_memory are 0"
    elif given and 0 in offer.values():
        (missing,) = (name for name, value in offer.items() if not value)
        yield f"{given[0]}, but {missing} is 0: no cluster VM fits here; set both"
    if settings.cluster_memory and settings.agent_token_file is None:
        yield "cluster_memory is set, but agent_token_file is not: the agent gets no cluster VMs"


def _pool_faults(settings: Config) -> Iterator[str]:
    folder = settings.pool_key_dir
    if settings.pools and folder is None:
        yield "pools is set, but pool_key_dir is not: VMs get no tokens from this service"
    elif folder is not None and not settings.pools:
        yield "pool_key_dir is set, but pools is not: no cluster can be declared"
    elif folder is not None:
        for name in settings.pools:
            if not (folder / name).is_file():
                yield f"the pool {name} has no key: the file {folder / name} does not exist"


def _check_hypervisors(settings: Config) -> Iterator[DoctorFinding]:
    from node.parts import make_hypervisors  # noqa: PLC0415 - the agent's extra may be missing

    for result in make_hypervisors(settings, ImageStore(settings.images)).probe():
        detail = f"{result.detail} ({result.seconds:.1f} s) {result.version}".strip()
        if result.works and (others := result.abilities.architectures):
            detail += f", and emulates {', '.join(others)}"
        yield DoctorFinding(f"hypervisor: {result.kind}", result.works, detail, "running VMs here")


def _check_api(settings: Config) -> Iterator[DoctorFinding]:
    if not settings.token_file.exists():
        return
    from vmjobs.client import Client  # noqa: PLC0415 - slow import, network only

    try:
        health = Client(settings.api_url, read_token(settings.token_file)).health()
    except VMJobsError as error:
        yield DoctorFinding("API", False, error.message, "submitting jobs")
        return
    if why := _token_refusal(settings, settings.token_file):
        yield DoctorFinding("API", False, f"{settings.token_file}: {why}", "submitting jobs")
        return
    states = ", ".join(f"{name} {state}" for name, state in health.services.items())
    yield DoctorFinding(
        "API", health.status == "ok", f"{settings.api_url}: {states}", "submitting jobs"
    )
