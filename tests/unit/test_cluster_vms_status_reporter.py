"""Tokens, consoles and reports of cluster VMs, between a node and the service."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from tests.kit.cluster_vm_orders import cluster_vm_order, cluster_vm_record
from tests.kit.waiting import wait_until
from vmjobs.agent.cluster_vms import pool_tokens
from vmjobs.agent.cluster_vms.pool_tokens import PoolTokenCache
from vmjobs.agent.cluster_vms.status_reporter import ConsoleFile, ConsoleUploader, StatusReporter
from vmjobs.cluster.vm_state import Phase
from vmjobs.cluster.wire import ClusterVmReports, PoolToken
from vmjobs.errors import Forbidden, Unavailable, VMJobsError
from vmjobs.model import now

CLUSTER_VM = cluster_vm_order().id


@dataclass
class Service:
    """Fake service: records what it receives, or raises ``fault`` instead."""

    fault: VMJobsError | None = None
    life: float = 600.0
    given: int = 0
    reports: list[ClusterVmReports] = field(default_factory=list)
    consoles: dict[int, bytes] = field(default_factory=dict)
    calls: int = 0

    def report(self, reports: ClusterVmReports) -> None:
        self._answer()
        self.reports.append(reports)

    def token(self, vm: str, incarnation: int) -> PoolToken:
        self._answer()
        self.given += 1
        expires = now() + timedelta(seconds=self.life)
        return PoolToken(token=f"token {self.given}", identity="it", expires=expires)

    def append_console(self, vm: str, incarnation: int, offset: int, data: bytes) -> None:
        self._answer()
        had = self.consoles.get(incarnation, b"")
        assert offset <= len(had), "bytes are missing"
        self.consoles[incarnation] = had[:offset] + data

    def _answer(self) -> None:
        self.calls += 1
        if self.fault is not None:
            raise self.fault


AWAY = Unavailable("api", "away")


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def told() -> list[float]:
    return []


@pytest.fixture
def box(service: Service, told: list[float]) -> PoolTokenCache:
    return PoolTokenCache(lambda: service.token(CLUSTER_VM, 1), told.append)


def test_a_token_is_asked_for_when_it_is_wanted_and_then_kept(
    service: Service, box: PoolTokenCache, told: list[float]
) -> None:
    assert service.given == 0
    assert [box.get(), box.get()] == ["token 1", "token 1"]
    assert told == [pytest.approx(time.time() + 300, abs=5)]


def test_a_token_is_replaced_when_half_of_its_life_is_over(
    service: Service, box: PoolTokenCache, told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_tokens, "MIN_LIFE_SECONDS", 0.0)
    service.life = 0.2
    box.get()
    wait_until(lambda: time.time() > told[0])
    assert box.get() == "token 2"


def test_the_last_token_does_while_the_service_is_away_and_no_longer(
    service: Service, box: PoolTokenCache, told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_tokens, "MIN_LIFE_SECONDS", 0.0)
    service.life = 1.0
    box.get()
    service.fault = AWAY
    wait_until(lambda: time.time() > told[0])
    assert box.get() == "token 1"
    with pytest.raises(Unavailable):
        box.renew()
    wait_until(lambda: time.time() > told[0] + 0.6)
    with pytest.raises(Unavailable):
        box.get()


def test_a_token_that_was_refused_is_refused(service: Service, box: PoolTokenCache) -> None:
    service.fault = Forbidden("not that machine")
    with pytest.raises(Forbidden):
        box.get()


def test_why_there_is_no_token_is_told_until_there_was_one(told: list[float]) -> None:
    service, why = Service(AWAY), list[str]()
    box = PoolTokenCache(lambda: service.token(CLUSTER_VM, 1), told.append, on_refused=why.append)
    with pytest.raises(Unavailable):
        box.get()
    assert why == [AWAY.message]
    service.fault = None
    box.get()
    service.fault = AWAY
    with pytest.raises(Unavailable):
        box.renew()
    # the cache of the next agent
    after = PoolTokenCache(box.fetch, told.append, had=True, on_refused=why.append)
    with pytest.raises(Unavailable):
        after.get()
    assert why == [AWAY.message]


@pytest.mark.parametrize("left", [False, True])
def test_those_who_ask_at_once_share_one_token_unless_the_vm_is_left(
    service: Service, told: list[float], *, left: bool
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def fetch() -> PoolToken:
        asked.set()
        assert answer.wait(30)
        return service.token(CLUSTER_VM, 1)

    box = PoolTokenCache(fetch, told.append)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(box.get) for _ in range(3)]
        assert asked.wait(5)
        assert not any(one.done() for one in waiting)
        if left:
            box.close()
            assert [type(one.exception(5)) for one in waiting] == [Unavailable] * 3
        answer.set()
        if not left:
            assert [one.result(5) for one in waiting] == ["token 1"] * 3
            assert service.given == 1


def test_a_fault_of_our_own_holds_up_nobody(told: list[float]) -> None:
    def fetch() -> PoolToken:
        raise KeyError("oh")

    with pytest.raises(Unavailable):
        PoolTokenCache(fetch, told.append).get()


@pytest.fixture
def console(path: Path) -> ConsoleFile:
    return ConsoleFile(CLUSTER_VM, 1, path, limit=100)


def grow(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def ship_all(console: ConsoleFile, service: Service) -> None:
    while console.upload_next(service):
        pass


def test_a_console_arrives_whole_however_often_it_is_emptied(
    path: Path, service: Service, console: ConsoleFile
) -> None:
    sent = b""
    for number in range(12):
        piece = b"%02d" % number * 4
        grow(path, piece)
        sent += piece
        ship_all(console, service)
        console.truncate_if_full()
    assert service.consoles[1] == sent


def test_what_is_lost_while_the_service_is_away_makes_no_hole(
    path: Path, service: Service, console: ConsoleFile
) -> None:
    path.write_bytes(b"a" * 50)
    assert console.upload_next(service)
    service.fault = AWAY
    grow(path, b"b" * 60)
    with pytest.raises(Unavailable):
        console.upload_next(service)
    console.truncate_if_full()
    service.fault = None
    grow(path, b"c" * 10)
    assert console.upload_next(service)
    assert service.consoles[1] == b"a" * 50 + b"c" * 10


def test_another_agent_goes_on_where_a_console_was_emptied(path: Path, service: Service) -> None:
    path.write_bytes(b"a" * 60)
    first = ConsoleFile(CLUSTER_VM, 1, path, limit=59)
    first.upload_next(service)
    first.truncate_if_full()
    path.write_bytes(b"b" * 10)
    ship_all(ConsoleFile(CLUSTER_VM, 1, path, limit=100), service)
    assert service.consoles[1] == b"a" * 59 + b"b" * 10


def test_no_more_than_the_limit_is_ever_sent(
    path: Path, service: Service, console: ConsoleFile
) -> None:
    for _ in range(10):
        grow(path, b"x" * 60)
        ship_all(console, service)
        console.truncate_if_full()
    assert len(service.consoles[1]) == 100
    assert path.stat().st_size <= 100


def test_a_console_that_is_refused_is_not_offered_again(
    path: Path, service: Service, console: ConsoleFile
) -> None:
    service.fault = Forbidden("another one's")
    path.write_bytes(b"a" * 10)
    ship_all(console, service)
    assert service.calls == 1


@contextmanager
def at_work(worker: StatusReporter | ConsoleUploader) -> Iterator[None]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(5)
        assert not thread.is_alive()


def test_the_last_words_of_the_vm_before_are_sent_too(tmp_path: Path, service: Service) -> None:
    reporter = StatusReporter(service)
    console_uploader = ConsoleUploader(service, reporter)
    for incarnation in (1, 2, 3):
        path = tmp_path / f"console-{incarnation}"
        path.write_bytes(b"words of %d" % incarnation)
        console_uploader.follow(ConsoleFile(CLUSTER_VM, incarnation, path, limit=100))
    with at_work(console_uploader):
        assert not reporter.is_reported(CLUSTER_VM, 3)
        assert service.consoles == {}  # it refuses consoles of VMs that no report names
        reporter.tell(cluster_vm_record(incarnation=3).report())
        with at_work(reporter):
            assert reporter.is_reported(CLUSTER_VM, 3, timeout=5)
            wait_until(lambda: len(service.consoles) == 2)
    assert service.consoles == {2: b"words of 2", 3: b"words of 3"}
    reporter.forget(CLUSTER_VM)
    assert not reporter.is_reported(CLUSTER_VM, 1)


def test_reports_newest_only_and_all_of_them_as_a_heartbeat(service: Service) -> None:
    service.fault = AWAY
    reporter = StatusReporter(service, heartbeat=0.2)
    with at_work(reporter):
        wait_until(lambda: service.calls > 0)
        one, two = cluster_vm_record(), cluster_vm_record(cluster_vm_order(1))
        reporter.tell(one.report())
        reporter.tell(two.report())
        reporter.tell(one.with_changes(phase=Phase.RUNNING).report())
        service.fault = None
        wait_until(lambda: len(service.reports) >= 2)
        back = service.reports[0]
        assert back.complete
        assert {report.phase for report in back.reports} == {Phase.RUNNING, Phase.WAITING}
        reporter.forget(two.order.id)
        reporter.tell(one.with_changes(phase=Phase.DRAINING).report())
        wait_until(lambda: any(not told.complete for told in service.reports))
        news = next(told for told in service.reports if not told.complete)
        assert [report.phase for report in news.reports] == [Phase.DRAINING]
        seen = len(service.reports)
        wait_until(lambda: len(service.reports) > seen)
        assert [report.id for report in service.reports[-1].reports] == [one.order.id]
