"""The directory of one gateway, which only its operator can read.

====================  ===========================================================================
``gateway.json``      the installed declaration, image digests and hypervisor; written last
``secrets/``          its keys, one file each
``members/``          its VMs: records, disks, consoles (:mod:`vmjobs.agent.cluster_vms.journal`)
``wanted.json``       names of the VMs that should run
``control``           socket of the supervisor, which holds ``supervisor.lock`` while it runs
====================  ===========================================================================
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError

from vmjobs.agent.cluster_vms import persistent_disks
from vmjobs.agent.cluster_vms.journal import RECORD, ClusterVmJournal
from vmjobs.agent.cluster_vms.record import ClusterVmRecord
from vmjobs.agent.journal import write_durably
from vmjobs.cluster.spec import Lifecycle
from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase
from vmjobs.cluster.wire import ClusterVmOrder, PoolAddress
from vmjobs.errors import Conflict, NotFound
from vmjobs.file_lock import file_lock
from vmjobs.gateway.spec import Gateway, GatewayVm
from vmjobs.model import MIB, Digest, FrozenModel, HypervisorKind
from vmjobs.paths import safe_join

BOOT_SECONDS = 300
DRAIN_SECONDS = 120

_NAMES: TypeAdapter[set[str]] = TypeAdapter(set[str])


class InstalledGateway(FrozenModel):
    """An installed gateway. images: digests, by VM name. kind: the hypervisor of its VMs."""

    schema_: int = Field(default=1, alias="schema")
    gateway: Gateway
    images: dict[str, Digest]
    kind: HypervisorKind


def vm_id(vm: str) -> str:
    """The id of a gateway's VM, made from its name."""
    return hashlib.sha256(vm.encode()).hexdigest()[:32]


class GatewayDirectory:
    """The directory of one gateway."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.control = directory / "control"
        self.vms = directory / "members"
        self.log = directory / "supervisor.log"

    # ------------------------------------------------------------------ installation

    def installed(self) -> InstalledGateway:
        """The gateway that is installed here.

        Raises:
            NotFound: none is installed. Conflict: ``gateway.json`` is damaged.
        """
        try:
            return InstalledGateway.model_validate_json((self.directory / "gateway.json").read_bytes())
        except FileNotFoundError:
            raise NotFound(
                f"no gateway is installed in {self.directory}", hint="vmjobs gateway install FILE"
            ) from None
        except ValidationError as error:
            raise Conflict(f"{self.directory}/gateway.json is damaged: {error}") from error

    def save(self, installed: InstalledGateway) -> None:
        """Store the installed gateway; it is durable when this returns."""
        write_durably(
            self.directory / "gateway.json", installed.model_dump_json(by_alias=True).encode()
        )

    def secrets(self) -> dict[str, bytes]:
        """The gateway's keys, by name."""
        files = sorted((self.directory / "secrets").glob("*"))
        return {path.name: path.read_bytes() for path in files if path.suffix != ".tmp"}

    def save_secrets(self, secrets: Mapping[str, bytes]) -> None:
        """Store keys, unreadable for other users."""
        folder = self.directory / "secrets"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in secrets.items():
            write_durably(safe_join(folder, name), data)

    def remove_secret(self, name: str) -> None:
        """Remove a key, if it is there."""
        safe_join(self.directory / "secrets", name).unlink(missing_ok=True)

    def prepare(self, installed: InstalledGateway, vm: GatewayVm) -> None:
        """Create a VM's empty disk, and its record as stopped, unless it has a record."""
        journal = ClusterVmJournal(self.vms)
        paths = journal.paths(vm_id(vm.name))
        if paths.record.exists():
            return
        paths.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if vm.place is not None and not os.path.lexists(paths.kept):
            name = f"{installed.gateway.name}-{vm.name}-{secrets.token_hex(4)}"
            paths.kept.symlink_to(Path(vm.place) / name)
        disks = paths.kept.readlink() if paths.kept.is_symlink() else paths.kept
        persistent_disks.make(disks, vm_id(vm.name), vm.disk * MIB)
        # Last: a VM with a record would get other disks when it boots.
        journal.write(
            ClusterVmRecord(order=vm_order(installed, vm, Goal.STOP), phase=Phase.GONE, since=0.0)
        )

    def remove(self, vm: str) -> None:
        """Remove all files of a stopped VM; repeated calls are harmless.

        Raises:
            Conflict: its disks are in another place, and missing there.
        """
        if (disks := self.disks(vm)).is_symlink():
            if not (target := disks.readlink()).is_dir():
                raise Conflict(
                    f"the disks of {vm} are missing: {target}",
                    hint=f"mount its file system, or remove {disks} to leave them there",
                )
            shutil.rmtree(target)
        shutil.rmtree(self.vms / vm_id(vm), ignore_errors=True)
        self.save_wanted(self.wanted() - {vm})

    # ------------------------------------------------------------------ state

    def records(self) -> dict[str, ClusterVmRecord]:
        """The VMs' records, by VM name, without damaged ones."""
        found = {}
        for path in sorted(self.vms.glob(f"*/{RECORD}")):
            try:
                record = ClusterVmRecord.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):
                continue
            found[record.order.name] = record
        return found

    def disks(self, vm: str) -> Path:
        return self.vms / vm_id(vm) / "disks"

    def used_bytes(self, vm: str) -> int:
        """Bytes of this host that a VM's disks use."""
        used = 0
        for path in self.disks(vm).glob("*"):
            with suppress(FileNotFoundError):  # an upgrade removes one
                used += path.stat().st_blocks * 512
        return used

    def console(self, vm: str) -> Path | None:
        """The console of a VM's last incarnation; None: the VM never started."""
        record = self.records().get(vm)
        if record is None or record.incarnation == 0:
            return None
        return self.vms / vm_id(vm) / f"console-{record.incarnation}"

    def wanted(self) -> set[str]:
        """Names of the VMs that should run."""
        try:
            return _NAMES.validate_json((self.directory / "wanted.json").read_bytes())
        except (FileNotFoundError, ValidationError):
            return set()

    def save_wanted(self, names: set[str]) -> None:
        write_durably(self.directory / "wanted.json", _NAMES.dump_json(names))

    def lock_supervisor(self, patience: float = 0.0) -> AbstractContextManager[int]:
        """Hold the supervisor lock while the context lasts.

        patience: seconds to wait for the lock, for another supervisor that is about to end.

        Raises:
            Conflict: another supervisor holds it.
        """
        busy = Conflict(f"a supervisor of {self.directory} runs already")
        return file_lock(self.directory / "supervisor.lock", busy, patience)


def vm_order(
    installed: InstalledGateway, vm: GatewayVm, goal: Goal, admitted: int = 0
) -> ClusterVmOrder:
    """A gateway's VM as an order to the agent's reconciler."""
    return ClusterVmOrder(
        id=vm_id(vm.name),
        cluster=installed.gateway.name,
        name=vm.name,
        goal=goal,
        image=installed.images[vm.name],
        cpus=vm.cpus,
        memory=vm.memory,
        disk=vm.disk,
        hypervisor=installed.kind,
        limits=vm.limits,
        pool=PoolAddress(name="", collector="", trust_domain=""),
        lifecycle=Lifecycle.PERSISTENT,
        boot_seconds=BOOT_SECONDS,
        drain_seconds=DRAIN_SECONDS,
        admitted=admitted,
        why=ClusterVmCode.PROGRESS,
    )


def mac_address(vm: GatewayVm) -> str:
    """The MAC address of a VM on the private network, made from its IP address.

    It is locally administered (RFC 7042, section 2.1).
    """
    return "02:76:" + vm.address.packed.hex(":")


def network_files(gateway: Gateway, vm: GatewayVm) -> dict[str, bytes]:
    """Files that describe the private network to a guest (``RoleFiles``)."""
    hosts = [f"{m.address} {gateway.fqdn(m)} {m.name}\n" for m in gateway.machines]
    return {
        "address": f"{vm.address}/{gateway.network.prefixlen}\n".encode(),
        "host": f"{gateway.fqdn(vm)}\n".encode(),
        "hosts": "".join(hosts).encode(),
    }
