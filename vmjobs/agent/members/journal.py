"""Members on this node, on disk: one directory each, with its record; and the share as last heard.

A record is durable before what it speaks of is made. A ``kill -9`` leaves:

====================================  =======================================================
killed after                          what a restarted agent finds and does
====================================  =======================================================
``mkdir``                             a directory without record: removed
record written, STAGING               no machine; the image is fetched again
record written, BOOTING               perhaps a machine: watched if there is one, else a failure
machine started, RUNNING, DRAINING    the machine: its endpoint is served again, it is watched on;
                                      the guest is told again what it may not have heard
record written, STOPPING              the machine or its remains: destroyed
machine destroyed                     the same; destroying it again is no error
record written, WAITING or GONE       disks of the last machine, perhaps: removed
forgotten, contents removed           record alone: no machine; removed if the service agrees
====================================  =======================================================

A machine whose name is not in any record was started by nobody: it is destroyed. A record that another
release has written, and this one does not understand, stays as it is, and so does its machine.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from vmjobs.agent.journal import machine_prefix, sweep_unknown, write_durably
from vmjobs.agent.members.record import Aside, Record
from vmjobs.cluster.wire import NodeShare
from vmjobs.hypervisor.base import Hypervisor
from vmjobs.model import HypervisorKind

log = logging.getLogger(__name__)

RECORD = "record.json"
SHARE = "share.json"
MACHINE = "machine"
KEPT = "disks"


class MemberPlace:
    """Where things of one member are."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: The present machine's disks, and what else goes with it.
        self.machine = directory / MACHINE
        self.record = directory / RECORD
        #: Disks that outlive machines, where the member's do (:mod:`vmjobs.agent.members.kept_disks`).
        self.kept = directory / KEPT

    def console(self, incarnation: int) -> Path:
        """The serial console of one of its machines, and what its script prints."""
        return self.directory / f"console-{incarnation}"

    def clear(self) -> None:
        """Remove what goes with a machine. The consoles of the last stay."""
        if self.machine.exists():
            shutil.rmtree(self.machine)

    def begin(self, incarnation: int) -> None:
        """Make room for a new machine; of the consoles the last one before stays."""
        self.clear()
        kept = self.console(incarnation - 1).name
        for path in self.directory.glob("console-*"):
            if path.name.partition(".")[0] != kept:
                path.unlink()
        self.machine.mkdir(mode=0o700)


class MemberJournal:
    """The members below one root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.prefix = machine_prefix(root)

    def machine_name(self, member: str, incarnation: int) -> str:
        """The name of one of a member's machines: at most 63 characters."""
        return f"{self.prefix}{member}-{incarnation}"

    def place(self, member: str) -> MemberPlace:
        """Where the things of a member are."""
        return MemberPlace(self.root / member)

    def write(self, record: Record) -> None:
        """Keep a record; it is durable when this returns."""
        place = self.place(record.order.id)
        place.directory.mkdir(mode=0o700, exist_ok=True)
        write_durably(place.record, record.model_dump_json().encode())

    def forget(self, member: str) -> None:
        """Remove all that is left of a member, its record last."""
        place = self.place(member)
        if not place.directory.exists():
            return
        for entry in place.directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != place.record:
                entry.unlink()
        place.record.unlink(missing_ok=True)
        place.directory.rmdir()

    def has_members(self) -> bool:
        """Whether anything is kept of any, be it understood or not."""
        return any(self.root.glob(f"*/{RECORD}"))

    def load(self) -> list[Record]:
        """The records that are understood. A directory without one is removed."""
        found = []
        for directory in sorted(path for path in self.root.iterdir() if path.is_dir()):
            record = _read(directory / RECORD)
            if record is None:
                shutil.rmtree(directory)
            elif isinstance(record, Record):
                found.append(record)
        return found

    def aside(self) -> list[Aside]:
        """What is known of the other records."""
        paths = sorted(self.root.glob(f"*/{RECORD}"))
        return [record for path in paths if isinstance(record := _read(path), Aside)]

    def clear(self, drivers: Mapping[HypervisorKind, Hypervisor]) -> int:
        """Remove all members and their machines; how many there were."""
        sweep_unknown(self.prefix, (), drivers)
        directories = [path for path in self.root.iterdir() if path.is_dir()]
        for directory in directories:
            self.forget(directory.name)
        (self.root / SHARE).unlink(missing_ok=True)
        return len(directories)

    def keep_share(self, share: NodeShare) -> None:
        """Remember the share, for a time without the service."""
        write_durably(self.root / SHARE, share.model_dump_json().encode())

    def last_share(self) -> NodeShare | None:
        """The share as it was heard last; None: never, or it cannot be read any more."""
        try:
            return NodeShare.model_validate_json((self.root / SHARE).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            log.error("%s is not a node's share; the service is asked: %s", self.root / SHARE, error)
            return None

    def sweep(self, records: list[Record], drivers: Mapping[HypervisorKind, Hypervisor]) -> list[str]:
        """Destroy machines that no record names. Returns their names."""
        left_alone = tuple(f"{self.prefix}{record.id}-" for record in self.aside())
        return sweep_unknown(
            self.prefix, _Known({record.machine for record in records}, left_alone), drivers
        )


@dataclass(frozen=True)
class _Known:
    """Names of machines: these, and those that begin like that."""

    names: set[str]
    beginnings: tuple[str, ...]

    def __contains__(self, name: object) -> bool:
        return name in self.names or (isinstance(name, str) and name.startswith(self.beginnings))


def _read(path: Path) -> Record | Aside | None:
    try:
        content = path.read_bytes()
        return Record.model_validate_json(content)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        fault = error
    try:
        data = json.loads(content)
    except ValueError:
        data = None
    if not isinstance(data, dict) or "order" not in data:
        # No release has written that. Its machine has no record then, and is destroyed.
        log.error("%s cannot be read and is removed: %s", path, fault)
        return None
    log.error("%s is not understood; it and its machine are left alone: %s", path, fault)
    return Aside.model_validate({**data, "id": path.parent.name})
