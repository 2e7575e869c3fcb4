"""The job disk and the job tar: how a job is put before its guest (guest contract, point 2).

Both are plain tar streams, so that any OS can read them and the host never mounts anything.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vmjobs.model import JobTicket

CONTRACT_VERSION = 1
#: Disks are a whole number of these, which every hypervisor accepts.
BLOCK = 1024 * 1024


@dataclass(frozen=True)
class Briefing:
    """What the guest is told. ``endpoint`` is ``""`` where the guest has no network.

    keep: what the scratch disk holds is to outlive the machine.
    """

    ticket: JobTicket
    endpoint: str
    token: str
    sentinel: str
    epoch: int
    keep: bool = False


def write_job_disk(path: Path, briefing: Briefing, inputs: Path | None) -> None:
    """Write the job disk; script and ``inputs`` (a directory) go along if there are any given."""
    with path.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for name, text in _description(briefing):
                _add(tar, name, text.encode(), 0o600)
            if inputs is not None:
                _add_payload(tar, briefing.ticket, inputs)
        size = file.tell()
        file.truncate(-(-size // BLOCK) * BLOCK)
        os.fsync(file.fileno())


def write_job_tar(sink: BinaryIO, ticket: JobTicket, inputs: Path) -> None:
    """Write the tar that the endpoint serves: the script, if the job has one, and the inputs."""
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.GNU_FORMAT) as tar:
        _add_payload(tar, ticket, inputs)


def blank_disk(path: Path, size: int) -> None:
    """Make a blank, sparse disk of at least ``size`` bytes."""
    with path.open("xb") as file:
        file.truncate(-(-size // BLOCK) * BLOCK)


def _description(briefing: Briefing) -> Iterable[tuple[str, str]]:
    ticket, spec = briefing.ticket, briefing.ticket.spec
    variables = {
        "VMJOBS_CONTRACT": str(CONTRACT_VERSION),
        "VMJOBS_JOB_ID": ticket.job_id,
        "VMJOBS_ATTEMPT": ticket.attempt,
        "VMJOBS_ARRAY_INDEX": str(ticket.index),
        "VMJOBS_ARRAY_COUNT": str(ticket.count),
        "VMJOBS_ENDPOINT": briefing.endpoint,
        "VMJOBS_TOKEN": briefing.token,
        "VMJOBS_NETWORK": spec.network.value,
        "VMJOBS_SENTINEL": briefing.sentinel,
        "VMJOBS_ARGUMENTS": shlex.join(spec.arguments),
        "VMJOBS_EPOCH": str(briefing.epoch),
        **({"VMJOBS_KEEP": "1"} if briefing.keep else {}),
        **({"VMJOBS_CHECKPOINT": "1"} if spec.checkpoint else {}),
    }
    described = {
        "contract": CONTRACT_VERSION,
        "job_id": ticket.job_id,
        "attempt": ticket.attempt,
        "index": ticket.index,
        "count": ticket.count,
        "endpoint": briefing.endpoint,
        "token": briefing.token,
        "sentinel": briefing.sentinel,
        "network": spec.network,
        "arguments": spec.arguments,
        "environment": spec.environment,
        "inputs": [f.name for f in spec.inputs],
        "outputs": spec.outputs,
        "disk": spec.disk,
        "keep": briefing.keep,
        "checkpoint": spec.checkpoint,
    }
    yield "job.json", json.dumps(described, indent=1, sort_keys=True) + "\n"
    yield "job.env", "".join(f"{name}={_quote(text)}\n" for name, text in variables.items())
    exports = (f"export {name}={_quote(text)}\n" for name, text in spec.environment.items())
    yield "environment", "".join(exports)
    yield "outputs", "".join(f"{glob}\n" for glob in spec.outputs)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _add_payload(tar: tarfile.TarFile, ticket: JobTicket, inputs: Path) -> None:
    if ticket.spec.script:
        _add(tar, "script", ticket.spec.script.encode(), 0o755)
    for file in ticket.spec.inputs:
        info = tarfile.TarInfo(f"inputs/{file.name}")
        info.size, info.mode = file.size, 0o644
        with (inputs / file.name).open("rb") as source:
            tar.addfile(info, source)


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))
