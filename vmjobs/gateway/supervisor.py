"""Supervises the VMs of one gateway: the agent's reconciler, controlled by the operator.

VMs and their private network keep running without a supervisor, and the next one adopts them.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from pydantic import TypeAdapter

from vmjobs.agent.cluster_vms.observations import RestartRequested
from vmjobs.agent.cluster_vms.reconciler import Reconciler, running_reconciler
from vmjobs.agent.cluster_vms.services import ClusterVmServices
from vmjobs.agent.cluster_vms.vm_instance import VmInstance
from vmjobs.cluster.ssh_session import PublicKey
from vmjobs.cluster.wire import ClusterVmOrder, PoolToken
from vmjobs.errors import InvalidRequest, VMJobsError
from vmjobs.gateway.assignments import GatewayAssignments
from vmjobs.gateway.control import Message, serve_commands
from vmjobs.gateway.directory import (
    GatewayDirectory,
    InstalledGateway,
    mac_address,
    network_files,
    vm_id,
)
from vmjobs.gateway.spec import Gateway, GatewayVm
from vmjobs.hypervisor.base import PrivateCard, PrivateNetwork
from vmjobs.model import PublishedPort

log = logging.getLogger(__name__)

_KEY_ADAPTER: TypeAdapter[str] = TypeAdapter(PublicKey)

FREEZE_SIGNAL = signal.SIGUSR1
#: Also makes the script report its status and request a new token; harmless at any time.
THAW_SIGNAL = signal.SIGUSR2
#: Time for a guest to freeze its data, in seconds.
FREEZE_SECONDS = 20.0
#: Time for a guest to open an SSH connection, in seconds.
LOGIN_SECONDS = 20.0


class RoleFiles(Protocol):
    """Files for the guests of a gateway's VMs, by role: made by ``condor/``.

    The guest program runs ``script`` as root for the VM's whole life. The other files are in its
    directory, with three that every role gets from the supervisor: ``address`` (of the private network
    interface, like ``10.77.0.10/24``), ``host`` (the VM's full host name) and ``hosts`` (lines for
    /etc/hosts, of all VMs). /job and the root disk survive restarts.

    The script traps its signals first. It prints a line ``vmjobs-gateway: up`` once its service
    answers, ``vmjobs-gateway: down REASON`` when it no longer does, and may print
    ``vmjobs-gateway: full PERCENT`` of /job. SIGUSR1: freeze the data on /job, print
    ``vmjobs-gateway: frozen``; it thaws by itself after 60 s. SIGUSR2: thaw if frozen, print
    ``vmjobs-gateway: thawed``, and then again whether it is up or down. SIGTERM: shut down cleanly, end
    with status 0.
    """

    def secrets(self, gateway: Gateway) -> Mapping[str, bytes]:
        """Keys and other secrets, by file name: made once, stored only on the gateway's host."""

    def files(
        self, gateway: Gateway, vm: GatewayVm, secrets: Mapping[str, bytes]
    ) -> Mapping[str, bytes]:
        """Contents by name; ``script`` is one of them. secrets: those of this gateway."""

    def token(self, gateway: Gateway, vm: GatewayVm, secrets: Mapping[str, bytes]) -> PoolToken:
        """A token for a VM, which it requests with ``GET /v1/token`` from its guest endpoint.

        The VM gets SIGUSR2 after half of the token's lifetime, to request a new one.

        Raises:
            Forbidden: VMs of this role have no token.
        """

    def person_token(self, gateway: Gateway, person: str, secrets: Mapping[str, bytes]) -> PoolToken:
        """A token for one of the gateway's people, for use on another host.

        Raises:
            NotFound: there is no such person, or nothing that accepts a token.
        """


@dataclass(frozen=True)
class VmFiles:
    """The files for each VM's guest, by its role (a ``GuestFiles``). secrets: the present ones."""

    installed: InstalledGateway
    kit: RoleFiles
    secrets: Callable[[], Mapping[str, bytes]]

    def files(self, order: ClusterVmOrder, incarnation: int) -> Mapping[str, bytes]:
        gateway, vm = self.installed.gateway, self._vm(order.name)
        return {**self.kit.files(gateway, vm, self.secrets()), **network_files(gateway, vm)}

    def token(self, name: str) -> PoolToken:
        """A new token for a VM. Raises as :meth:`vmjobs.gateway.supervisor.RoleFiles.token`."""
        return self.kit.token(self.installed.gateway, self._vm(name), self.secrets())

    def _vm(self, name: str) -> GatewayVm:
        vm = self.installed.gateway.vm(name)
        if vm is None:
            raise InvalidRequest(f"gateway {self.installed.gateway.name}: there is no VM {name}")
        return vm


class Supervisor:
    """Supervises the VMs of a gateway.

    make: creates the reconciler's parts from the assignments and the guests' files.
    exits_when_idle: the command ``idle``, which reports that no VM is left, ends the supervisor.
    """

    def __init__(
        self,
        place: GatewayDirectory,
        kit: RoleFiles,
        make: Callable[[GatewayAssignments, VmFiles], ClusterVmServices],
        *,
        exits_when_idle: bool = False,
    ) -> None:
        self._exits_when_idle = exits_when_idle
        self.place = place
        self.installed = place.installed()
        self.stop = threading.Event()
        files = VmFiles(self.installed, kit, place.secrets)
        self.assignments = GatewayAssignments(place, self.installed, mint=files.token)
        self._parts = replace(make(self.assignments, files), words=self.assignments.words)
        self._reconciler: Reconciler | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Supervise the VMs, and answer commands, while the context lasts."""
        with closing(self._open_network()) as network, self._run_reconciler(network) as reconciler:
            self._reconciler = reconciler
            self.assignments.on_restart = lambda vm, number: reconciler.put_event(
                vm, number, RestartRequested()
            )
            for _, vm in self._vms():
                vm.signal(THAW_SIGNAL)
            with serve_commands(self.place.control, self.handle, self._thaw):
                try:
                    yield
                finally:
                    self.stop.set()
                    self.assignments.close()

    def handle(self, asked: Message) -> Message:
        """Execute a command; returns the answer."""
        match asked.get("do"):
            case "show":
                return self.assignments.show(int(asked.get("seen", -1)), float(asked.get("wait", 0)))
            case "want" | "restart" as word:
                if word == "want":
                    self.assignments.set_wanted(set(asked.get("run", ())), set(asked.get("stop", ())))
                else:
                    self.assignments.restart(set(asked.get("vms", ())))
                return {"revision": self.assignments.revision}
            case "freeze" | "thaw" as word:
                return self._freeze() if word == "freeze" else self._thaw()
            case "log in":
                return self._log_in(str(asked.get("machine")), str(asked.get("key")))
            case "quit" | "idle" as word:
                if word == "quit" or self._exits_when_idle:
                    self.stop.set()
                return {}
        return {"error": f"unknown command {asked.get('do')!r}"}

    def _log_in(self, name: str, key: str) -> Message:
        """Open a connection to the VM's SSH server, which accepts the key."""
        vm = dict(self._vms()).get(name)
        if vm is None:
            raise InvalidRequest(f"{name} is not running", hint=f"vmjobs gateway boot {name}")
        session = vm.open_session(_KEY_ADAPTER.validate_python(key), LOGIN_SECONDS)
        return {"host_key": session.host_key, "connection": session.connection}

    def _vms(self) -> list[tuple[str, VmInstance]]:
        if self._reconciler is None:
            return []
        found = [
            (m.name, self._reconciler.instance(vm_id(m.name))) for m in self.installed.gateway.machines
        ]
        return [(name, vm) for name, vm in found if vm is not None]

    def _freeze(self) -> Message:
        """Freeze every VM's data, and then pause the VMs."""
        vms = self._vms()
        for _, vm in vms:
            self.assignments.clear_frozen(vm.order.id)
            vm.signal(FREEZE_SIGNAL)
        with ThreadPoolExecutor(max_workers=max(1, len(vms))) as pool:
            asked = [
                pool.submit(self.assignments.is_frozen, m.order.id, FREEZE_SECONDS) for _, m in vms
            ]
            frozen = [name for (name, _), answer in zip(vms, asked, strict=True) if answer.result()]
        for _, vm in vms:
            vm.pause()
        return {
            "frozen": frozen,
            "paused": [name for name, _ in vms],
            "incarnations": self._incarnations(),
        }

    def _thaw(self) -> Message:
        faults = []
        for name, vm in self._vms():
            try:
                vm.resume()
                vm.signal(THAW_SIGNAL)
            except VMJobsError as error:
                log.error("cannot resume %s: %s", name, error)
                faults.append(f"{name}: {error.message}")
        return {"faults": faults, "incarnations": self._incarnations()}

    def _incarnations(self) -> Message:
        return {name: record.incarnation for name, record in self.place.records().items()}

    def _open_network(self) -> PrivateNetwork:
        """Open the private network of the running VMs, or a new one."""
        driver = self._parts.drivers[self.installed.kind]
        running = [record.machine for record in self.place.records().values() if record.machine]
        return driver.open_private_network(running)

    def _run_reconciler(self, network: PrivateNetwork) -> AbstractContextManager[Reconciler]:
        def card(order: ClusterVmOrder) -> PrivateCard | None:
            vm = self.installed.gateway.vm(order.name)
            return None if vm is None else PrivateCard(network, mac_address(vm))

        def published(order: ClusterVmOrder) -> tuple[PublishedPort, ...]:
            vm = self.installed.gateway.vm(order.name)
            return () if vm is None else vm.publish

        return running_reconciler(replace(self._parts, card=card, published=published))
