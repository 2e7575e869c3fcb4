"""A job whose VM is saved and resumed: nodes that run it with QEMU, and its service."""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from images.store.image_store import ImageStore
from images.transfer.file_transfer import ChunkedFileTransfer
from repository.images.checkpoints import checkpoint_of
from tests.kit import ROOT
from tests.kit.agent_runs import Images, Lease
from tests.kit.api_site import Site, make_site, serving
from tests.kit.waiting import wait_until
from vmjobs.agent.journal import Journal, sweep
from vmjobs.agent.run.job_run import execute
from vmjobs.agent.run.outcome import RunOutcome
from vmjobs.agent.run.services import RunServices, RunSettings
from vmjobs.agent.run.state import Run, RunRequest
from vmjobs.agent.vm.events import EventQueue, SignalSent
from vmjobs.client import JobAgentClient, Retries
from vmjobs.hypervisor.base import Hypervisor, VmNeeds
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.model import MIB, Checkpoint, HypervisorKind, JobState, ReasonCode, StreamName

BOOT = 240.0
#: Large enough that a script whose test is held up for seconds does not end before its VM is saved.
LAST = 60
#: Counts to LAST; tests insert extra commands.
COUNTS = f"""#!/bin/sh
n=0
while [ $n -lt {LAST} ]; do
    n=$((n + 1))
    echo $n
    echo $n $$ >>numbers
    sleep 0.2
done
date +%s >clock
"""


class Qemu(Libvirt):
    """QEMU on this node. saves: set once a VM is to be saved."""

    def __init__(self) -> None:
        super().__init__(HypervisorKind.QEMU, node_connection())
        self.saves = threading.Event()

    def save(self, name: str, path: Path) -> None:
        self.saves.set()
        super().save(name, path)


@dataclass
class Node:
    """A node with its own journal; runs one attempt at a job."""

    site: Site
    url: str
    folder: Path
    job: str
    driver: Hypervisor
    file_transfer: ChunkedFileTransfer = field(default_factory=ChunkedFileTransfer)
    lease: Lease = field(default_factory=Lease)
    outcome: RunOutcome | None = None

    def __post_init__(self) -> None:
        store = ImageStore(ROOT / "build" / "images")
        image = store.prepare(store.resolve("generic"))
        journal = Journal(self.folder / "runs")
        settings = RunSettings("here", 16 * MIB, 16 * MIB, grace_seconds=3)
        services = RunServices(
            Images(image), self._choose, journal, settings, file_transfer=self.file_transfer
        )
        token = self.site.issuer.job_token(self.job, "ada")
        source = JobAgentClient(self.url, token, self.job, retries=Retries(deadline=60.0))
        self.run = Run(
            RunRequest(
                source, self.lease.progress, services, self.job, secrets.token_hex(16), EventQueue()
            )
        )
        self._thread = threading.Thread(target=self._execute)
        self._thread.start()

    def _execute(self) -> None:
        self.outcome = execute(self.run)

    def _choose(self, _needs: VmNeeds) -> Hypervisor:
        return self.driver

    def signal(self, number: int) -> None:
        self.run.request.event_queue.put(SignalSent(number))

    def wait(self) -> None:
        self._thread.join(400)

    def runs(self) -> None:
        """Wait until the script runs on this node, or the attempt has ended."""
        wait_until(self._has_run, BOOT, "the script runs")

    def says(self, words: str) -> None:
        """Wait until the console of its VM contains these words."""
        console, wanted = self.run.stream(StreamName.CONSOLE), words.encode()
        wait_until(lambda: wanted in console.read_bytes(), BOOT, f"it says {words}")

    def _has_run(self) -> bool:
        return self.lease.reached(JobState.RUNNING) or not self._thread.is_alive()

    def ended(self) -> RunOutcome:
        """Wait for the outcome, and check that nothing is left of the run."""
        self.wait()
        assert self.outcome is not None
        journal = self.run.request.services.journal
        assert list(journal.root.iterdir()) == []
        assert sweep(journal, {self.driver.kind: self.driver}) == []
        assert self.run.choice.vm_name not in self.driver.list()
        return self.outcome


@dataclass
class Place:
    """A service, and nodes."""

    site: Site
    url: str
    folder: Path
    job: str = ""
    nodes: list[Node] = field(default_factory=list)

    def submit(self, script: str = COUNTS, **fields: Any) -> None:
        spec: dict[str, Any] = {"hypervisor": "qemu", "memory": 192, "disk": 32, "checkpoint": True}
        (self.job,) = self.site.user().submit(
            script=script, outputs=["numbers", "clock"], run_seconds=600, **(spec | fields)
        )

    def node(
        self, driver: Hypervisor | None = None, file_transfer: ChunkedFileTransfer | None = None
    ) -> Node:
        """Have a new node run the job."""
        folder = self.folder / f"node{len(self.nodes)}"
        driver = driver or Qemu()
        made = Node(
            self.site, self.url, folder, self.job, driver, file_transfer or ChunkedFileTransfer()
        )
        self.nodes.append(made)
        return self.nodes[-1]

    def leaves(
        self, driver: Hypervisor | None = None, file_transfer: ChunkedFileTransfer | None = None
    ) -> RunOutcome:
        """Run the job on a new node, evict it once it counts, and return the outcome."""
        node = self.node(driver, file_transfer)
        self.counts()
        node.signal(15)
        return node.ended()

    def out(self) -> list[int]:
        """The numbers counted so far, from the service's copy of the output."""
        stream = self.site.repository.jobs.open_stream(self.job, StreamName.OUT)
        return [int(line) for line in b"".join(stream.chunks()).splitlines()]

    def completes(self, driver: Hypervisor | None = None) -> Node:
        """Run the job to its end on a new node; check that it counts each number exactly once."""
        node = self.node(driver)
        ended = node.ended()
        assert (ended.state, ended.reason.code) == (JobState.COMPLETED, ReasonCode.SUCCEEDED), (
            ended.reason
        )
        self.check_counted()
        return node

    def check_counted(self) -> None:
        assert self.out() == list(range(1, LAST + 1))

    def counts(self, beyond: int = 2) -> None:
        """Wait until the job has counted beyond this number."""
        wait_until(lambda: max(self.out(), default=0) > beyond, BOOT, f"it counts beyond {beyond}")

    def checkpoint(self) -> Checkpoint | None:
        with self.site.repository.database.read() as session:
            return checkpoint_of(session, self.job)

    def output(self, name: str) -> str:
        with self.site.repository.jobs.open_output(self.job, name) as file:
            return b"".join(file).decode()


@pytest.fixture
def place() -> Iterator[Place]:
    # Socket paths must be short, and pytest's directories have long paths.
    with tempfile.TemporaryDirectory(prefix="saved-") as name:
        folder = Path(name)
        site = make_site(folder / "site")
        with serving(site.app) as url:
            place = Place(site, url, folder)
            yield place
            for node in place.nodes:
                node.signal(2)
                node.wait()
            for node in place.nodes:  # a resumed VM keeps the name from its first node
                node.ended()
