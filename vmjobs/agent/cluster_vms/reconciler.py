"""Reconciles the cluster VMs of this node with the service's assignment.

One thread plans (:meth:`Reconciler.step`, by :mod:`vmjobs.agent.cluster_vms.plan`). Slow actions
(fetching an image, booting, destroying) run in separate threads and return as events. VMs run on
without the agent, and the agent without the service: both may stop and return.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from vmjobs.agent.background import StoppableLoop, start_thread
from vmjobs.agent.cluster_vms.assignment_poller import AssignmentPoller
from vmjobs.agent.cluster_vms.observations import (
    ActionFinished,
    ClusterVmEvent,
    ObservedState,
    VmDestroyed,
)
from vmjobs.agent.cluster_vms.plan import DRAIN_SIGNAL, VmAction, plan_vm
from vmjobs.agent.cluster_vms.record import ClusterVmRecord
from vmjobs.agent.cluster_vms.services import ClusterVmServices
from vmjobs.agent.cluster_vms.ssh_sessions import SshSessionHandler
from vmjobs.agent.cluster_vms.vm_end import VmEnd, end_by_error
from vmjobs.agent.cluster_vms.vm_instance import VmInstance
from vmjobs.agent.guest.ssh_relay import SshSession
from vmjobs.cluster.vm_state import ClusterVmCode, Phase
from vmjobs.cluster.wire import Assignment, ClusterVmOrder
from vmjobs.errors import LoginUnavailable, VMJobsError

log = logging.getLogger(__name__)

#: Seconds until the next step of a cluster VM whose record could not be stored.
RETRY_SECONDS = 10.0
#: Phases in which a VM may exist.
_VM_PHASES = frozenset({Phase.BOOTING, Phase.RUNNING, Phase.DRAINING, Phase.STOPPING})


@dataclass
class ManagedVm:
    """A cluster VM in memory. blocked: its last report is that of an error."""

    record: ClusterVmRecord
    observed: ObservedState = field(default_factory=ObservedState)
    instance: VmInstance | None = None
    blocked: bool = False


_ThreadAction = Callable[[], ClusterVmEvent | None]


class Reconciler(StoppableLoop):
    """Reconciles a node's cluster VMs. All but :meth:`step` may be called from any thread.

    clock: returns seconds since 1970, monotonic while the process lives.
    """

    def __init__(self, services: ClusterVmServices, clock: Callable[[], float] | None = None) -> None:
        super().__init__()
        self._services = services
        self._reporter = services.reporter
        self._clock = clock or steady_clock()
        self._vms: dict[str, ManagedVm] = {}
        #: Cluster VMs with records of another release: left alone.
        self._incompatible: set[str] = set()
        self._assignment: Assignment | None = None
        #: Whether the assignment came from the service since the start, not only from disk.
        self._confirmed = False
        self._events: queue.SimpleQueue[tuple[str, int, ClusterVmEvent]] = queue.SimpleQueue()
        self._assignments: queue.SimpleQueue[Assignment] = queue.SimpleQueue()

    # ------------------------------------------------------------------ from outside

    @property
    def seen(self) -> int:
        """The revision of the present assignment."""
        return self._assignment.revision if self._assignment is not None else 0

    def accept(self, assignment: Assignment) -> None:
        self._assignments.put(assignment)
        self.wake()

    def put_event(self, vm_id: str, incarnation: int, event: ClusterVmEvent) -> None:
        self._events.put((vm_id, incarnation, event))
        self.wake()

    def open_session(self, vm_id: str, incarnation: int, key: str, seconds: float) -> SshSession:
        """Open an SSH session in a cluster VM for the holder of ``key``, an OpenSSH public key.

        Raises:
            LoginUnavailable: the guest does not open one.
        """
        found = self._vms.get(vm_id)
        if found is None or found.instance is None or found.record.incarnation != incarnation:
            raise LoginUnavailable(f"its node does not run VM {incarnation} of it")
        return found.instance.open_session(key, seconds)

    def instance(self, vm_id: str) -> VmInstance | None:
        """Return a cluster VM's present instance; None: it has none, or is unknown here."""
        found = self._vms.get(vm_id)
        return found.instance if found is not None and found.record.phase in _VM_PHASES else None

    # ------------------------------------------------------------------ the loop

    def recover(self) -> None:
        """Adopt the cluster VMs of an earlier agent, and destroy unknown VMs."""
        journal, now = self._services.journal, self._clock()
        records = journal.load()
        for record in records:
            self._vms[record.order.id] = self._adopted(record, now)
            self._reporter.tell(record.report())
        for incompatible in journal.incompatible():
            self._incompatible.add(incompatible.id)
            self._reporter.tell(incompatible.report(journal.paths(incompatible.id).record, now))
        destroyed_names = journal.destroy_unknown(records, self._services.drivers)
        self._assignment = journal.load_assignment()
        log.info("%d cluster VMs, %d unknown VMs removed", len(records), len(destroyed_names))

    def run(self) -> None:
        """Step until :meth:`stop` is called. The VMs run on."""
        while not self._stopped:
            until = self.step(self._clock())
            self._await_wake(None if until == math.inf else max(0.0, until - self._clock()))
        instances = [vm.instance for vm in self._vms.values() if vm.instance is not None]
        with ThreadPoolExecutor(max_workers=max(1, len(instances))) as pool:
            list(pool.map(VmInstance.stop_serving, instances))

    def step(self, now: float) -> float:
        """Process events, plan and act; return the time of the next step. Never sleeps."""
        self._take_assignment()
        self._take_events()
        orders = self._orders(now)
        until = math.inf
        for name in list(self._vms):
            try:
                until = min(until, self._plan(name, orders.get(name), now))
            except Exception as error:  # an error of one cluster VM must not affect the others
                full = isinstance(error, OSError)
                log.error("member %s: retry in %g s: %s", name, RETRY_SECONDS, error, exc_info=not full)
                self._report_error(self._vms[name], error)
                until = min(until, now + RETRY_SECONDS)
            else:
                self._report_recovery(name)
        return until

    def _report_error(self, vm: ManagedVm, error: Exception) -> None:
        """Report an error that blocks a cluster VM; its record cannot contain it."""
        end = end_by_error(error)
        if isinstance(error, OSError):
            end = VmEnd(ClusterVmCode.NODE_FAILED, f"its record cannot be stored: {error}")
        self._reporter.tell(vm.record.blocked(end))
        vm.blocked = True

    def _report_recovery(self, name: str) -> None:
        vm = self._vms.get(name)
        if vm is not None and vm.blocked:
            self._reporter.tell(vm.record.report())
            vm.blocked = False

    def _take_assignment(self) -> None:
        with suppress(queue.Empty):
            while True:
                assignment = self._assignments.get_nowait()
                if assignment != self._assignment:
                    self._store_assignment(assignment)
                self._assignment, self._confirmed = assignment, True

    def _store_assignment(self, assignment: Assignment) -> None:
        try:
            self._services.journal.store_assignment(assignment)
        except OSError as error:  # it is in memory, and the service sends it again after a restart
            log.error("the assignment of this node cannot be stored: %s", error)

    def _take_events(self) -> None:
        with suppress(queue.Empty):
            while True:
                name, incarnation, event = self._events.get_nowait()
                vm = self._vms.get(name)
                if vm is not None and vm.record.incarnation == incarnation:
                    vm.observed = vm.observed.with_event(event, self._clock())

    def _orders(self, now: float) -> dict[str, ClusterVmOrder]:
        """Return the order of each cluster VM, and add new ones to the reconciler."""
        assignment = self._assignment.members if self._assignment else ()
        orders = {order.id: order for order in assignment if order.id not in self._incompatible}
        for name, order in orders.items():
            if name not in self._vms:
                self._vms[name] = ManagedVm(ClusterVmRecord(order=order, since=now))
        if not self._confirmed:
            for name, vm in self._vms.items():
                orders.setdefault(name, vm.record.order)
        return orders

    # ------------------------------------------------------------------ decisions

    def _plan(self, name: str, order: ClusterVmOrder | None, now: float) -> float:
        vm = self._vms[name]
        vm_plan = plan_vm(order, vm.record, vm.observed, now)
        record = vm_plan.record
        if VmAction.STAGE in vm_plan.effects and record.incarnation != vm.record.incarnation:
            record = self._new_incarnation(vm, record)
        if VmAction.FORGET in vm_plan.effects:
            self._forget(name)
            return math.inf
        if record != vm.record:
            self._store_record(vm, record)
        vm.observed = replace(vm.observed, renewed=0.0)  # only after it was stored
        if vm.observed.destroyed:
            vm.observed, vm.instance = ObservedState(), None
        for action in vm_plan.effects:
            self._act(vm, action)
        return vm_plan.until

    def _new_incarnation(self, vm: ManagedVm, record: ClusterVmRecord) -> ClusterVmRecord:
        """Prepare a new incarnation: its name, and the secrets of its guest."""
        vm.observed, vm.instance = ObservedState(), None
        return record.with_changes(
            machine=self._services.journal.vm_name(record.order.id, record.incarnation),
            token=secrets.token_urlsafe(32),
            sentinel=secrets.token_hex(16),
        )

    def _store_record(self, vm: ManagedVm, record: ClusterVmRecord) -> None:
        self._services.journal.write(record)
        before, vm.record = vm.record, record
        if record.report() != before.report():
            self._reporter.tell(record.report())
        if record.phase is not before.phase:
            who = record.order.name
            log.info("member %s (%d): %s %s", who, record.incarnation, record.phase, record.code)
        begins = record.phase is Phase.RUNNING and before.phase is not Phase.RUNNING
        if begins and vm.instance is not None:
            vm.instance.expect_heartbeats()

    def _forget(self, name: str) -> None:
        self._services.console_uploader.forget(name)
        self._services.journal.forget(name)
        self._reporter.forget(name)
        del self._vms[name]

    def _act(self, vm: ManagedVm, action: VmAction) -> None:
        instance = vm.instance = vm.instance or self._new_instance(vm.record)
        if action is VmAction.STAGE:
            self._run_in_thread(vm, "stage", instance.stage)
        elif action is VmAction.BOOT:
            record = vm.record
            self._run_in_thread(vm, "boot", lambda: instance.boot(record))
        elif action is VmAction.DESTROY:
            self._run_in_thread(vm, "destroy", instance.destroy, VmDestroyed)
        elif action is VmAction.RENEW:
            start_thread(f"renew-{vm.record.order.name}", instance.renew)
        elif action is VmAction.ABORT:
            instance.end_requested.set()
        elif action is VmAction.TELL_ADMITTED:
            instance.signal(self._services.settings.admit_signal)
        elif action is VmAction.TELL_DRAIN:
            instance.signal(DRAIN_SIGNAL)

    def _new_instance(self, record: ClusterVmRecord) -> VmInstance:
        tell = partial(self.put_event, record.order.id, record.incarnation)
        return VmInstance(self._services, record.order, record.incarnation, tell)

    def _run_in_thread(
        self,
        vm: ManagedVm,
        what: str,
        action: _ThreadAction,
        finished: type[ActionFinished | VmDestroyed] = ActionFinished,
    ) -> None:
        """Run an action in a separate thread; its result becomes an event of the VM.

        finished: the event if the action returns none, or fails.
        """
        record = vm.record

        def work() -> None:
            event: ClusterVmEvent
            try:
                event = action() or finished()
            except Exception as error:  # of any kind: the cluster VM is tried again
                known = isinstance(error, VMJobsError | OSError)
                log.warning("member %s: %s: %s", record.order.name, what, error, exc_info=not known)
                event = finished(end_by_error(error))
            self.put_event(record.order.id, record.incarnation, event)

        start_thread(f"{what}-{record.order.name}", work)
        # Its event is processed only in a later step.
        vm.observed = replace(vm.observed, working=True)

    # ------------------------------------------------------------------ after a restart

    def _adopted(self, record: ClusterVmRecord, now: float) -> ManagedVm:
        vm = ManagedVm(record)
        if record.phase not in _VM_PHASES:
            if record.phase is not Phase.STAGING:
                self._services.journal.paths(record.order.id).clear()
            return vm
        instance = vm.instance = self._new_instance(record)
        instance.name = record.machine
        driver = self._services.drivers.get(record.hypervisor) if record.hypervisor else None
        if driver is None:
            message = f"the hypervisor {record.hypervisor} is no longer set up on this node"
            vm.observed = ObservedState(end=VmEnd(ClusterVmCode.NO_HYPERVISOR, message))
            return vm
        instance.driver = driver
        if record.phase is Phase.STOPPING:
            return vm
        if record.phase is Phase.BOOTING:
            vm.record = record.with_changes(deadline=now + record.order.boot_seconds)
        try:
            instance.adopt(record, driver)
        except (VMJobsError, OSError) as error:
            log.error("member %s cannot be adopted: %s", record.order.name, error)
            vm.observed = ObservedState(end=end_by_error(error))
            return vm
        start_thread(f"hold-{record.order.name}", instance.lease_image)
        self._repeat_signals(instance, record)
        return vm

    def _repeat_signals(self, instance: VmInstance, record: ClusterVmRecord) -> None:
        """Send signals again that the guest may have missed when the earlier agent ended."""
        if record.phase is not Phase.BOOTING:
            instance.expect_heartbeats()
        if record.admitted:
            instance.signal(self._services.settings.admit_signal)
        if record.phase is Phase.DRAINING:
            instance.signal(DRAIN_SIGNAL)


def steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that ignores changes of the system clock."""
    epoch = time.time() - time.monotonic()
    return lambda: epoch + time.monotonic()


@contextmanager
def running_reconciler(services: ClusterVmServices) -> Iterator[Reconciler]:
    """Run this node's reconciler while the context lasts. The cluster VMs run on after it."""
    reconciler = Reconciler(services)
    reconciler.recover()
    ssh_sessions = (
        SshSessionHandler(services.sessions, reconciler.open_session)
        if services.sessions is not None
        else None
    )

    def accept(assignment: Assignment) -> None:
        reconciler.accept(assignment.model_copy(update={"sessions": ()}))
        if ssh_sessions is not None:
            ssh_sessions.accept(assignment.sessions)

    assignment_poller = AssignmentPoller(services.source, reconciler.seen, accept)
    loop = threading.Thread(target=reconciler.run, name="cluster-vms", daemon=True)
    loop.start()
    start_thread("assignments", assignment_poller.run)
    start_thread("cluster-vm-reports", services.reporter.run)
    start_thread("cluster-vm-consoles", services.console_uploader.run)
    try:
        yield reconciler
    finally:
        assignment_poller.stop()
        services.reporter.stop()
        services.console_uploader.stop()
        reconciler.stop()
        loop.join(timeout=15.0)
