"""Virtual clusters under real workers that are killed, and under concurrent changes."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from repository.broker import TaskPublisher
from repository.service import Repository, open_repository
from tests.kit.cluster_nodes import OPERATOR, POOLS, World, declared
from tests.kit.repository_jobs import clusters_of, prepare_library
from tests.kit.waiting import wait_until
from tests.kit.workers import worker
from vmjobs.cluster.vm_state import ClusterVmState, Goal, Phase
from vmjobs.cluster.wire import ApplyOutcome, ClusterVmReport, ClusterVmReports
from vmjobs.config import Config
from vmjobs.errors import Conflict, NotFound
from vmjobs.model import now

pytestmark = [pytest.mark.both_databases, pytest.mark.settings(pools=POOLS)]


class Agents(threading.Thread):
    """The agents of some nodes: VMs run as soon as ordered, and end when ordered."""

    def __init__(self, repository: Repository, *nodes: str) -> None:
        super().__init__(daemon=True)
        self._repository, self._nodes = repository, nodes
        self.over = threading.Event()
        self.faults: list[Exception] = []

    def __enter__(self) -> Agents:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()

    def run(self) -> None:
        while not self.over.wait(0.02):
            try:
                for node in self._nodes:
                    self._obey(node)
            except Exception as error:
                self.faults.append(error)

    def _obey(self, node: str) -> None:
        told = [
            ClusterVmReport(
                id=order.id,
                incarnation=1,
                phase=Phase.RUNNING if order.goal is Goal.RUN else Phase.GONE,
                since=now(),
            )
            for order in self._repository.assignments.get(node).members
        ]
        self._repository.assignments.store_reports(
            node, ClusterVmReports(reports=tuple(told), complete=True)
        )


def test_a_worker_brings_clusters_up_though_it_is_killed(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path, pools=POOLS)
    prepare_library(tmp_path)
    with closing(open_repository(config, migrate=False)) as repository:
        world = World(repository, "n1", "n2")
        publisher = TaskPublisher(config)
        world.apply(size=6)
        chance = random.Random(1)
        with Agents(repository, "n1", "n2") as agents:
            for _ in range(3):
                with worker(config, tmp_path):
                    publisher.clusters()
                    time.sleep(chance.uniform(1, 4))
            with worker(config, tmp_path):
                wait_until(lambda: world.repository.clusters.get("vc").up == 6)
                world.repository.cluster_actions.delete("vc", Goal.DRAIN, "root")
                publisher.clusters()
                wait_until(lambda: clusters_of(world.repository) == [])
        publisher.close()
    assert agents.faults == []


def test_operators_agents_and_the_worker_at_once(repository: Repository, other: Repository) -> None:
    """Nothing is lost, nothing deadlocks, and the last declaration is in effect at the end."""
    world = World(repository, "n1", "n2")
    world.apply(size=4)
    chance = random.Random(2)
    faults: list[Exception] = []
    over = threading.Event()

    def operate() -> None:
        for _ in range(25):
            try:
                other.cluster_actions.scale("vc", chance.randrange(7), "root")
                other.cluster_specs.apply(OPERATOR, declared(size=4, memory=chance.choice([200, 210])))
            except (Conflict, NotFound) as error:
                faults.append(error)

    def work() -> None:
        while not over.is_set():
            for order in (o for n in ("n1", "n2") for o in other.assignments.get(n).members):
                world.pool.join(order.name, id=order.id)
            world.step()

    with Agents(other, "n1", "n2") as agents, ThreadPoolExecutor(3) as pool:
        operators = [pool.submit(operate) for _ in range(2)]
        worker_thread = pool.submit(work)
        for operator in operators:
            operator.result(300)
        world.apply(size=3, memory=220)
        wait_until(lambda: _is_as_declared(world, 3), 120)
        over.set()
        worker_thread.result(120)
    assert (faults, agents.faults) == ([], [])
    numbers = [event.seq for event in world.repository.clusters.events("vc")]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_one_cluster_declared_by_many_at_once(repository: Repository, other: Repository) -> None:
    with ThreadPoolExecutor(8) as pool:
        declaring = [r.cluster_specs for r in (repository, other) for _ in range(4)]
        done = list(pool.map(lambda specs: specs.apply(OPERATOR, declared()), declaring))
    outcomes = [applied.outcome for applied in done]
    assert sorted(outcomes) == [ApplyOutcome.CREATED, *[ApplyOutcome.UNCHANGED] * 7]


def _is_as_declared(world: World, size: int) -> bool:
    cluster = world.repository.clusters.get("vc")
    right = [
        m
        for m in cluster.members
        if m.state is ClusterVmState.UP and m.generation == cluster.generation
    ]
    return len(right) == size == len(cluster.members)
