"""Checks of `vmjobs doctor` on HTCondor's configuration for transparent jobs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from condor import names
from condor.tool_environment import condor_environment
from vmjobs import subprocess
from vmjobs.errors import VMJobsError

#: Timeout of condor_config_val in seconds.
ASK_SECONDS = 20.0


class HostRole(StrEnum):
    NODE = "node"
    SCHEDD = "schedd"
    NEGOTIATOR = "negotiator"


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check.

    needed_for: what does not work without it. role: the role that requires it; None: optional.
    """

    what: str
    ok: bool
    detail: str
    needed_for: str
    role: HostRole | None = None


#: What does not work if the settings of a daemon are incomplete.
_USES = {
    HostRole.NODE: "jobs of HTCondor in VMs here",
    HostRole.SCHEDD: "jobs of HTCondor in VMs from here",
    HostRole.NEGOTIATOR: "jobs going where their image is",
}


#: Settings of a node, the pattern that each must match, and the consequence if it does not.
_NODE_SETTINGS = (
    ("RANK", r"\S", "is not set: the next job preempts jobs that come back to this node"),
    (
        "MEMORY_USAGE_METRIC",
        names.VM_MEMORY_BYTES,
        f"has no {names.VM_MEMORY_BYTES}: MemoryUsage does not count the VM's memory",
    ),
)


def check_condor() -> Iterator[DoctorFinding]:
    """Check the settings of each HTCondor daemon of this host.

    Yield nothing if HTCondor is not installed.
    """
    if shutil.which("condor_config_val") is None:
        return
    daemons = _setting_words("DAEMON_LIST")
    for role, daemon, faults_of in (
        (HostRole.NODE, "STARTD", _node_faults),
        (HostRole.SCHEDD, "SCHEDD", partial(_schedd_faults, daemons)),
        (HostRole.NEGOTIATOR, "NEGOTIATOR", _negotiator_faults),
    ):
        if daemon in daemons:
            faults = list(faults_of())
            for fault in faults or ["its settings are in place"]:
                yield DoctorFinding(f"HTCondor: {role}", not faults, fault, _USES[role], role)


def _schedd_faults(daemons: set[str]) -> Iterator[str]:
    transforms = _setting_words("JOB_TRANSFORM_NAMES")
    if "VMJOBSROUTE" in transforms:
        yield from _router_faults(daemons)
    if "VMJOBS" in transforms:
        yield from _policy_faults(_setting_value("JOB_TRANSFORM_VMJobs"))
    elif not transforms & {"VMJOBSROUTE", "VMJOBSLEAVES"}:
        yield (
            "JOB_TRANSFORM_NAMES has no VMJobs: jobs with +VMJobImage match no node; copy "
            "condor/config/schedd.conf into config.d, or condor/config/submit.conf if all of them "
            "leave by Condor-C"
        )


def _policy_faults(transform: str) -> Iterator[str]:
    adds = (f"{names.POLICY} {names.POLICY_VERSION}", names.WAITS, names.JOB_RANK, names.IMAGE_KNOWN)
    if missing := [what for what in adds if not re.search(rf"(?m)^ *SET +{what}\b", transform)]:
        yield (
            "JOB_TRANSFORM_VMJobs is of another version of vmjobs (it sets no "
            f"{' and no '.join(missing)}); copy condor/config/schedd.conf into config.d"
        )


def _negotiator_faults() -> Iterator[str]:
    if names.JOB_RANK not in _setting_value("NEGOTIATOR_PRE_JOB_RANK"):
        yield (
            f"NEGOTIATOR_PRE_JOB_RANK has no {names.JOB_RANK}: jobs go to the fullest node, even if it "
            "lacks their image or lost them before; copy condor/config/negotiator.conf"
        )


def _router_faults(daemons: set[str]) -> Iterator[str]:
    """Check a schedd that uses the job router (condor/config/submit-router.conf)."""
    if "JOB_ROUTER" not in daemons:
        yield "DAEMON_LIST has no JOB_ROUTER: jobs with +VMJobImage stay idle here"
    if "VMJOBS" not in _setting_words("JOB_ROUTER_ROUTE_NAMES"):
        yield "JOB_ROUTER_ROUTE_NAMES has no VMJobs: jobs with +VMJobImage stay idle here"
    if not re.fullmatch(r"condor +[^ ]+ +[^ ]+", _setting_value("VMJOBS_ROUTE")):
        yield "VMJOBS_ROUTE is not 'condor SCHEDD COLLECTOR': the job router cannot send jobs"
    if _setting_value("JOB_ROUTER_RELEASE_ON_HOLD").upper() not in ("FALSE", "F", "NO", "0"):
        yield "JOB_ROUTER_RELEASE_ON_HOLD is not FALSE: held jobs are sent again and again"


def _node_faults() -> Iterator[str]:
    if "VMJOBS" not in _setting_words("STARTD_CRON_JOBLIST"):
        yield "STARTD_CRON_JOBLIST has no VMJOBS: copy condor/config/node.conf into config.d"
    elif not os.access(program := _setting_value("STARTD_CRON_VMJOBS_EXECUTABLE"), os.X_OK):
        yield (
            f"STARTD_CRON_VMJOBS_EXECUTABLE: {program} cannot be executed, so the pool does not know "
            "that this node runs VMs; install it"
        )
    if not re.search(rf"\b{names.POLICY} *=[?]= *{names.POLICY_VERSION}\b", _setting_value("START")):
        yield (
            f"START has no {names.POLICY} =?= {names.POLICY_VERSION}: this node accepts jobs of "
            "schedds that cannot handle a failed VM; copy condor/config/node.conf"
        )
    for name, wanted, why in _NODE_SETTINGS:
        if not re.search(wanted, _setting_value(name)):
            yield f"{name} {why}; copy condor/config/node.conf"
    wrapper = _setting_value("USER_JOB_WRAPPER")
    if Path(wrapper).name != "job-wrapper":
        found = f"is {wrapper}" if wrapper else "is not set"
        yield f"USER_JOB_WRAPPER {found}: no job gets a VM; copy condor/config/node.conf"
    elif not os.access(wrapper, os.X_OK):
        yield f"USER_JOB_WRAPPER: {wrapper} cannot be executed, so no job starts here; install it"
    elif _is_script(wrapper):
        yield (
            f"USER_JOB_WRAPPER: {wrapper} is a script, so a job's LD_PRELOAD runs code on this node; "
            "build deploy/job-wrapper/job-wrapper.c and install that"
        )
    else:
        yield from _wrapper_file_faults(Path(wrapper).resolve())


def _wrapper_file_faults(wrapper: Path) -> Iterator[str]:
    """Yield a fault for each missing file that the job wrapper and the cron job need."""
    for name in ("exec-unchanged", "python3", "modules/condor"):
        if not (file := wrapper.parent / name).exists():
            yield f"{file} does not exist: no job gets a VM; install it"
    if not (settings := wrapper.with_name("ssh-to-job.sshd")).is_file():
        yield f"{settings} does not exist: condor_ssh_to_job cannot enter VMs; install it"


def _is_script(path: str) -> bool:
    with suppress(OSError), Path(path).open("rb") as file:
        return file.read(2) == b"#!"
    return False


def _setting_words(name: str) -> set[str]:
    return {word.upper() for word in _setting_value(name).replace(",", " ").split()}


def _setting_value(name: str) -> str:
    try:
        answer = subprocess.run(
            ["condor_config_val", name], timeout=ASK_SECONDS, check=False, env=condor_environment()
        )
    except VMJobsError:
        return ""
    return answer.text.strip() if answer.returncode == 0 else ""
