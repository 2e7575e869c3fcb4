"""Stores on disk the records of this node's cluster VMs, and the node's assignment.

Each cluster VM has a directory. Its record is durable before anything it names is made. A ``kill -9``
leaves:

====================================  =======================================================
killed after                          what a restarted agent finds and does
====================================  =======================================================
``mkdir``                             a directory without record: removed
record written, STAGING               no VM; the image is fetched again
record written, BOOTING               perhaps a VM: watched if there is one, else a failure
VM started, RUNNING, DRAINING         the VM: its endpoint is served again, it is watched further;
                                      signals that the guest may have missed are sent again
record written, STOPPING              the VM or its remains: destroyed
VM destroyed                          the same; destroying it again is no error
record written, WAITING or GONE       perhaps disks of the last VM: removed
forgotten, contents removed           record alone: no VM; removed if the service agrees
====================================  =======================================================

The agent destroys VMs that no record names. A record of another release that this one cannot parse
stays as it is, and so does its VM.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from vmjobs.agent.cluster_vms.record import ClusterVmRecord, IncompatibleRecord
from vmjobs.agent.journal import VmJournal, remove_directory, sweep_unknown, write_durably
from vmjobs.cluster.wire import Assignment
from vmjobs.hypervisor.base import Hypervisor
from vmjobs.model import HypervisorKind

log = logging.getLogger(__name__)

RECORD = "record.json"
ASSIGNMENT = "share.json"
VM_DIRECTORY = "machine"
PERSISTENT_DISKS = "disks"


class ClusterVmPaths:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: Disks and other files of the present incarnation, removed with it.
        self.vm_directory = directory / VM_DIRECTORY
        self.record = directory / RECORD
        #: Disks that persist over incarnations, if any (:mod:`.persistent_disks`).
        self.kept = directory / PERSISTENT_DISKS

    def console(self, incarnation: int) -> Path:
        """Return the file of an incarnation's serial console and its script's output."""
        return self.directory / f"console-{incarnation}"

    def clear(self) -> None:
        """Remove the files of the present incarnation, but not its console."""
        if self.vm_directory.exists():
            shutil.rmtree(self.vm_directory)

    def begin(self, incarnation: int) -> None:
        """Prepare the directory of a new incarnation; keep only the previous one's console."""
        self.clear()
        kept = self.console(incarnation - 1).name
        for path in self.directory.glob("console-*"):
            if path.name.partition(".")[0] != kept:
                path.unlink()
        self.vm_directory.mkdir(mode=0o700)


class ClusterVmJournal(VmJournal):
    def vm_name(self, vm_id: str, incarnation: int) -> str:
        """Return the hypervisor's name for an incarnation: at most 63 characters."""
        return f"{self.prefix}{vm_id}-{incarnation}"

    def paths(self, vm_id: str) -> ClusterVmPaths:
        return ClusterVmPaths(self.root / vm_id)

    def write(self, record: ClusterVmRecord) -> None:
        """Store a record; it is durable on return."""
        paths = self.paths(record.order.id)
        paths.directory.mkdir(mode=0o700, exist_ok=True)
        write_durably(paths.record, record.model_dump_json().encode())

    def forget(self, vm_id: str) -> None:
        """Remove all files of a cluster VM, its record last."""
        paths = self.paths(vm_id)
        if paths.directory.exists():
            remove_directory(paths.record)

    def has_records(self) -> bool:
        """Whether there is any record, readable or not."""
        return any(self.root.glob(f"*/{RECORD}"))

    def load(self) -> list[ClusterVmRecord]:
        """Return the readable records. Remove directories without one."""
        return [record for _, record in self._load(_read) if isinstance(record, ClusterVmRecord)]

    def incompatible(self) -> list[IncompatibleRecord]:
        """Return the known fields of records written by other releases."""
        found = [_read(directory) for directory in self.directories()]
        return [record for record in found if isinstance(record, IncompatibleRecord)]

    def clear(self, drivers: Mapping[HypervisorKind, Hypervisor]) -> int:
        """Remove all cluster VMs and their files; return how many there were."""
        sweep_unknown(self.prefix, lambda _name: False, drivers)
        directories = self.directories()
        for directory in directories:
            self.forget(directory.name)
        (self.root / ASSIGNMENT).unlink(missing_ok=True)
        return len(directories)

    def store_assignment(self, assignment: Assignment) -> None:
        """Store the assignment, for times when the service is unreachable."""
        write_durably(self.root / ASSIGNMENT, assignment.model_dump_json().encode())

    def load_assignment(self) -> Assignment | None:
        """Return the assignment that was stored last; None: none, or an unreadable one."""
        try:
            return Assignment.model_validate_json((self.root / ASSIGNMENT).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            log.error("%s is ignored, it is not a node's assignment: %s", self.root / ASSIGNMENT, error)
            return None

    def destroy_unknown(
        self, records: list[ClusterVmRecord], drivers: Mapping[HypervisorKind, Hypervisor]
    ) -> list[str]:
        """Destroy VMs that no record names. Return their names."""
        known = {record.machine for record in records}
        left_alone = tuple(f"{self.prefix}{record.id}-" for record in self.incompatible())
        return sweep_unknown(
            self.prefix, lambda name: name in known or name.startswith(left_alone), drivers
        )


def _read(directory: Path) -> ClusterVmRecord | IncompatibleRecord | None:
    path = directory / RECORD
    try:
        content = path.read_bytes()
        return ClusterVmRecord.model_validate_json(content)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        fault = error
    try:
        data = json.loads(content)
    except ValueError:
        data = None
    if not isinstance(data, dict) or "order" not in data:
        # No release writes that. Without a record the VM is destroyed.
        log.error("%s cannot be read and is removed: %s", path, fault)
        return None
    log.error("%s has another release's format; it and its VM are left alone: %s", path, fault)
    return IncompatibleRecord.model_validate({**data, "id": directory.name})
