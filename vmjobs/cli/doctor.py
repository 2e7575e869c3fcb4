"""``vmjobs doctor``: checks this host and tells how to fix what does not work."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import click

from vmjobs import __version__
from vmjobs.agent.checks import lacking_account, lacking_room
from vmjobs.cli.doctor_condor import findings_of_condor
from vmjobs.cli.finding import Finding, Role
from vmjobs.cli.support import config, echo, json_option, print_json, print_table, read_token
from vmjobs.config import Config
from vmjobs.errors import Forbidden, NotFound, VMJobsError, reason_of
from vmjobs.hypervisor import confined, firmware, guest_network, in_place_of_qemu, uml_boot
from vmjobs.hypervisor import sandbox as isolation


@click.command()
@click.option("--no-boot", is_flag=True, help="Do not boot guests to probe hypervisors.")
@click.option(
    "--for",
    "role",
    type=click.Choice([role.value for role in Role]),
    callback=lambda _context, _parameter, value: value and Role(value),
    help="Also exit with 1 if this host lacks what a node, schedd or negotiator of HTCondor needs.",
)
@json_option
def doctor(no_boot: bool, role: Role | None, as_json: bool) -> None:
    """Check this host and report faults.

    Exits with 1 if no hypervisor works here, or if a configured API does not answer.
    """
    settings = config()
    findings = [
        *_tried("programs", _programs),
        *_tried("UEFI firmware", _firmware),
        *_tried("python", _libraries),
        *_tried("sandbox", _sandbox),
        *_tried("isolation", partial(_isolation, settings)),
        *_tried("network", _networks),
        *_tried("settings", partial(_clusters, settings)),
    ]
    condor = _tried("HTCondor", findings_of_condor)
    if any(f.role is Role.NODE for f in condor):
        findings += _tried("agent", partial(_agent, settings.socket), Role.NODE)
        findings += _tried("node", partial(_node, settings), Role.NODE)
    findings += condor
    if role is not None and not any(f.role is role for f in condor):
        findings.append(_no_daemon(role))
    boots = not no_boot and role in (None, Role.NODE)
    hypervisors = _tried("hypervisors", partial(_hypervisors, settings)) if boots else []
    api = _tried("API", partial(_api, settings))
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


def _tried(what: str, look: Callable[[], Iterable[Finding]], role: Role | None = None) -> list[Finding]:
    """Return the findings of a check. A check that raises becomes a finding itself."""
    found = []
    try:
        for finding in look():
            found.append(finding)  # noqa: PERF402 - findings before an exception count
    except Exception as error:
        why = error.message if isinstance(error, VMJobsError) else reason_of(error)
        found.append(Finding(what, False, f"the check failed: {why}", "this report", role))
    return found


def _no_daemon(role: Role) -> Finding:
    detail = "DAEMON_LIST of HTCondor has no such daemon, or condor_config_val is not installed"
    return Finding(f"HTCondor: {role}", False, detail, "this role", role)


def _node(settings: Config) -> Iterator[Finding]:
    """Check what jobs need on this node beside HTCondor and a hypervisor."""
    use = "running VMs here"
    if settings.job_users:
        why = lacking_account(settings.job_users)
        there = f"accounts exist: {', '.join(settings.job_users)}"
        yield Finding("account", not why, why or there, use, Role.NODE)
    else:
        why = "job_users is not set: the agent does not notice a missing account of jobs"
        yield Finding("account", False, why, "jobs of the service")
    why = lacking_room(settings.state_dir)
    yield Finding("disk", not why, why or f"{settings.state_dir} has room", use, Role.NODE)
    if settings.agent_token_file is not None:
        why = _refusal(settings, settings.agent_token_file)
        detail = why or f"{settings.api_url} accepts the token in {settings.agent_token_file}"
        yield Finding("agent's token", not why, detail, use, Role.NODE)


def _refusal(settings: Config, file: Path) -> str:
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


def _agent(path: Path) -> Iterator[Finding]:
    """Check that the agent of this node answers and offers a hypervisor."""
    from vmjobs.cli.node import ask_agent  # noqa: PLC0415 - the agent's extra may be missing

    if (said := ask_agent(path)) is None:
        detail = f"no agent answers at {path}; see its log: condor_config_val VMJOBS_AGENT_LOG"
        yield Finding("agent", False, detail, "running VMs here", Role.NODE)
        return
    works = [found.kind for found in said.hypervisors if found.works]
    detail = f"offers {', '.join(works) or 'no hypervisor'}, runs {len(said.running)} jobs"
    if said.fault:
        detail += f"; {said.fault}"
    yield Finding("agent", bool(works) and not said.fault, detail, "running VMs here", Role.NODE)


def _programs() -> Iterator[Finding]:
    wanted = {
        uml_boot.kernel(): ("the uml hypervisor", "apt-get install user-mode-linux"),
        "qemu-system-x86_64": ("the qemu and kvm hypervisors", "apt-get install qemu-system-x86"),
        "qemu-img": ("the qemu and kvm hypervisors", "apt-get install qemu-utils"),
        "nbdkit": ("lazy starts", "apt-get install nbdkit nbdkit-plugin-python"),
        "mmdebstrap": ("building images", "apt-get install mmdebstrap"),
        "sshd": ("condor_ssh_to_job into VMs here", "apt-get install openssh-server"),
    }
    for program, (use, remedy) in wanted.items():
        path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
        yield Finding(Path(program).name, path is not None, path or remedy, use)


def _firmware() -> Iterator[Finding]:
    found = firmware.find()
    detail = str(found.code) if found else "apt-get install ovmf"
    yield Finding("UEFI firmware", found is not None, detail, "images that boot by UEFI")


def _libraries() -> Iterator[Finding]:
    wanted = {
        "libvirt": ("the qemu and kvm hypervisors", "apt-get install python3-libvirt"),
        "htcondor2": ("submitting to HTCondor", "pip install 'vmjobs[server]'"),
        "h11": ("the agent", "pip install 'vmjobs[agent]'"),
        "flask": ("the API", "pip install 'vmjobs[server]'"),
        "sqlalchemy": ("the API", "pip install 'vmjobs[server]'"),
    }
    for module, (use, remedy) in wanted.items():
        found = find_spec(module) is not None
        yield Finding(f"python: {module}", found, "importable" if found else remedy, use)


def _sandbox() -> Iterator[Finding]:
    """Check, by a test run, the sandbox that opens images of other formats than raw."""
    from images import sandbox  # noqa: PLC0415 - not every role has images

    try:
        sandbox.require()
    except VMJobsError as error:
        yield Finding("sandbox", False, error.message, "images that are not raw")
        return
    yield Finding("sandbox", True, "bubblewrap ran a program", "images that are not raw")


def _isolation(settings: Config) -> Iterator[Finding]:
    """Check the sandbox of VMs, and the program that starts QEMU in it."""
    preferred = settings.isolation == "preferred"  # then VMs also run without a sandbox
    fault = isolation.fault()
    detail = f"{fault}: {isolation.HINT}" if fault else isolation.ISOLATION
    use = "VMs isolated from this node"
    yield Finding("isolation", not fault, detail, use, None if preferred else Role.NODE)
    path = confined.find()
    yield Finding(
        in_place_of_qemu.PROGRAM,
        path is not None,
        str(path or confined.HINT),
        "the same, of the qemu and kvm hypervisors",
    )


def _networks() -> Iterator[Finding]:
    """Check what the networks of VMs need."""
    for name, fault, use in (
        ("network", guest_network.fault(), "VMs with a network"),
        ("network outbound", guest_network.outside_fault(), "VMs with outbound network"),
    ):
        yield Finding(name, not fault, fault or "everything needed is installed", use, Role.NODE)


def _clusters(settings: Config) -> Iterator[Finding]:
    """Check that the settings for virtual clusters are complete."""
    for faults, use in (
        (_faults_of_offer(settings), "cluster VMs here"),
        (_faults_of_pools(settings), "serving clusters"),
    ):
        yield from (Finding("settings", False, fault, use) for fault in faults)


def _faults_of_offer(settings: Config) -> Iterator[str]:
    offer = {"cluster_cpus": settings.cluster_cpus, "cluster_memory": settings.cluster_memory}
    given = [f"{name} is {value}" for name, value in offer.items() if value]
    if not given and settings.cluster_disk:
        yield f"cluster_disk is {settings.cluster_disk}, but cluster_cpus and cluster_memory are 0"
    elif given and 0 in offer.values():
        (missing,) = (name for name, value in offer.items() if not value)
        yield f"{given[0]}, but {missing} is 0: no cluster VM fits here; set both"
    if settings.cluster_memory and settings.agent_token_file is None:
        yield "cluster_memory is set, but agent_token_file is not: the agent gets no cluster VMs"


def _faults_of_pools(settings: Config) -> Iterator[str]:
    folder = settings.pool_key_dir
    if settings.pools and folder is None:
        yield "pools is set, but pool_key_dir is not: VMs get no tokens from this service"
    elif folder is not None and not settings.pools:
        yield "pool_key_dir is set, but pools is not: no cluster can be declared"
    elif folder is not None:
        for name in settings.pools:
            if not (folder / name).is_file():
                yield f"the pool {name} has no key: the file {folder / name} does not exist"


def _hypervisors(settings: Config) -> Iterator[Finding]:
    from images.store import ImageStore  # noqa: PLC0415 - the agent's extra may be missing
    from vmjobs.cli.node_parts import fleet  # noqa: PLC0415

    for result in fleet(settings, ImageStore(settings.images)).probe():
        detail = f"{result.detail} ({result.seconds:.1f} s) {result.version}".strip()
        yield Finding(f"hypervisor: {result.kind}", result.works, detail, "running VMs here")


def _api(settings: Config) -> Iterator[Finding]:
    if not settings.token_file.exists():
        return
    from vmjobs.client import Client  # noqa: PLC0415 - slow import, network only

    try:
        health = Client(settings.api_url, read_token(settings.token_file)).health()
    except VMJobsError as error:
        yield Finding("API", False, error.message, "submitting jobs")
        return
    if why := _refusal(settings, settings.token_file):
        yield Finding("API", False, f"{settings.token_file}: {why}", "submitting jobs")
        return
    states = ", ".join(f"{name} {state}" for name, state in health.services.items())
    yield Finding("API", health.status == "ok", f"{settings.api_url}: {states}", "submitting jobs")
