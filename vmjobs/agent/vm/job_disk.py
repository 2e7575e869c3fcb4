"""The job disk, which gives a guest its job (guest contract, "The job disk").

It is a plain tar stream, so that any OS can read it and the host never mounts anything.
"""

from __future__ import annotations

import errno
import json
import shlex
import tarfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import DataDisk
from vmjobs.model import InputFile, JobTicket
from vmjobs.subprocess import run

CONTRACT_VERSION = 3
#: Disk sizes are multiples of this number of bytes, which every hypervisor accepts.
SIZE_UNIT = 1024 * 1024
#: ext4 features that kernels before 5.15, or their tools, do not support.
_DISABLED_FEATURES: Final = "^metadata_csum_seed,^orphan_file"
_FORMAT_SECONDS: Final = 60.0


@dataclass(frozen=True)
class JobDescription:
    """A job as described to its guest.

    endpoint: URL; ``""``: the guest has no network. keep: the scratch disk outlives the VM.
    """

    ticket: JobTicket
    endpoint: str
    token: str
    sentinel: str
    keep: bool = False


def write_job_disk(
    path: Path, job_description: JobDescription, fetch: Callable[[InputFile, BinaryIO], object]
) -> None:
    """Write the job disk: the job's description, its script if it has one, its inputs.

    fetch: writes an input at the present position of a file; it may rewind and write it again.

    Raises:
        OSError: the disk cannot be written, or an input's size differs from the job's description.
    """
    with path.open("wb") as file:
        file.write(_description_entries(job_description))
        if script := job_description.ticket.spec.script:
            file.write(_entry("script", script.encode(), 0o755))
        for wanted in job_description.ticket.spec.inputs:
            file.write(_header(f"inputs/{wanted.name}", wanted.size, 0o644))
            start = file.tell()
            fetch(wanted, file)
            if (size := file.tell() - start) != wanted.size:
                raise OSError(errno.EIO, f"there are {size} bytes of {wanted.size}", wanted.name)
            file.write(bytes(-size % tarfile.BLOCKSIZE))
        file.truncate(round_up(file.tell() + 2 * tarfile.BLOCKSIZE))
        file.seek(0)
        # Again, with the time at which the disk is complete.
        file.write(_description_entries(job_description))


def data_disks(directory: Path, scratch: Path) -> tuple[DataDisk, ...]:
    """Return a VM's disks in the guest contract's order. scratch: the file of its scratch disk."""
    disks = DataDisk(directory / "job.disk", read_only=True), DataDisk(scratch)
    seed = directory / "seed.disk"
    seeds = (DataDisk(seed, read_only=True),) if seed.exists() else ()
    return *disks, DataDisk(directory / "output.disk"), *seeds


def create_scratch_disk(path: Path, size: int) -> None:
    """Create a sparse disk of at least ``size`` bytes: an empty ext4 file system without a journal.

    A guest would take ten times as long to make it.

    Raises:
        HypervisorError: mke2fs is not installed, or fails.
    """
    create_blank_disk(path, size)
    make_file_system(path, "^has_journal")


def make_file_system(disk: Path, features: str, *options: str) -> None:
    """Make an empty ext4 file system, for all kernels since 3.6.

    features, options: as for mke2fs's option ``-O``, and more of its options.

    Raises:
        HypervisorError: mke2fs is not installed, or fails.
    """
    # Nothing has to be written where a sparse file has zeros.
    extended = "lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0"
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-E", extended]
    command += ["-O", f"{_DISABLED_FEATURES},{features}", *options, str(disk)]
    run(command, timeout=_FORMAT_SECONDS, error=HypervisorError)


def create_blank_disk(path: Path, size: int) -> None:
    """Create a blank, sparse disk of at least ``size`` bytes."""
    with path.open("xb") as file:
        file.truncate(round_up(size))


def round_up(size: int) -> int:
    """Return the smallest size of a disk that has at least so many bytes."""
    return -(-size // SIZE_UNIT) * SIZE_UNIT


def _description_entries(job_description: JobDescription) -> bytes:
    return b"".join(
        _entry(name, text.encode(), 0o600) for name, text in _description_files(job_description)
    )


def _description_files(job_description: JobDescription) -> Iterable[tuple[str, str]]:
    ticket, spec = job_description.ticket, job_description.ticket.spec
    variables = {
        "VMJOBS_CONTRACT": str(CONTRACT_VERSION),
        "VMJOBS_JOB_ID": ticket.job_id,
        "VMJOBS_ATTEMPT": ticket.attempt,
        "VMJOBS_ARRAY_INDEX": str(ticket.index),
        "VMJOBS_ARRAY_COUNT": str(ticket.count),
        "VMJOBS_ENDPOINT": job_description.endpoint,
        "VMJOBS_TOKEN": job_description.token,
        "VMJOBS_NETWORK": spec.network.value,
        "VMJOBS_SENTINEL": job_description.sentinel,
        "VMJOBS_ARGUMENTS": shlex.join(spec.arguments),
        "VMJOBS_EPOCH": f"{time.time():010.0f}",
        **({"VMJOBS_KEEP": "1"} if job_description.keep else {"VMJOBS_FORMATTED": "1"}),
        **({"VMJOBS_CHECKPOINT": "1"} if spec.checkpoint else {}),
    }
    fields = {
        "contract": CONTRACT_VERSION,
        "job_id": ticket.job_id,
        "attempt": ticket.attempt,
        "index": ticket.index,
        "count": ticket.count,
        "endpoint": job_description.endpoint,
        "token": job_description.token,
        "sentinel": job_description.sentinel,
        "network": spec.network,
        "arguments": spec.arguments,
        "environment": spec.environment,
        "inputs": [f.name for f in spec.inputs],
        "outputs": spec.outputs,
        "disk": spec.disk,
        "keep": job_description.keep,
        "checkpoint": spec.checkpoint,
    }
    yield "job.json", json.dumps(fields, indent=1, sort_keys=True) + "\n"
    yield "job.env", "".join(f"{name}={_quote(text)}\n" for name, text in variables.items())
    exports = (f"export {name}={_quote(text)}\n" for name, text in spec.environment.items())
    yield "environment", "".join(exports)
    yield "outputs", "".join(f"{glob}\n" for glob in spec.outputs)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _entry(name: str, data: bytes, mode: int) -> bytes:
    return _header(name, len(data), mode) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def _header(name: str, size: int, mode: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, mode
    return info.tobuf(tarfile.GNU_FORMAT)
