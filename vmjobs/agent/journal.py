"""The agent's journal of runs, from which a restarted agent cleans up.

Everything that a run creates lies in its own directory, except its VM. So one small record, durable
before anything else is created, is enough to know what to remove:

====================================  =======================================================
killed after                          a restarted agent finds
====================================  =======================================================
``mkdir``                             a directory without record: no VM was ever started
record written                        a record: it destroys the VM by name, removes the rest
outcome written                       the same, and keeps the outcome for the next request
other VM written                      the same, with the other VM
VM destroyed                          the same; destroying it again is no error
contents removed                      only the record: the same
====================================  =======================================================
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from vmjobs.errors import HypervisorError
from vmjobs.fsync import sync_directory
from vmjobs.hypervisor import probe
from vmjobs.hypervisor.base import NAME_PREFIX, Hypervisor
from vmjobs.model import HypervisorKind

log = logging.getLogger(__name__)

T = TypeVar("T")

RECORD_FILE = "run.json"
OUTCOME_FILE = "verdict.json"
#: The hypervisor and the name of the run's VM, if they differ from the record's.
VM_FILE = "machine.json"


@dataclass(frozen=True)
class RunRecord:
    """The data that is needed to undo a run."""

    attempt: str
    job: str
    machine: str
    hypervisor: HypervisorKind


@dataclass(frozen=True)
class InterruptedRun:
    """A run that an earlier process did not end. outcome: ``""`` if it had none yet."""

    record: RunRecord
    outcome: str


def vm_name_prefix(root: Path) -> str:
    """Return the prefix of a journal's VM names, unique among the node's journals."""
    return f"{NAME_PREFIX}{hashlib.sha256(bytes(root.resolve())).hexdigest()[:8]}-"


class VmJournal:
    """Directories of VMs below one root, each with a record that is durable before the VM exists.

    prefix: of the names of its VMs.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.prefix = vm_name_prefix(root)

    def directories(self) -> list[Path]:
        """Return the directories of the VMs, with and without record."""
        return sorted(path for path in self.root.iterdir() if path.is_dir())

    def _load(self, read: Callable[[Path], T | None]) -> Iterator[tuple[Path, T]]:
        """Yield each directory with its record; remove those without one."""
        for directory in self.directories():
            if (record := read(directory)) is not None:
                yield directory, record
            else:
                shutil.rmtree(directory)


class Journal(VmJournal):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._reassigned: dict[str, tuple[str, Hypervisor]] = {}

    def vm_name(self, attempt: str) -> str:
        return f"{self.prefix}{attempt}"

    def directory(self, attempt: str) -> Path:
        """Return the directory of an attempt's files, which exists while it runs."""
        return self.root / attempt

    @contextmanager
    def run(self, record: RunRecord, driver: Hypervisor) -> Iterator[Path]:
        """Create a run's directory; at the end destroy the VM and remove the directory.

        Raises:
            HypervisorError: the VM could not be verified gone. The record stays, and the next start of
                the agent tries again.
        """
        directory = self.directory(record.attempt)
        with self._exclusive():
            alive = _create_directory(directory, record)
        with alive:
            try:
                yield directory
            finally:
                name, driver = self._reassigned.pop(record.attempt, (record.machine, driver))
                self._remove(directory, name, driver)

    def reassign(self, attempt: str, machine: str, driver: Hypervisor) -> None:
        """Note that the run will start another VM than its record names."""
        text = json.dumps({"machine": machine, "hypervisor": driver.kind.value})
        write_durably(self.root / attempt / VM_FILE, text.encode())
        self._reassigned[attempt] = (machine, driver)

    def record_outcome(self, attempt: str, outcome: str) -> None:
        """Write a run's outcome (JSON), which only remains to be reported."""
        write_durably(self.root / attempt / OUTCOME_FILE, outcome.encode())

    def recover(self, drivers: Mapping[HypervisorKind, Hypervisor]) -> list[InterruptedRun]:
        """Undo and return the runs of dead processes; runs of live processes stay."""
        with self._exclusive():
            dead = [
                found for found in self._load(_read_record) if not _is_locked(found[0] / RECORD_FILE)
            ]
            undone = [self._undo(directory, record, drivers) for directory, record in dead]
        return [left for left in undone if left is not None]

    def _undo(
        self, directory: Path, record: RunRecord, drivers: Mapping[HypervisorKind, Hypervisor]
    ) -> InterruptedRun | None:
        driver = drivers.get(record.hypervisor)
        if driver is None:
            log.error("cannot undo run %s: there is no %s driver", record.attempt, record.hypervisor)
            return None
        outcome = _read_text(directory / OUTCOME_FILE)
        self._remove(directory, record.machine, driver)
        return InterruptedRun(record, outcome)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock with which one process at a time creates or undoes runs."""
        with self.root.with_name(f"{self.root.name}.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove(self, directory: Path, machine: str, driver: Hypervisor) -> None:
        driver.destroy(machine)
        remove_directory(directory / RECORD_FILE)


def sweep(journal: Journal, drivers: Mapping[HypervisorKind, Hypervisor]) -> list[str]:
    """Destroy VMs of this journal without a record. Returns their names."""
    directories = journal.directories()
    known = {journal.vm_name(p.name) for p in directories}
    # A resumed VM keeps the name that it had in an earlier run.
    known |= {record.machine for p in directories if (record := _read_record(p)) is not None}
    return sweep_unknown(journal.prefix, known.__contains__, drivers)


def sweep_probes(drivers: Mapping[HypervisorKind, Hypervisor]) -> list[str]:
    """Destroy VMs of probes whose process was killed. Returns their names."""
    swept = sweep_unknown(probe.PROBE_PREFIX, probe.is_running, drivers)
    probe.remove_stale_folders(Path(tempfile.gettempdir()))
    return swept


def sweep_unknown(
    prefix: str, is_known: Callable[[str], bool], drivers: Mapping[HypervisorKind, Hypervisor]
) -> list[str]:
    """Destroy unknown VMs whose names begin with ``prefix``. Returns their names."""
    swept = []
    for driver in drivers.values():
        for name in _vm_names(driver):
            if name.startswith(prefix) and not is_known(name):
                driver.destroy(name)
                swept.append(name)
    return swept


def _vm_names(driver: Hypervisor) -> list[str]:
    try:
        return driver.list()
    except HypervisorError as error:
        log.warning("cannot list the VMs of %s: %s", driver.kind, error)
        return []


def _is_locked(path: Path) -> bool:
    """Whether the process that wrote this record is alive: it holds a lock on it."""
    with path.open("rb") as record:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""


def _read_record(directory: Path) -> RunRecord | None:
    """Return a run's record, updated by a later reassignment; None: it has none."""
    text = _read_text(directory / RECORD_FILE)
    if not text:
        return None
    data = json.loads(text) | json.loads(_read_text(directory / VM_FILE) or "{}")
    return RunRecord(data["attempt"], data["job"], data["machine"], HypervisorKind(data["hypervisor"]))


def _create_directory(directory: Path, record: RunRecord) -> BinaryIO:
    """Create a run's directory and record; return the record, locked by this process."""
    directory.mkdir(mode=0o700)
    try:
        write_durably(directory / RECORD_FILE, json.dumps(asdict(record)).encode())
        alive = (directory / RECORD_FILE).open("rb")
    except OSError:  # such as a full disk
        shutil.rmtree(directory, ignore_errors=True)
        raise
    fcntl.flock(alive, fcntl.LOCK_EX)
    return alive


def remove_directory(record: Path) -> None:
    """Remove the directory of a record with all its files, the record last."""
    for entry in record.parent.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != record:
            entry.unlink()
    record.unlink(missing_ok=True)
    record.parent.rmdir()


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is whole or absent even after a crash of the process or host."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.rename(path)
    for directory in (path.parent, path.parent.parent):
        sync_directory(directory)
