"""Make submit descriptions for jobs. Pure: uses no files and no daemons.

Users' values are untrusted. HTCondor expands macros in submit descriptions (``$(X)``) and, at match
time, in any string of a job ad (``$$(X)``), ends a value at a newline, and has three ways to quote. So
:func:`plain` reduces a user's text to characters that have no meaning in any of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from condor import names
from condor.events import outcomes
from vmjobs.batch import BatchJob
from vmjobs.config import Config
from vmjobs.errors import ConfigError, Fault, InvalidSpec
from vmjobs.model import (
    HypervisorKind,
    JobSpec,
    NetworkMode,
    check_cpus,
    check_image_cpus,
    kinds_with_cpus,
)

#: The route without an entry in the settings: the schedd's own pool.
LOCAL_ROUTE: Final = "local"

#: Seconds that ``vmjobs exec`` has to stop its VM before it is killed.
VACATE_SECONDS: Final = 60
#: The same if its VM is saved, and the checkpoint sent to the repository, before.
CHECKPOINT_SECONDS: Final = 600

#: Seconds that a site keeps a job while the submit side does not answer.
LEASE_SECONDS: Final = 3600

#: A job's number of starts, without those that ended by eviction.
_TRIES: Final = f"(NumJobStarts - ifThenElse({names.VM_VACATED} =?= undefined, 0, {names.VM_VACATED}))"
#: `vmjobs exec` ends by a signal if its node failed the job, which then goes back to the queue and
#: waits (WAITS). The repository limits the attempts; this limit is for failures that are not reported.
ON_EXIT_REMOVE: Final = f"(ExitBySignal =!= true) || ({_TRIES} >= 10)"

WAIT_EXPRESSION: Final = outcomes.wait_expression(_TRIES)

_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_GRID_RESOURCE: Final = re.compile(r"condor [A-Za-z0-9@._-]+ [A-Za-z0-9:._-]+")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_ACCOUNTING: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class JobProgram:
    """The execute node's command. ``{job}`` in an argument stands for the job's id."""

    executable: str = "/usr/bin/vmjobs"
    arguments: tuple[str, ...] = ("exec", "--job", "{job}")


@dataclass(frozen=True)
class Submission:
    """One cluster: the shared description, and an item for each job, all with the same keys."""

    description: dict[str, str]
    items: list[dict[str, str]] = field(default_factory=list)

    def text(self) -> str:
        """The submit file."""
        lines = [f"{key} = {value}" for key, value in self.description.items()]
        rows = [" ".join(item.values()) for item in self.items]
        return "\n".join([*lines, f"queue {','.join(self.items[0])} from (", *rows, ")", ""])


def plain(text: str, limit: int = 256) -> str:
    """``text`` with all but harmless ASCII characters percent-encoded, at most ``limit`` long."""
    return quote(text, safe=" ._@:/+=,-")[:limit]


def classad_string(text: str) -> str:
    """``text``, reduced by :func:`plain`, as a ClassAd string literal."""
    return f'"{plain(text)}"'


def accounting_name(owner: str) -> str:
    """An accounting name that HTCondor accepts and that no other owner has."""
    if _ACCOUNTING.fullmatch(owner):
        return owner
    digest = hashlib.sha256(owner.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9_-]", "_", owner)[:40] + "-" + digest


def argument_string(arguments: Sequence[str]) -> str:
    """Arguments in the "new" syntax of submit files.

    Raises:
        ValueError: an argument has a character that cannot be quoted.
    """
    if any(set(argument) & set("\0\n\r\x1f") for argument in arguments):
        raise ValueError("an argument has a NUL, a line end or a unit separator")
    if any("$$" in argument for argument in arguments):
        raise ValueError("an argument has '$$', which condor_submit and schedd both read as a macro")
    words = ("'" + a.replace("'", "''").replace('"', '""') + "'" for a in arguments)
    return '"' + " ".join(words).replace("$", "$(DOLLAR)") + '"'


def grid_resource(config: Config, route: str) -> str:
    """The ``grid_resource`` of a route; ``""`` is the local pool.

    Raises:
        InvalidSpec: there is no such route.
        ConfigError: the setting is not ``condor SCHEDD COLLECTOR``.
    """
    name = route or config.default_route
    if name not in config.routes:
        if name == LOCAL_ROUTE:
            return ""
        known = ", ".join(sorted({*config.routes, LOCAL_ROUTE}))
        message = f"there is no route {plain(name)!r}; known are: {known}"
        raise InvalidSpec(message, faults=[Fault("spec.route", "unknown_route", message)])
    resource = " ".join(config.routes[name].split())
    if resource and not _GRID_RESOURCE.fullmatch(resource):
        message = f"route {name} is {resource!r} (expected 'condor SCHEDD COLLECTOR' or empty)"
        raise ConfigError(message, faults=[Fault("routes", "bad_route", message)])
    return resource


def requirements(
    spec: JobSpec,
    kinds: Sequence[HypervisorKind] = (),
    architecture: str = "",
    *,
    cloud_init: bool = False,
) -> str:
    """The job's ``Requirements``. Complete: with Condor-C the site adds nothing to them.

    kinds: hypervisors that can boot the image; empty: all. architecture: of its machine code, as in
        ``BatchJob``; HTCondor's names differ only in case, which ``==`` ignores.
    cloud_init: the image looks for NoCloud data.

    Raises:
        InvalidSpec: the job requests a hypervisor that cannot boot its image.
    """
    terms = [
        f"{names.WAITS} =!= true",
        f"TARGET.{names.HAS_VMJOBS} =?= true",
        "TARGET.HasFileTransfer",
        "TARGET.Cpus >= RequestCpus",
        "TARGET.Memory >= RequestMemory",
        "TARGET.Disk >= RequestDisk",
        f"(TARGET.{names.MEMORY} < RequestMemory || TARGET.{names.DISK} * 1024 < RequestDisk) =!= true",
    ]
    if spec.network is not NetworkMode.NONE:  # agents of earlier releases do not advertise networks
        offered = f"TARGET.{names.NETWORKS}"
        terms.append(f'{offered} =?= undefined || stringListMember("{spec.network}", {offered})')
    if architecture:
        wanted_architecture = classad_string(architecture)
        emulated = f"stringListIMember({wanted_architecture}, TARGET.{names.ARCHITECTURES}) =?= true"
        terms.append(f"TARGET.Arch == {wanted_architecture} || {emulated}")
    wanted = _usable_hypervisors(spec, kinds)
    if cloud_init or spec.cpus > 1 or len(wanted) < len(HypervisorKind):
        found = [_hypervisor_term(kind, spec.cpus, cloud_init=cloud_init) for kind in wanted]
        terms.append(" || ".join(f"({term})" for term in found) if len(wanted) > 1 else found[0])
    return " && ".join(f"({term})" for term in terms)


def _hypervisor_term(kind: HypervisorKind, cpus: int, *, cloud_init: bool) -> str:
    """A term: the node has this hypervisor, with the features that depend on its kernel (UML)."""
    terms = [f'stringListMember("{kind.value}", TARGET.{names.HYPERVISORS}) =?= true']
    if kind is HypervisorKind.UML and cpus > 1:
        terms.append(f"(TARGET.{names.UML_CPUS} >= RequestCpus) =?= true")
    if kind is HypervisorKind.UML and cloud_init:
        terms.append(f"TARGET.{names.UML_CLOUD_INIT} =?= true")
    return " && ".join(terms)


def _usable_hypervisors(spec: JobSpec, kinds: Sequence[HypervisorKind]) -> list[HypervisorKind]:
    """The hypervisors of which a node needs one."""
    if why := check_cpus(spec.hypervisor, spec.cpus):
        raise InvalidSpec(why, faults=[Fault("spec.cpus", "above_hypervisor", why)])
    able = sorted((set(kinds) or set(HypervisorKind)) & set(kinds_with_cpus(spec.cpus)))
    if not able:
        why = check_image_cpus(spec.cpus, kinds or tuple(HypervisorKind))
        raise InvalidSpec(why, faults=[Fault("spec.cpus", "above_hypervisor", why)])
    if spec.hypervisor is None:
        return able
    if spec.hypervisor not in able:
        message = f"the image cannot be booted by {spec.hypervisor}, but by {' or '.join(able)}"
        raise InvalidSpec(message, faults=[Fault("spec.hypervisor", "cannot_boot", message)])
    return [spec.hypervisor]


_IS_LAST_NODE = "splitSlotName(LastRemoteHost)[1] =?= splitSlotName(TARGET.Name)[1]"
_MEMORY_IN_USE = f"(TARGET.{names.MEMORY_FREE} < RequestMemory) =?= true"
_AVOIDANCE_RANK = f"ifThenElse({_IS_LAST_NODE}, -100.0, 0.0) + ifThenElse({_MEMORY_IN_USE}, -10.0, 0.0)"


def rank(image: str) -> str:
    """The job's rank: prefer nodes that have the image, if it is given by its digest.

    Avoid nodes whose memory other VMs use. Above all avoid the node of the last attempt: the pool keeps
    the ad of a disconnected node for CLASSAD_LIFETIME, and would match the job to it again.
    condor/config/negotiator.conf gives this precedence over the pool's own ranks.
    """
    if not _DIGEST.fullmatch(image):
        return _AVOIDANCE_RANK
    cached = f'ifThenElse(stringListMember("{image}", TARGET.{names.IMAGE_DIGESTS}) =?= true, 1.0, 0.0)'
    return f"{cached} + {_AVOIDANCE_RANK}"


def job_dir(config: Config, array: str, job_id: str) -> Path:
    return array_dir(config, array) / checked_id(job_id)


def array_dir(config: Config, array: str) -> Path:
    return config.spool_dir / checked_id(array)


def checked_id(text: str) -> str:
    """Check an id before it becomes a file name, an argument or a ClassAd string; return it.

    Raises:
        ValueError: not 1 to 64 letters, digits, ``_`` and ``-``.
    """
    if not _ID.fullmatch(text):
        raise ValueError(f"{text!r} is not the id of a job or an array")
    return text


def describe(jobs: Sequence[BatchJob], config: Config, program: JobProgram) -> list[Submission]:
    """Submissions for jobs of any arrays: one, or two if only some of the jobs leave the pool.

    The first job of an array stands for all of its jobs.

    Raises:
        ValueError: a bad id, or a value with a line end, a NUL or a unit separator.
        InvalidSpec: a spec's route does not exist, or its hypervisor cannot boot the image.
    """
    arrays: dict[str, list[BatchJob]] = {}
    for job in jobs:
        arrays.setdefault(job.array, []).append(job)
    clusters: dict[frozenset[str], list[tuple[dict[str, str], list[BatchJob]]]] = {}
    for members in arrays.values():
        description = _description(members[0], config, program)
        clusters.setdefault(frozenset(description), []).append((description, members))
    return [_cluster(parts) for parts in clusters.values()]


def _cluster(parts: Sequence[tuple[dict[str, str], list[BatchJob]]]) -> Submission:
    """One submission for arrays whose descriptions have the same keys.

    Values that differ become macros, and a job's item selects one by a number: items cannot contain the
    values, because a requirement may contain every possible separator.
    """
    shared: dict[str, str] = {}
    macros: dict[str, str] = {}
    for n, key in enumerate(parts[0][0]):
        values = [description[key] for description, _ in parts]
        if len(set(values)) > 1:
            macros |= {f"vmjobs_{n}_{part}": value for part, value in enumerate(values)}
            shared[key] = f"$(vmjobs_{n}_$(vmjobs_part))"
        else:
            shared[key] = values[0]
    items = [
        {
            "vmjobs_id": checked_id(job.id),
            "vmjobs_array": job.array,
            "vmjobs_index": str(int(job.index)),
            "vmjobs_part": str(part),
        }
        for part, (_, members) in enumerate(parts)
        for job in members
    ]
    return Submission(macros | shared, items)


def _description(first: BatchJob, config: Config, program: JobProgram) -> dict[str, str]:
    resource = grid_resource(config, first.spec.route)
    description = {
        **_universe(resource),
        **_payload(first, config, program),
        **_resources(first.spec),
        **_policy(first, config, remote=bool(resource)),
        **_identity(first, config),
    }
    for key, value in description.items():
        if set(value) & set("\0\n\r\x1f"):
            raise ValueError(f"the value of {key} has a line end, a NUL or a unit separator")
    return description


def _universe(resource: str) -> dict[str, str]:
    if not resource:
        return {"universe": "vanilla"}
    return {"universe": "grid", "grid_resource": resource, "remote_universe": "vanilla"}


def _payload(first: BatchJob, config: Config, program: JobProgram) -> dict[str, str]:
    if set(str(array_dir(config, first.array))) & set("$\"' \t"):
        raise ValueError(f"{config.spool_dir} has a character that is special in submit files")
    directory = f"{config.spool_dir}/$(vmjobs_array)"
    arguments = [a.replace("{job}", "\x01") for a in program.arguments]
    return {
        "executable": program.executable,
        "transfer_executable": "false",
        "arguments": argument_string(arguments).replace("\x01", "$(vmjobs_id)"),
        "initialdir": f"{directory}/$(vmjobs_id)",
        "log": f"{directory}/{names.EVENT_LOG}",
        "output": names.EXEC_OUT,
        "error": names.EXEC_ERR,
        "should_transfer_files": "YES",
        "when_to_transfer_output": "ON_EXIT",
        "transfer_input_files": names.TOKEN,
        # Only the two streams are transferred: results go to the repository.
        "transfer_output_files": '""',
        # The event log alone maps cluster.proc to jobs, also after a crash.
        "submit_event_notes": f"{names.EVENT_NOTE} $(vmjobs_id)",
    }


def _resources(spec: JobSpec) -> dict[str, str]:
    return {
        "request_cpus": str(spec.cpus),
        "request_memory": str(spec.memory),
        # KiB. A VM's checkpoint is stored beside its disks.
        "request_disk": str((spec.disk + (spec.memory if spec.checkpoint else 0)) * 1024),
    }


def _vacate_seconds(spec: JobSpec) -> int:
    return CHECKPOINT_SECONDS if spec.checkpoint else VACATE_SECONDS


def _policy(first: BatchJob, config: Config, *, remote: bool) -> dict[str, str]:
    spec = first.spec
    wanted = requirements(spec, first.kinds, first.architecture, cloud_init=first.cloud_init)
    policy = {
        "requirements": "true" if remote else wanted,
        f"+{names.JOB_RANK}": rank(spec.image),
        "rank": names.JOB_RANK,
        "want_io_proxy": "true",
        "kill_sig": "SIGTERM",
        "job_max_vacate_time": str(_vacate_seconds(spec)),
        "job_lease_duration": str(LEASE_SECONDS if remote else config.node_lease_seconds),
        "notification": "never",
    }
    if not remote:
        policy |= {"on_exit_remove": ON_EXIT_REMOVE, f"+{names.WAITS}": WAIT_EXPRESSION}
    if remote:
        policy |= {
            "+remote_Requirements": wanted,
            "+remote_ShouldTransferFiles": '"YES"',
            "+remote_WhenToTransferOutput": '"ON_EXIT"',
            "+remote_WantIOProxy": "true",
            "+remote_KillSig": '"SIGTERM"',
            "+remote_JobMaxVacateTime": str(_vacate_seconds(spec)),
            "+remote_OnExitRemove": ON_EXIT_REMOVE,
            f"+remote_{names.WAITS}": WAIT_EXPRESSION,
            "+remote_JobLeaseDuration": str(config.node_lease_seconds),
        }
    return policy


def _identity(first: BatchJob, config: Config) -> dict[str, str]:
    spec = first.spec
    labels = ",".join(f"{key}={value}" for key, value in sorted(spec.labels.items()))
    attributes: Mapping[str, str] = {
        names.JOB_ID: '"$(vmjobs_id)"',
        names.JOB_INDEX: "$(vmjobs_index)",
        names.JOB_ARRAY: '"$(vmjobs_array)"',
        names.JOB_OWNER: classad_string(first.owner),
        names.JOB_NAME: classad_string(spec.name),
        names.JOB_LABELS: classad_string(labels),
        names.JOB_IMAGE: classad_string(spec.image),
        names.JOB_HYPERVISOR: classad_string(spec.hypervisor.value if spec.hypervisor else ""),
    }
    description = {f"+{name}": value for name, value in attributes.items()}
    description["batch_name"] = plain(spec.name, 64).strip() or first.array
    # One account submits for all users: the negotiator still needs to distinguish the owners.
    description["accounting_group_user"] = accounting_name(first.owner)
    group = spec.accounting_group or config.accounting_group
    if group:
        if not _ACCOUNTING.fullmatch(group):
            message = f"accounting group {plain(group)!r} (expected letters, digits and '._-' only)"
            raise InvalidSpec(message, faults=[Fault("spec.accounting_group", "bad_group", message)])
        description["accounting_group"] = group
    return description
