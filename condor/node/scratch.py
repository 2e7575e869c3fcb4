"""The scratch directory of a running job: read the ads that the starter writes there.

Ads are read line by line, ``Name = value``, with strings, numbers and booleans as values. So an execute
node does not need HTCondor's Python bindings. Processes that run beside each job import this: it
imports no module that takes long to load.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from condor import names
from condor.events import outcomes
from vmjobs.agent.framing import VERSION
from vmjobs.errors import InvalidRequest, NotFound, VMJobsError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Final

#: Far above any real ad, in bytes.
MAX_BYTES: Final = 4 * 1024 * 1024
#: The least memory of a VM in MiB: for a kernel, and the guest's own programs.
MIN_MEMORY: Final = 96
#: The least disk of a job in MiB. HTCondor's default request is hardly more than the job's inputs.
MIN_DISK: Final = 1024

_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,200}")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?")


class TextAd:
    """An ad. lines: the text of each attribute's value, by the attribute's name in lower case."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        self.lines = lines

    def string(self, name: str) -> str:
        """A string; ``""`` if the ad has no such attribute.

        Raises:
            InvalidRequest: it is something else.
        """
        text = self.lines.get(name.lower())
        if text is None or text.lower() == "undefined":
            return ""
        found = _STRING.fullmatch(text)
        if not found:
            # HTCondor reads a word without quotes as the name of another attribute.
            word = _WORD.fullmatch(text)
            write = f'; write +{name} = "{text}"' if word else ""
            raise InvalidRequest(f"{name} of the job is {text[:200]}, but must be a string{write}")
        return re.sub(r"\\(.)", r"\1", found[1])

    def number(self, name: str) -> int | None:
        """A number, rounded down; None if the ad has no such attribute.

        Raises:
            InvalidRequest: it is something else.
        """
        text = self.lines.get(name.lower())
        if text is None or text.lower() == "undefined":
            return None
        if not _NUMBER.fullmatch(text):
            raise InvalidRequest(f"{name} of the job is {text[:200]}, but must be a number")
        return int(float(text))

    def boolean(self, name: str) -> bool:
        """Whether an attribute is true; a missing one is false.

        Raises:
            InvalidRequest: it is neither true nor false.
        """
        text = self.lines.get(name.lower(), "false").lower()
        if text not in {"true", "false", "undefined"}:
            raise InvalidRequest(f"{name} of the job is {text[:200]}, but must be true or false")
        return text == "true"

    def is_true(self, name: str) -> bool:
        """Whether an attribute is the literal ``true``."""
        return self.lines.get(name.lower(), "").lower() == "true"


def read(path: str) -> TextAd:
    """Read an ad. Raises NotFound if there is none."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}") from error
    pairs = (line.partition("=") for line in text.splitlines())
    return TextAd({name.strip().lower(): value.strip() for name, equals, value in pairs if equals})


def scratch_directory(environment: Mapping[bytes, bytes]) -> str:
    """The job's scratch directory, which is its current directory.

    Raises:
        InvalidRequest: the job runs in another directory, which its VM does not have.
    """
    said = os.fsdecode(environment.get(b"_CONDOR_SCRATCH_DIR", b"/nowhere"))
    here = os.getcwd()
    if not os.path.isdir(said) or not os.path.samefile(here, said):
        raise InvalidRequest(
            f"the job runs in {here}, which its VM does not have; "
            "set should_transfer_files = YES in its submit file"
        )
    return said


def submit_message(
    job: TextAd, machine: TextAd, directory: str, account: tuple[str, str]
) -> dict[str, Any]:
    """The ``hand`` message that asks the agent for a VM; the agent checks its values.

    account: names of the job's user and group.

    Raises:
        InvalidRequest: an attribute in the job's ad has the wrong type.
    """
    request = {
        "job": f"{job.number(names.CLUSTER_ID)}.{job.number(names.PROC_ID)}",
        "image": job.string(names.WANTED_IMAGE),
        "directory": directory,
        "user": account[0],
        "group": account[1],
        "cpus": _cpus(job, machine),
        "memory": max(machine.number("Memory") or 0, MIN_MEMORY),
        "disk": max((machine.number("Disk") or 0) // 1024, MIN_DISK),
        "hypervisor": job.string(names.WANTED_HYPERVISOR).lower() or None,
        "network": job.string(names.WANTED_NETWORK).lower() or None,
        "boot_seconds": job.number(names.WANTED_BOOT_TIMEOUT),
        "chirp": os.path.isfile(os.path.join(directory, names.CHIRP_CONFIG)),
        "checkpoint": job.boolean(names.WANTED_CHECKPOINT),
        "anew": _has_ended(job),
    }
    said = {name: value for name, value in request.items() if value is not None}
    return {"type": "hand", "version": VERSION, **said}


def _cpus(job: TextAd, machine: TextAd) -> int:
    """The CPUs of the slot, at most as many as the job requests.

    A static slot may have more, and not every hypervisor supports those.
    """
    slot, asked = machine.number("Cpus") or 1, job.lines.get("requestcpus", "")
    return max(1, min(slot, int(asked))) if asked.isdecimal() else slot


def create_missing_outputs(directory: str) -> None:
    """Create empty files for outputs that the job's ad names and its directory lacks."""
    from vmjobs.paths import check_path  # noqa: PLC0415 - only a job that could not run needs it

    listed = read(os.path.join(directory, names.JOB_AD)).string("TransferOutput")
    for name in filter(None, (word.strip().rstrip("/") for word in listed.split(","))):
        target = os.path.join(directory, name)
        if check_path(name) or os.path.lexists(target):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o666))


#: Fields of the ``hand`` message, and the attributes with which users set them.
ATTRIBUTE_OF_FIELD: Final = {
    "image": names.WANTED_IMAGE,
    "hypervisor": names.WANTED_HYPERVISOR,
    "network": names.WANTED_NETWORK,
    "boot_seconds": names.WANTED_BOOT_TIMEOUT,
    "checkpoint": names.WANTED_CHECKPOINT,
}


def _has_ended(job: TextAd) -> bool:
    """Whether the job ended in an earlier attempt: its policy or a release runs it again."""
    return job.lines.get(names.VM_STATE.lower()) in {'"COMPLETED"', '"FAILED"'}


def was_held(path: str) -> bool:
    """Whether the job with this ad was held for its outcome before."""
    with suppress(VMJobsError):
        return read(path).string(names.VM_OUTCOME) == outcomes.HOLD
    return False


def eviction_count(path: str) -> int:
    """The number of earlier evictions of the job with this ad; 0 if unknown."""
    with suppress(VMJobsError):
        return read(path).number(names.VM_VACATED) or 0
    return 0
