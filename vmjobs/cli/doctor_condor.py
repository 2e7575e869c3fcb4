"""What `vmjobs doctor` says of HTCondor's configuration, for unchanged jobs in machines."""

from __future__ import annotations

import os
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
    if "SCHEDD" in daemons and "VMJOBS" not in _words(tool, "JOB_TRANSFORM_NAMES"):
        yield (
            "JOB_TRANSFORM_NAMES has no VMJobs: jobs with +VMJobImage match no node unless they leave "
            "by Condor-C; copy condor/config/schedd.conf into config.d",
            "jobs of HTCondor in VMs from here",
        )


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
