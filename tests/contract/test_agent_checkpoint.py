"""A job's VM is saved on one node and resumed on another: agent, guest, QEMU, repository."""

from __future__ import annotations

import errno
import hashlib
import json
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from vmjobs.agent.vm.events import EventQueue, LeaseLost, RunEvent, SaveRequested, SignalSent
from vmjobs.client import JobAgentClient, Retries
from vmjobs.errors import HypervisorError, QuotaExceeded, Unavailable
from vmjobs.file_transfer import ContentReceiver
from vmjobs.hypervisor.base import Hypervisor, VmConfig, VmState
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.model import MIB, Checkpoint, HypervisorKind, JobState, ReasonCode, StreamName

S, C = JobState, ReasonCode
BOOT = 120.0
LAST = 40
#: Time for five retries of a guest's request; only a guest that may have been saved retries more often.
PATIENCE = 15.0
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


class Elsewhere(Qemu):
    """The same driver on a node with another QEMU version."""

    @property
    def platform(self) -> str:
        return "qemu 99.0.0, q35, tcg"


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
        source = JobAgentClient(self.url, token, self.job, retries=Retries(deadline=2.0))
        self.run = Run(
            RunRequest(source, self.lease, services, self.job, secrets.token_hex(16), EventQueue())
        )
        self._thread = threading.Thread(target=self._execute)
        self._thread.start()

    def _execute(self) -> None:
        self.outcome = execute(self.run)

    def _choose(self, *_: object, **__: object) -> Hypervisor:
        return self.driver

    def signal(self, number: int) -> None:
        self.run.request.event_queue.put(SignalSent(number))

    def wait(self) -> None:
        self._thread.join(180)

    def runs(self) -> None:
        """Wait until the script runs on this node, or the attempt has ended."""
        wait_until(self._has_run, BOOT, "the script runs")

    def says(self, words: str) -> None:
        """Wait until the console of its VM contains these words."""
        console, wanted = self.run.stream(StreamName.CONSOLE), words.encode()
        wait_until(lambda: wanted in console.read_bytes(), BOOT, f"it says {words}")

    def _has_run(self) -> bool:
        return self.lease.reached(S.RUNNING) or not self._thread.is_alive()

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

    def submit(self, script: str = COUNTS, **fields: object) -> None:
        spec = {"hypervisor": "qemu", "memory": 192, "disk": 32, "checkpoint": True, **fields}
        (self.job,) = self.site.user().submit(
            script=script, outputs=["numbers", "clock"], run_seconds=120, **spec
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
        assert (ended.state, ended.reason.code) == (S.COMPLETED, C.SUCCEEDED), ended.reason
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


def test_it_goes_on_elsewhere_and_counts_nothing_twice(place: Place) -> None:
    """Each node gives the guest a new token and, once that is known, accepts no other one.
    A repeated SIGTERM loses nothing.
    """
    place.submit()
    begun = time.time()
    tokens: list[str] = []
    for _ in range(2):
        node = place.node()
        place.counts(beyond=max(place.out(), default=0) + 3)
        assert node.run.guest_session.former == ""
        assert node.run.guest_session.token not in tokens
        assert not any(node.run.guest_session.accepts(f"Bearer {token}") for token in tokens)
        tokens.append(node.run.guest_session.token)
        for _ in range(3):
            node.signal(15)
        left = node.ended()
        assert (left.state, left.reason.code) == (S.PREEMPTED, C.CHECKPOINTED), left.reason
        told = place.checkpoint()
        assert told is not None
        assert told.guest == hashlib.sha256(tokens[-1].encode()).hexdigest()
        assert tokens[-1] not in json.dumps(told.model_dump(mode="json"))
    last = place.completes()
    numbers = [line.split() for line in place.output("numbers").splitlines()]
    assert [int(number) for number, _ in numbers] == list(range(1, LAST + 1))
    assert len({process for _, process in numbers}) == 1
    assert begun < int(place.output("clock")) <= time.time() + 2
    job = place.site.repository.jobs.get(place.job)
    assert job.attempts == 3
    assert job.bytes["checkpoint"] > 0
    resumed = last.lease.reports[2].reason.message
    assert resumed.startswith("the VM was resumed from its checkpoint, after ")


@pytest.mark.soak
def test_a_node_that_is_another_begins_anew(place: Place) -> None:
    place.submit()
    place.leaves()
    second = place.completes(Elsewhere())
    told = [report.reason.message for report in second.lease.reports]
    assert any("the job starts again" in message for message in told), told


@pytest.mark.soak_for("2")
@pytest.mark.parametrize("number", [2, 15])
def test_whoever_is_not_to_be_saved_is_stopped(place: Place, number: int) -> None:
    place.submit(checkpoint=number == 2)
    node = place.node()
    place.counts(beyond=12)
    before = max(place.out())
    node.signal(number)
    left = node.ended()
    assert (left.state, left.reason.code) == (S.PREEMPTED, C.EVICTED)
    again = place.node()
    again.runs()
    assert again.run.choice.resumed is None
    assert max(place.out(), default=0) < before, "it has begun anew"


@pytest.mark.soak
def test_a_repository_that_does_not_take_it_costs_what_was_done_and_no_more(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.submit()
    first = place.node()
    place.counts()

    def refuse(*_: object) -> None:
        raise QuotaExceeded("the quota is used up")

    with monkeypatch.context() as patch:
        patch.setattr("repository.images.segments.check_quota", refuse)
        first.signal(15)
        left = first.ended()
    assert (left.state, left.reason.code) == (S.PREEMPTED, C.EVICTED)
    assert "checkpoint was not stored" in left.reason.message
    place.completes()


@pytest.mark.soak
def test_a_machine_that_could_not_send_all_is_not_saved(place: Place) -> None:
    """The lost data would be missing wherever the VM resumed."""
    place.submit()
    first = place.node()
    place.counts()

    def full(_data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first.run.guest_session.on_output = full
    wait_until(lambda: bool(first.run.guest_session.lost), 20, "something is lost")
    first.signal(15)
    left = first.ended()
    assert (left.state, left.reason.code) == (S.PREEMPTED, C.EVICTED)
    place.completes()


@pytest.mark.soak
def test_a_guest_that_is_not_answered_for_long_loses_nothing(place: Place) -> None:
    """Its script ends meanwhile; the guest repeats all its requests."""
    place.submit()
    node = place.node()
    place.counts()
    assert node.run.guest_session.quiesce(10.0)
    threading.Event().wait(PATIENCE + 5.0)
    assert max(place.out()) < LAST
    node.run.guest_session.resume()
    assert node.ended().state is S.COMPLETED
    place.check_counted()
    assert len(place.output("numbers").splitlines()) == LAST


class WatchedTransfer(ChunkedFileTransfer):
    """Calls ``before`` before it sends a file."""

    def __init__(self, before: Callable[[Callable[[], None]], None]) -> None:
        self._before = before

    def send(
        self, path: Path, receiver: ContentReceiver, check_cancelled: Callable[[], None]
    ) -> tuple[str, int]:
        self._before(check_cancelled)
        return super().send(path, receiver, check_cancelled)


@pytest.mark.soak
def test_a_repository_that_is_away_for_a_while_gets_it_all_the_same(place: Place) -> None:
    missed: list[int] = []

    def away(_heed: Callable[[], None]) -> None:
        missed.append(1)
        if len(missed) == 3:
            raise Unavailable("api", "it does not answer")

    place.submit()
    assert place.leaves(file_transfer=WatchedTransfer(away)).reason.code is C.CHECKPOINTED
    assert len(missed) > 3
    assert place.completes().run.choice.resumed is not None


@pytest.mark.soak_for("why1")
@pytest.mark.parametrize("why", [SignalSent(2), LeaseLost()])
def test_whoever_is_told_to_end_while_its_vm_is_sent_sends_no_more(place: Place, why: RunEvent) -> None:
    sending = threading.Event()

    def wait(check_cancelled: Callable[[], None]) -> None:
        sending.set()
        wait_until(lambda: check_cancelled() is not None, 60, "the upload to be given up")

    place.submit()
    node = place.node(file_transfer=WatchedTransfer(wait))
    place.counts()
    node.signal(15)
    assert sending.wait(60)
    node.run.request.event_queue.put(why)
    left = node.ended()
    assert (left.state, left.reason.code) == (S.PREEMPTED, C.EVICTED)
    assert place.checkpoint() is None


class Late(Qemu):
    """Saves a VM only once it is gone, which is too late."""

    def save(self, name: str, path: Path) -> None:
        self.saves.set()
        wait_until(lambda: self.state(name) is VmState.GONE, 60, "the VM to be gone")
        raise HypervisorError("it is gone")


def test_whoever_is_gone_while_its_vm_is_saved_has_none_left(place: Place) -> None:
    place.submit()
    driver = Late()
    node = place.node(driver)
    place.counts()
    node.signal(15)
    assert driver.saves.wait(20)
    node.run.request.event_queue.put(LeaseLost())
    left = node.ended()
    assert (left.state, left.reason.code) == (S.PREEMPTED, C.EVICTED)


class Dying(Qemu):
    """Kills a VM that is to be saved, and waits until the agent has noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = threading.Event()

    def wait(self, name: str, timeout: float, beside: Sequence[int] = ()) -> VmState:
        state = super().wait(name, timeout, beside)
        if state is VmState.GONE:
            self.gone.set()
        return state

    def save(self, name: str, path: Path) -> None:
        subprocess.run(["pkill", "-KILL", "-f", f"guest={name}"], check=True)
        assert self.gone.wait(20)
        for thread in threading.enumerate():
            if thread.name == "watch":  # reports the VM's death
                thread.join(20)
        super().save(name, path)


def test_a_vm_that_dies_while_it_is_saved_ends_no_job(place: Place) -> None:
    """The job was being evicted: it is tried again, from its beginning."""
    place.submit(COUNTS)
    left = place.leaves(Dying())
    assert (left.state, left.reason.code, left.exit) == (S.PREEMPTED, C.EVICTED, None)
    assert left.reason.message.startswith("its VM was lost while it was being saved: ")
    place.completes()


def test_a_job_that_ends_while_it_is_to_be_saved_has_ended(place: Place) -> None:
    """Without a network, the guest needs no answer to end. The job is not run again."""
    place.submit(network="none")
    driver = Late()
    node = place.node(driver)
    node.runs()
    node.signal(15)
    assert driver.saves.wait(60)
    assert node.ended().state is S.COMPLETED


class Unable(Qemu):
    """Saves nothing; the VM goes on."""

    def save(self, name: str, path: Path) -> None:
        raise HypervisorError(f"{name} cannot be saved to {path.name}")


@pytest.mark.soak
def test_an_agent_that_stops_tells_no_script_to_end(place: Place) -> None:
    """The signal would end the script, and the job's owner would take that for its own end."""
    place.submit(COUNTS.replace("n=0\n", "trap 'exit 0' TERM\nn=0\n", 1))
    node = place.node(Unable())
    place.counts()
    node.run.request.event_queue.put(SaveRequested())
    left = node.ended()
    assert (left.state, left.reason.code, left.exit) == (S.PREEMPTED, C.EVICTED, None)
    assert "the agent is stopping" in left.reason.message
    again = place.node()
    again.runs()
    assert again.run.choice.resumed is None
    place.counts()
    again.run.request.event_queue.put(SaveRequested())
    assert again.ended().reason.code is C.CHECKPOINTED
    place.completes()


@pytest.mark.soak
def test_a_vm_without_a_network_is_saved_as_often_as_it_takes(place: Place) -> None:
    place.submit(COUNTS.replace("echo $n\n", "echo $n; echo n=$n >/dev/console\n"), network="none")
    for so_far in (5, 10):
        node = place.node()
        node.runs()
        node.says(f"n={so_far}")
        node.signal(15)
        left = node.ended()
        assert left.reason.code is C.CHECKPOINTED, left.reason
    resumed = place.completes().run.choice.resumed
    assert resumed is not None
    assert resumed.ran > 2


class Broken(Qemu):
    """Resumes nothing."""

    def start(self, vm: VmConfig) -> None:
        if vm.saved is not None:
            raise HypervisorError("it is of no use")
        super().start(vm)


@pytest.mark.soak
def test_a_job_whose_saved_vm_is_of_no_use_begins_anew_in_the_end(place: Place) -> None:
    place.submit()
    place.leaves()
    for _ in range(2):
        left = place.node(Broken()).ended()
        assert (left.state, left.reason.code) == (S.PREEMPTED, C.NOT_RESUMED), left.reason
        assert "it is of no use" in left.reason.message
    assert place.completes().run.choice.resumed is None
