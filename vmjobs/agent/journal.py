"""The agent's journal: what exists on this node on behalf of a run, written before it is made.

Everything a run makes lies in its own directory; only the machine itself lives outside of it.
So one small record, durable before anything else, is enough to know what to remove:

====================================  =======================================================
killed after                          what a restarted agent finds and does
====================================  =======================================================
``mkdir``                             a directory without record: no machine was ever started
record written                        a record: destroy the machine by name, remove the rest
verdict written                       the same, and the verdict is kept for whoever asks again
other machine written                 the same, with that one
machine destroyed                     the same; destroying it again is no error
contents removed                      record alone: the same
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
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from vmjobs.durable import sync_directory
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import probe
from vmjobs.hypervisor.base import NAME_PREFIX, Hypervisor
from vmjobs.model import HypervisorKind

log = logging.getLogger(__name__)

RECORD = "run.json"
VERDICT = "verdict.json"
#: The hypervisor and the name of the run's machine, where they are not the record's.
MACHINE = "machine.json"


@dataclass(frozen=True)
class RunRecord:
    """What must be known to undo a run."""

    attempt: str
    job: str
    machine: str
    hypervisor: HypervisorKind


@dataclass(frozen=True)
class Leftover:
    """A run that an earlier process did not end; ``verdict`` is ``""`` if it had none yet."""

    record: RunRecord
    verdict: str


def machine_prefix(root: Path) -> str:
    """What the names of a journal's machines begin with: no other journal's on this node do."""
    return f"{NAME_PREFIX}{hashlib.sha256(bytes(root.resolve())).hexdigest()[:8]}-"


class Journal:
    """Run directories below one root, each with its record."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.prefix = machine_prefix(root)
        self._reassigned: dict[str, tuple[str, Hypervisor]] = {}

    def machine_name(self, attempt: str) -> str:
        """The name of an attempt's machine."""
        return f"{self.prefix}{attempt}"

    def directory(self, attempt: str) -> Path:
        """Where an attempt's files are, as long as it runs."""
        return self.root / attempt

    @contextmanager
    def run(self, record: RunRecord, driver: Hypervisor) -> Iterator[Path]:
        """A directory for one run; on leaving, the machine is gone and so is the directory.

        Raises:
            HypervisorError: the machine could not be verified gone. The record stays, and the
                next start of the agent tries again.
        """
        directory = self.directory(record.attempt)
        with self._exclusive():
            alive = _begin(directory, record)
        with alive:
            try:
                yield directory
            finally:
                name, driver = self._reassigned.pop(record.attempt, (record.machine, driver))
                self._remove(directory, name, driver)

    def reassign(self, attempt: str, machine: str, driver: Hypervisor) -> None:
        """The run's machine, not started yet, will be another one than its record says."""
        text = json.dumps({"machine": machine, "hypervisor": driver.kind.value})
        write_durably(self.root / attempt / MACHINE, text.encode())
        self._reassigned[attempt] = (machine, driver)

    def conclude(self, attempt: str, verdict: str) -> None:
        """Keep a run's verdict (JSON): all that is left to do is to tell it."""
        write_durably(self.root / attempt / VERDICT, verdict.encode())

    def recover(self, drivers: Mapping[HypervisorKind, Hypervisor]) -> list[Leftover]:
        """Remove what dead processes left, and say what that was. Runs of the living stay."""
        cleaned = []
        with self._exclusive():
            for directory in sorted(p for p in self.root.iterdir() if p.is_dir()):
                record = _read(directory)
                if record is None:
                    shutil.rmtree(directory)
                elif not _held(directory / RECORD) and (left := self._undo(directory, record, drivers)):
                    cleaned.append(left)
        return cleaned

    def _undo(
        self, directory: Path, record: RunRecord, drivers: Mapping[HypervisorKind, Hypervisor]
    ) -> Leftover | None:
        driver = drivers.get(record.hypervisor)
        if driver is None:
            log.error("run %s needs the %s driver to be undone", record.attempt, record.hypervisor)
            return None
        verdict = _text(directory / VERDICT)
        self._remove(directory, record.machine, driver)
        return Leftover(record, verdict)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One process at a time makes or undoes runs here."""
        with self.root.with_name(f"{self.root.name}.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _remove(self, directory: Path, machine: str, driver: Hypervisor) -> None:
        driver.destroy(machine)
        for entry in directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != RECORD:
                entry.unlink()
        (directory / RECORD).unlink()
        directory.rmdir()


def sweep(journal: Journal, drivers: Mapping[HypervisorKind, Hypervisor]) -> list[str]:
    """Destroy machines of this journal that no record knows. Returns their names."""
    directories = [p for p in journal.root.iterdir() if p.is_dir()]
    known = {journal.machine_name(p.name) for p in directories}
    # One that was saved keeps the name that it had in an earlier run.
    known |= {record.machine for p in directories if (record := _read(p)) is not None}
    return sweep_unknown(journal.prefix, known, drivers)


def sweep_probes(drivers: Mapping[HypervisorKind, Hypervisor]) -> list[str]:
    """Destroy machines of probes whose process was killed. Returns their names."""
    swept = sweep_unknown(probe.PREFIX, probe.Wanted(), drivers)
    probe.remove_folders(Path(tempfile.gettempdir()))
    return swept


def sweep_unknown(
    prefix: str, known: Container[str], drivers: Mapping[HypervisorKind, Hypervisor]
) -> list[str]:
    """Destroy machines whose names begin with ``prefix`` and are not known. Returns their names."""
    swept = []
    for driver in drivers.values():
        for name in _names(driver):
            if name.startswith(prefix) and name not in known:
                driver.destroy(name)
                swept.append(name)
    return swept


def _names(driver: Hypervisor) -> list[str]:
    try:
        return driver.list()
    except HypervisorError as error:
        log.warning("cannot list machines of %s: %s", driver.kind, error)
        return []


def _held(path: Path) -> bool:
    """Whether the process that made this record is alive: it holds a lock on it."""
    with path.open("rb") as record:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""


def _read(directory: Path) -> RunRecord | None:
    """What is known of a run, as of now."""
    text = _text(directory / RECORD)
    if not text:
        return None
    data = json.loads(text) | json.loads(_text(directory / MACHINE) or "{}")
    return RunRecord(data["attempt"], data["job"], data["machine"], HypervisorKind(data["hypervisor"]))


def _begin(directory: Path, record: RunRecord) -> BinaryIO:
    """Make a run's directory with its record: that, held for as long as its process lives."""
    directory.mkdir(mode=0o700)
    try:
        write_durably(directory / RECORD, json.dumps(asdict(record)).encode())
        alive = (directory / RECORD).open("rb")
    except OSError:  # there is no room
        shutil.rmtree(directory, ignore_errors=True)
        raise
    fcntl.flock(alive, fcntl.LOCK_EX)
    return alive


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is whole or absent, whatever happens to this process or machine."""
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
