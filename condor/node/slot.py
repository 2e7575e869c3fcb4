"""Find the job and the owner of a slot, from this node's startd.

The ad in the job's directory is untrusted, since the job can change it. The startd has the owner from
the schedd that claimed the slot, and no job can change that.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from condor import names
from condor.tool_environment import condor_environment
from vmjobs import subprocess
from vmjobs.agent.condor_job.starter import StarterProcess, read_starter
from vmjobs.errors import Unavailable, VMJobsError
from vmjobs.wire import CONDOR_JOB

#: Seconds in which the startd has to answer.
TIMEOUT: Final = 20.0


@dataclass(frozen=True)
class SlotJob:
    """An HTCondor job. owner: ``USER@DOMAIN``, set by the schedd.

    global_id: ``GlobalJobId``, unique among the owner's jobs unless the owner has changed it: users can
    change all attributes of their jobs except those with their identity
    (``SYSTEM_IMMUTABLE_JOB_ATTRS``).
    """

    global_id: str
    owner: str

    @property
    def key(self) -> str:
        """The job's id in the service (``vmjobs.wire.CondorJobId``)."""
        named = json.dumps([self.owner, self.global_id])
        return f"{CONDOR_JOB}{hashlib.sha256(named.encode()).hexdigest()[:29]}"


def job_of_starter(starter: StarterProcess, proc: Path = Path("/proc")) -> SlotJob:
    """The job of a starter, which has only one in its life.

    Raises:
        Unavailable: the startd does not answer, or has no job there (any more).
    """
    slot = slot_name(_cmdline(proc / str(starter.pid)))
    own = _query_startd("condor_config_val", "FULL_HOSTNAME").decode("utf-8", "replace").strip()
    wanted = f"Name,{names.GLOBAL_ID},{names.REMOTE_USER}"
    text = _query_startd("condor_status", "-direct", own, "-json", "-attributes", wanted)
    try:
        ads = json.loads(text or b"[]")
    except ValueError as error:
        raise Unavailable("startd", f"condor_status -direct {own} printed no list of ads") from error
    found = _job_in_slot(ads, slot)
    if read_starter(starter.pid, proc) != starter:
        raise Unavailable("starter", "the starter has gone meanwhile")
    return found


def _cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError as error:
        raise Unavailable("starter", "the starter has gone meanwhile") from error


def slot_name(cmdline: bytes) -> str:
    """The slot's name from a starter's command line (``-a NAME``), without the host name.

    Raises:
        Unavailable: the command line has none.
    """
    words = cmdline.decode("utf-8", "surrogateescape").split("\0")
    if "-a" not in words[:-2]:
        raise Unavailable("starter", "the starter's command line has no slot name")
    return words[words.index("-a") + 1].partition("@")[0]


def _job_in_slot(ads: list[dict[str, Any]], slot: str) -> SlotJob:
    for ad in ads:
        found = ad.get(names.GLOBAL_ID), ad.get(names.REMOTE_USER)
        if str(ad.get("Name", "")).partition("@")[0] == slot and all(found):
            return SlotJob(*map(str, found))
    raise Unavailable("startd", f"the startd has no job in {slot}")


def _query_startd(*argv: str) -> bytes:
    try:
        return subprocess.run(argv, timeout=TIMEOUT, env=condor_environment()).stdout
    except VMJobsError as error:
        raise Unavailable("startd", f"this node's startd does not answer: {error.message}") from error
