"""A job's VM is saved on one node and resumed on another: agent, guest, QEMU, repository."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kit.saved_jobs import COUNTS, LAST, Place, Qemu, place
from tests.kit.waiting import wait_until
from vmjobs.agent.vm.events import LeaseLost, SaveRequested
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import VmConfig, VmState
from vmjobs.model import JobState, ReasonCode

__all__ = ["place"]

S, C = JobState, ReasonCode
#: Time for five retries of a guest's request; only a guest that may have been saved retries more often.
PATIENCE = 15.0


class Elsewhere(Qemu):
    """The same driver on a node with another QEMU version."""

    @property
    def platform(self) -> str:
        return "qemu 99.0.0, q35, tcg"


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
    place.counts()
    node.signal(number)
    left = node.ended()
    assert (left.state, left.reason.code) == (S.PREEMPTED, C.EVICTED)
    assert place.checkpoint() is None, "it will begin anew"


@pytest.mark.soak
def test_a_machine_that_could_not_send_all_is_not_saved(place: Place) -> None:
    """The lost data would be missing wherever the VM resumed."""
    place.submit()
    first = place.node()
    place.counts()

    def full(_data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first.run.guest_session.on_output = full
    wait_until(lambda: bool(first.run.guest_session.lost), 60, "something is lost")
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
    threading.Event().wait(0.3 * LAST + PATIENCE)
    assert max(place.out()) < LAST
    node.run.guest_session.resume()
    assert node.ended().state is S.COMPLETED
    place.check_counted()
    assert len(place.output("numbers").splitlines()) == LAST


class Late(Qemu):
    """Saves a VM only once it is gone, which is too late."""

    def save(self, name: str, path: Path) -> None:
        self.saves.set()
        wait_until(lambda: self.state(name) is VmState.GONE, 240, "the VM to be gone")
        raise HypervisorError("it is gone")


def test_whoever_is_gone_while_its_vm_is_saved_has_none_left(place: Place) -> None:
    place.submit()
    driver = Late()
    node = place.node(driver)
    place.counts()
    node.signal(15)
    assert driver.saves.wait(120)
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
        assert self.gone.wait(120)
        for thread in threading.enumerate():
            if thread.name == "watch":  # reports the VM's death
                thread.join(120)
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
    assert driver.saves.wait(120)
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
