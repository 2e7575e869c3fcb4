"""What `vmjobs doctor` says of HTCondor's configuration, for unchanged jobs in machines."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from vmjobs import subprocess
from vmjobs.errors import VMJobsError

#: Seconds for a question to condor_config_val.
ASK_SECONDS = 20.0


def faults_of_condor() -> Iterator[tuple[str, str]]:
    """What is missing on this host, as sentences, and who misses it. Nothing where HTCondor is not."""
    tool = shutil.which("condor_config_val")
    if tool is None:
        return
    daemons = _words(tool, "DAEMON_LIST")
    if "STARTD" in daemons:
        yield from ((fault, "jobs of HTCondor in VMs here") for fault in _faults_of_node(tool))
    if "SCHEDD" in daemons:
        yield from (
            (fault, "jobs of HTCondor in VMs from here") for fault in _faults_of_schedd(tool, daemons)
        )


def _faults_of_schedd(tool: str, daemons: set[str]) -> Iterator[str]:
    transforms = _words(tool, "JOB_TRANSFORM_NAMES")
    if "VMJOBSROUTE" in transforms:
        yield from _faults_of_router(tool, daemons)
    elif "VMJOBS" not in transforms:
        yield (
            "JOB_TRANSFORM_NAMES has no VMJobs: jobs with +VMJobImage match no node unless they leave "
            "by Condor-C; copy condor/config/schedd.conf into config.d"
        )


def _faults_of_router(tool: str, daemons: set[str]) -> Iterator[str]:
    """Of a schedd that leaves jobs to its job router (condor/config/submit-router.conf)."""
    if "JOB_ROUTER" not in daemons:
        yield "DAEMON_LIST has no JOB_ROUTER: jobs with +VMJobImage wait here for ever"
    if "VMJOBS" not in _words(tool, "JOB_ROUTER_ROUTE_NAMES"):
        yield "JOB_ROUTER_ROUTE_NAMES has no VMJobs: jobs with +VMJobImage wait here for ever"
    if not re.fullmatch(r"condor +[^ ]+ +[^ ]+", _value(tool, "VMJOBS_ROUTE")):
        yield "VMJOBS_ROUTE is no 'condor SCHEDD COLLECTOR': the job router has nowhere to send jobs"
    if _value(tool, "JOB_ROUTER_RELEASE_ON_HOLD").upper() not in ("FALSE", "F", "NO", "0"):
        yield "JOB_ROUTER_RELEASE_ON_HOLD is not FALSE: jobs that are held are sent again and again"


def _faults_of_node(tool: str) -> Iterator[str]:
    if "VMJOBS" not in _words(tool, "STARTD_CRON_JOBLIST"):
        yield "STARTD_CRON_JOBLIST has no VMJOBS: copy condor/config/node.conf into config.d"
    wrapper = _value(tool, "USER_JOB_WRAPPER")
    if Path(wrapper).name != "job-wrapper":
        found = f"is {wrapper}" if wrapper else "is not set"
        yield f"USER_JOB_WRAPPER {found}: no job gets a VM; copy condor/config/node.conf"
    elif not os.access(wrapper, os.X_OK):
        yield f"USER_JOB_WRAPPER: {wrapper} cannot be executed, so no job starts here; install it"
    elif not (settings := Path(wrapper).resolve().with_name("ssh-to-job.sshd")).is_file():
        yield f"{settings} is not there: condor_ssh_to_job leads into no VM; install it"


def _words(tool: str, name: str) -> set[str]:
    return {word.upper() for word in _value(tool, name).replace(",", " ").split()}


def _value(tool: str, name: str) -> str:
    try:
        answer = subprocess.run([tool, name], timeout=ASK_SECONDS, check=False)
    except VMJobsError:
        return ""
    return answer.text.strip() if answer.returncode == 0 else ""
