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
from dataclasses import dataclass, field

from vmjobs.agent.background import begin
from vmjobs.agent.door import Visit
from vmjobs.agent.inbox import ExitReported, Ready
from vmjobs.agent.members.callers import Callers
from vmjobs.agent.members.listener import Listener
from vmjobs.agent.members.machine import MemberMachine, News, Over, Renewed, TokenRefused, why_not
from vmjobs.agent.members.parts import MemberParts
from vmjobs.agent.members.plan import DRAIN, NEW_TOKEN, Effect, decide
from vmjobs.agent.members.record import End, Facts, Record
from vmjobs.cluster.member import MemberCode, Phase
from vmjobs.cluster.wire import MemberOrder, NodeShare
from vmjobs.errors import NoLogin, VMJobsError
from vmjobs.model import HypervisorKind

log = logging.getLogger(__name__)

#: Seconds until the next step of a cluster VM whose record could not be stored.
TROUBLE_SECONDS = 10.0
#: Phases in which a VM may exist.
_ALIVE = frozenset({Phase.BOOTING, Phase.RUNNING, Phase.DRAINING, Phase.STOPPING})


@dataclass(frozen=True)
class Staged:
    """The image is on this node. kind: the chosen hypervisor; unenforced: limits it ignores."""

    kind: HypervisorKind
    unenforced: str = ""


@dataclass(frozen=True)
class Done:
    """A thread has finished its action. failed: why it failed."""

    failed: End | None = None


@dataclass(frozen=True)
class Destroyed:
    """The VM is verified gone. failed: why it could not be verified."""

    failed: End | None = None


@dataclass(frozen=True)
class Again:
    """Starts a cluster VM that is GONE again, with its persistent disks."""


@dataclass
class Member:
    """A cluster VM in memory. blocked: its last report is that of an error."""

    record: Record
    facts: Facts = field(default_factory=Facts)
    machine: MemberMachine | None = None
    troubled: bool = False


_Heard = News | Staged | Done | Destroyed | Again
_Work = Callable[[], _Heard | None]


class Keeper:
    """Reconciles a node's cluster VMs. All but :meth:`step` may be called from any thread.

    clock: returns seconds since 1970, monotonic while the process lives.
    """

    def __init__(self, parts: MemberParts, clock: Callable[[], float] | None = None) -> None:
        self._parts = parts
        self._reporter = parts.reporter
        self._clock = clock or steady_clock()
        self._members: dict[str, Member] = {}
        #: Cluster VMs with records of another release: left alone.
        self._aside: set[str] = set()
        self._share: NodeShare | None = None
        #: Whether the assignment came from the service since the start, not only from disk.
        self._confirmed = False
        self._heard: queue.SimpleQueue[tuple[str, int, _Heard]] = queue.SimpleQueue()
        self._offered: queue.SimpleQueue[NodeShare] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._due = self._stopped = False

    # ------------------------------------------------------------------ from outside

    @property
    def seen(self) -> int:
        """The revision of the present assignment."""
        return self._share.revision if self._share is not None else 0

    def take(self, share: NodeShare) -> None:
        """Accept an assignment of the service."""
        self._offered.put(share)
        self._wake()

    def hear(self, member: str, incarnation: int, news: _Heard) -> None:
        """Accept an event of a cluster VM."""
        self._heard.put((member, incarnation, news))
        self._wake()

    def knock(self, member: str, incarnation: int, key: str, seconds: float) -> Visit:
        """Open an SSH session in a cluster VM for the holder of ``key``, an OpenSSH public key.

        Raises:
            NoLogin: the guest does not open one.
        """
        found = self._members.get(member)
        if found is None or found.machine is None or found.record.incarnation != incarnation:
            raise NoLogin(f"its node does not run VM {incarnation} of it")
        return found.machine.knock(key, seconds)

    def machine(self, member: str) -> MemberMachine | None:
        """Return a cluster VM's present instance; None: it has none, or is unknown here."""
        found = self._members.get(member)
        return found.machine if found is not None and found.record.phase in _ALIVE else None

    def stop(self) -> None:
        """Make :meth:`run` return. The VMs run on."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._due = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ the loop

    def recover(self) -> None:
        """Adopt the cluster VMs of an earlier agent, and destroy unknown VMs."""
        journal, now = self._parts.journal, self._clock()
        records = journal.load()
        for record in records:
            self._members[record.order.id] = self._recovered(record, now)
            self._reporter.tell(record.report())
        for aside in journal.aside():
            self._aside.add(aside.id)
            self._reporter.tell(aside.report(journal.place(aside.id).record, now))
        swept = journal.sweep(records, self._parts.drivers)
        self._share = journal.last_share()
        log.info("%d cluster VMs, %d unknown VMs removed", len(records), len(swept))

    def run(self) -> None:
        """Step until :meth:`stop` is called."""
        while not self._stopped:
            until = self.step(self._clock())
            with self._changed:
                left = None if until == math.inf else max(0.0, until - self._clock())
                self._changed.wait_for(lambda: self._due or self._stopped, left)
                self._due = False
        machines = [m.machine for m in self._members.values() if m.machine is not None]
        with ThreadPoolExecutor(max_workers=max(1, len(machines))) as pool:
            list(pool.map(MemberMachine.leave, machines))

    def step(self, now: float) -> float:
        """Process events, plan and act; return the time of the next step. Never sleeps."""
        self._take_share()
        self._take_news()
        orders = self._orders(now)
        until = math.inf
        for name in list(self._members):
            try:
                until = min(until, self._decide(name, orders.get(name), now))
            except Exception as error:  # an error of one cluster VM must not affect the others
                full = isinstance(error, OSError)
                log.error(
                    "member %s: retry in %g s: %s", name, TROUBLE_SECONDS, error, exc_info=not full
                )
                self._tell_trouble(self._members[name], error)
                until = min(until, now + TROUBLE_SECONDS)
            else:
                self._tell_no_trouble(name)
        return until

    def _tell_trouble(self, member: Member, error: Exception) -> None:
        """Report an error that blocks a cluster VM; its record cannot contain it."""
        end = why_not(error)
        if isinstance(error, OSError):
            end = End(code=MemberCode.NODE_FAILED, message=f"its record cannot be stored: {error}")
        self._reporter.tell(member.record.troubled(end))
        member.troubled = True

    def _tell_no_trouble(self, name: str) -> None:
        member = self._members.get(name)
        if member is not None and member.troubled:
            self._reporter.tell(member.record.report())
            member.troubled = False

    def _take_share(self) -> None:
        with suppress(queue.Empty):
            while True:
                share = self._offered.get_nowait()
                if share != self._share:
                    self._keep_share(share)
                self._share, self._confirmed = share, True

    def _keep_share(self, share: NodeShare) -> None:
        try:
            self._parts.journal.keep_share(share)
        except OSError as error:  # it is in memory, and the service sends it again after a restart
            log.error("the assignment of this node cannot be stored: %s", error)

    def _take_news(self) -> None:
        with suppress(queue.Empty):
            while True:
                name, incarnation, news = self._heard.get_nowait()
                member = self._members.get(name)
                if member is not None and member.record.incarnation == incarnation:
                    member.facts = _noted(member.facts, news, self._clock())

    def _orders(self, now: float) -> dict[str, MemberOrder]:
        """Return the order of each cluster VM, and add new ones to the reconciler."""
        share = self._share.members if self._share else ()
        orders = {order.id: order for order in share if order.id not in self._aside}
        for name, order in orders.items():
            if name not in self._members:
                self._members[name] = Member(Record(order=order, since=now))
        if not self._confirmed:
            for name, member in self._members.items():
                orders.setdefault(name, member.record.order)
        return orders

    # ------------------------------------------------------------------ decisions

    def _decide(self, name: str, order: MemberOrder | None, now: float) -> float:
        member = self._members[name]
        decision = decide(order, member.record, member.facts, now)
        record = decision.record
        if Effect.STAGE in decision.effects and record.incarnation != member.record.incarnation:
            record = self._begin(member, record)
        if Effect.FORGET in decision.effects:
            self._forget(name)
            return math.inf
        if record != member.record:
            self._keep(member, record)
        member.facts = member.facts.but(renewed=0.0)  # only after it was stored
        if member.facts.destroyed:
            member.facts, member.machine = Facts(), None
        for effect in decision.effects:
            self._carry_out(member, effect)
        return decision.until

    def _begin(self, member: Member, record: Record) -> Record:
        """Prepare a new incarnation: its name, and the secrets of its guest."""
        member.facts, member.machine = Facts(), None
        return record.but(
            machine=self._parts.journal.machine_name(record.order.id, record.incarnation),
            token=secrets.token_urlsafe(32),
            sentinel=secrets.token_hex(16),
        )

    def _keep(self, member: Member, record: Record) -> None:
        self._parts.journal.write(record)
        before, member.record = member.record, record
        if record.report() != before.report():
            self._reporter.tell(record.report())
        if record.phase is not before.phase:
            who = record.order.name
            log.info("member %s (%d): %s %s", who, record.incarnation, record.phase, record.code)
        begins = record.phase is Phase.RUNNING and before.phase is not Phase.RUNNING
        if begins and member.machine is not None:
            member.machine.listen()

    def _forget(self, name: str) -> None:
        self._parts.shipper.forget(name)
        self._parts.journal.forget(name)
        self._reporter.forget(name)
        del self._members[name]

    def _carry_out(self, member: Member, effect: Effect) -> None:
        machine = member.machine = member.machine or self._machine(member.record)
        if effect is Effect.STAGE:
            self._work(member, "stage", lambda: Staged(machine.stage(), machine.unenforced))
        elif effect is Effect.BOOT:
            record = member.record
            self._work(member, "boot", lambda: machine.boot(record))
        elif effect is Effect.DESTROY:
            self._destroy(member, machine)
        elif effect is Effect.RENEW:
            begin(f"renew-{member.record.order.name}", _renew, machine)
        elif effect is Effect.ABORT:
            machine.unwanted.set()
        elif effect is Effect.TELL_ADMITTED:
            machine.signal(self._parts.settings.admit)
        elif effect is Effect.TELL_DRAIN:
            machine.signal(DRAIN)

    def _destroy(self, member: Member, machine: MemberMachine) -> None:
        def destroy() -> Destroyed:
            machine.destroy()
            return Destroyed()

        self._work(member, "destroy", destroy, Destroyed)

    def _machine(self, record: Record) -> MemberMachine:
        name, incarnation = record.order.id, record.incarnation

        def tell(news: News) -> None:
            self.hear(name, incarnation, news)

        return MemberMachine(self._parts, record.order, incarnation, tell)

    def _work(
        self, member: Member, what: str, action: _Work, failed: Callable[[End], _Heard] = Done
    ) -> None:
        """Run an action in a separate thread; its result becomes an event of the VM."""
        record = member.record
        name, incarnation = record.order.id, record.incarnation

        def work() -> None:
            try:
                result = action()
            except Exception as error:  # of any kind: the cluster VM is tried again
                known = isinstance(error, VMJobsError | OSError)
                log.warning("member %s: %s: %s", record.order.name, what, error, exc_info=not known)
                self.hear(name, incarnation, failed(why_not(error)))
                return
            self.hear(name, incarnation, result or Done())

        begin(f"{what}-{record.order.name}", work)
        member.facts = member.facts.but(working=True)  # its event is processed only in a later step

    # ------------------------------------------------------------------ after a restart

    def _recovered(self, record: Record, now: float) -> Member:
        member = Member(record)
        if record.phase not in _ALIVE:
            if record.phase is not Phase.STAGING:
                self._parts.journal.place(record.order.id).clear()
            return member
        machine = member.machine = self._machine(record)
        machine.name = record.machine
        driver = self._parts.drivers.get(record.hypervisor) if record.hypervisor else None
        if driver is None:
            message = f"the hypervisor {record.hypervisor} is no longer set up on this node"
            member.facts = Facts(end=End(code=MemberCode.NO_HYPERVISOR, message=message))
            return member
        machine.driver = driver
        if record.phase is Phase.STOPPING:
            return member
        if record.phase is Phase.BOOTING:
            member.record = record.but(deadline=now + record.order.boot_seconds)
        try:
            machine.adopt(record, driver)
        except (VMJobsError, OSError) as error:
            log.error("member %s cannot be adopted: %s", record.order.name, error)
            member.facts = Facts(end=why_not(error))
            return member
        begin(f"hold-{record.order.name}", machine.hold_image)
        self._tell_again(machine, record)
        return member

    def _tell_again(self, machine: MemberMachine, record: Record) -> None:
        """Send signals again that the guest may have missed when the earlier agent ended."""
        if record.phase is not Phase.BOOTING:
            machine.listen()
        if record.admitted:
            machine.signal(self._parts.settings.admit)
        if record.phase is Phase.DRAINING:
            machine.signal(DRAIN)


def _noted(facts: Facts, news: _Heard, now: float) -> Facts:
    """Return the observed state, updated with an event."""
    if isinstance(news, Staged):
        facts = facts.but(working=False, staged=news.kind, unenforced=news.unenforced)
    elif isinstance(news, Done):
        facts = facts.but(working=False, end=facts.end or news.failed)
    elif isinstance(news, Destroyed):
        why = news.failed.message if news.failed else ""
        facts = facts.but(working=False, destroyed=news.failed is None, undestroyed=why)
    elif isinstance(news, Ready):
        facts = facts.but(ready=True)
    elif isinstance(news, ExitReported) and facts.exit is None:
        facts = facts.but(exit=news.exit, exit_at=now)
    elif isinstance(news, Over) and facts.end is None:
        facts = facts.but(end=news.end)
    elif isinstance(news, Renewed):
        facts = facts.but(renewed=news.due, refused="")
    elif isinstance(news, Again):
        facts = facts.but(again=True)
    elif isinstance(news, TokenRefused):
        facts = facts.but(refused=news.why)
    return facts


def _renew(machine: MemberMachine) -> None:
    try:
        machine.renew()
    except (VMJobsError, OSError) as error:
        log.warning("the token of %s could not be renewed: %s", machine.name, error)
    else:
        machine.signal(NEW_TOKEN)


def steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that ignores changes of the system clock."""
    epoch = time.time() - time.monotonic()
    return lambda: epoch + time.monotonic()


@contextmanager
def keeping(parts: MemberParts) -> Iterator[Keeper]:
    """Run this node's reconciler while the context lasts. The cluster VMs run on after it."""
    keeper = Keeper(parts)
    keeper.recover()
    callers = Callers(parts.sessions, keeper.knock) if parts.sessions is not None else None

    def take(share: NodeShare) -> None:
        keeper.take(share.model_copy(update={"sessions": ()}))
        if callers is not None:
            callers.take(share.sessions)

    listener = Listener(parts.source, keeper.seen, take)
    loop = threading.Thread(target=keeper.run, name="members", daemon=True)
    loop.start()
    begin("member-share", listener.run)
    begin("member-reports", parts.reporter.run)
    begin("member-consoles", parts.shipper.run)
    try:
        yield keeper
    finally:
        listener.stop()
        parts.reporter.stop()
        parts.shipper.stop()
        keeper.stop()
        loop.join(timeout=15.0)
