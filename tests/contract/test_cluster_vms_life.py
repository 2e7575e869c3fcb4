"""Cluster VMs on a node, for real: User Mode Linux, guest program, a script that keeps on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from tests.kit import ROOT, cluster_vm_node
from tests.kit.agent_runs import Images
from tests.kit.cluster_vm_node import (
    SECONDS,
    UML,
    Service,
    assert_forgotten,
    cluster_vm_guest,
    kept,
    kernel_pid,
    machine_pid,
    machine_pids,
    order,
)
from tests.kit.waiting import wait_until
from vmjobs.agent.cluster_vms import plan, pool_tokens
from vmjobs.agent.cluster_vms.record import ClusterVmRecord
from vmjobs.agent.cluster_vms.services import ClusterVmServices
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.cluster.vm_state import ClusterVmCode, Goal, Phase
from vmjobs.errors import Forbidden
from vmjobs.hypervisor.base import VmConfig, VmState
from vmjobs.model import HypervisorKind

pytest_plugins = ["tests.kit.cluster_vm_node"]
NewParts = Callable[..., ClusterVmServices]


def out(parts: ClusterVmServices) -> str:
    """What the script has printed so far, in the latest incarnation of the only cluster VM."""
    consoles = list(parts.journal.paths(order().id).directory.glob("console-[0-9]"))
    return max(consoles).read_text("utf-8", "replace") if consoles else ""


def wait_out(parts: ClusterVmServices, text: str) -> None:
    wait_until(lambda: text in out(parts), SECONDS, f"the script says {text!r}")


def kill(parts: ClusterVmServices) -> None:
    pid = machine_pid(parts)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_a_life(parts: ClusterVmServices, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started, registered, given new tokens, killed, restarted, drained; nothing is left."""
    monkeypatch.setattr(pool_tokens, "MIN_LIFE_SECONDS", 1.0)
    service.token_seconds = 6.0
    service.wants(1, order())
    with kept(parts):
        service.wait_running(1)
        wait_out(parts, "I am tiny-0 (1) with token-1")
        service.wants(2, order(admitted=1))
        wait_out(parts, "admitted")
        wait_out(parts, "renewed token-")
        wait_until(lambda: b"Linux version" in service.console(), SECONDS, "its console is shipped")

        kill(parts)
        service.wait_running(2)
        told = [(r.code, r.failures) for r in service.reports if r.incarnation == 1]
        assert told[-1] == (ClusterVmCode.GUEST_LOST, 0), "it had been admitted"
        wait_out(parts, "I am tiny-0 (2)")
        assert "admitted" not in out(parts)

        service.wants(3, order(admitted=1, goal=Goal.DRAIN))
        service.wait_phase(Phase.GONE)
        assert (service.last().code, service.last().incarnation) == (ClusterVmCode.DRAINED, 2)
        assert machine_pid(parts) is None
        assert isinstance(parts.images, Images)
        assert parts.images.held == 0
        assert_forgotten(parts, service, 4)
    seen = [phase for phase, _ in groupby(r.phase for r in service.reports if r.incarnation == 1)]
    steps = (Phase.STAGING, Phase.BOOTING, Phase.RUNNING, Phase.STOPPING, Phase.WAITING)
    assert seen == [step for step in steps if step in seen], "one that the next overtakes is not sent"
    assert Phase.RUNNING in seen
    assert seen[-1] in {Phase.STOPPING, Phase.WAITING}


def test_the_agent_may_go_and_come_back_and_the_service_too(
    parts: ClusterVmServices, service: Service
) -> None:
    service.wants(1, order())
    argv = [sys.executable, cluster_vm_node.__file__, str(parts.journal.root), str(service.folder)]
    agent = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        service.wait_running(1)
        wait_out(parts, "I am tiny-0 (1)")
        service.wants(2, order(admitted=1))
        wait_out(parts, "admitted")
    finally:
        agent.kill()
        agent.wait()
    pid = machine_pid(parts)
    assert pid is not None
    service.go_away()
    with kept(parts):
        # The new agent repeats what the guest may have missed.
        wait_until(lambda: out(parts).count("admitted") == 2, SECONDS, "it hears the new agent")
        assert machine_pid(parts) == pid
        kill(parts)
        wait_until(lambda: machine_pid(parts) not in {None, pid}, SECONDS, "it is started again")
        service.come_back()
        service.wait_running(2)
        service.wants(3, order(goal=Goal.STOP))
        service.wait_phase(Phase.GONE)
        assert service.last().code is ClusterVmCode.STOPPED
        assert_forgotten(parts, service, 4)


@pytest.mark.parametrize(
    ("phase", "then", "failures"),
    [
        (Phase.STAGING, 1, 0),
        (Phase.BOOTING, 2, 1),  # unknown whether it was ever started
        (Phase.STOPPING, 2, 0),
    ],
)
def test_what_a_killed_agent_leaves_is_mended(
    parts: ClusterVmServices, service: Service, phase: Phase, then: int, failures: int
) -> None:
    service.wants(1, order())
    name = parts.journal.vm_name(order().id, 1)
    left = {"incarnation": 1, "phase": phase, "machine": name, "token": "t", "sentinel": "s"}
    kind = None if phase is Phase.STAGING else HypervisorKind.UML
    parts.journal.write(ClusterVmRecord(order=order(), since=0.0, hypervisor=kind, **left))
    (parts.journal.paths(order().id).vm_directory / "vm").mkdir(parents=True)
    with kept(parts):
        service.wait_running(then)
        assert service.last().failures == failures
        assert_forgotten(parts, service, 2)


def test_why_a_vm_cannot_be_destroyed_is_told(parts: ClusterVmServices, service: Service) -> None:
    service.wants(1, order())
    name = parts.journal.vm_name(order().id, 1)
    left = {"incarnation": 1, "machine": name, "token": "t", "sentinel": "s", "message": "it ended"}
    kind = HypervisorKind.QEMU  # this node no longer has QEMU
    parts.journal.write(
        ClusterVmRecord(order=order(), since=0.0, phase=Phase.STOPPING, hypervisor=kind, **left)
    )

    with kept(parts):
        service.wait(lambda last: last.message.startswith("it cannot be destroyed: "), "it says why")
    assert service.last().phase is Phase.STOPPING
    why = f"{name} needs a hypervisor that this node does not have"
    assert service.last().message == f"it cannot be destroyed: {why}; it ended"


def test_a_vm_that_no_record_names_is_removed(
    tmp_path: Path, parts: ClusterVmServices, service: Service
) -> None:
    service.wants(1)
    (tmp_path / "vm").mkdir()
    name = parts.journal.vm_name(order(9).id, 1)
    UML.start(VmConfig(name, 1, 128, cluster_vm_guest(), (), tmp_path / "console", tmp_path / "vm"))
    with kept(parts):
        assert UML.state(name) is VmState.GONE


def test_a_guest_that_ends_by_itself_says_why(service: Service, new_parts: NewParts) -> None:
    ending = new_parts(more="echo no pool here; exit 3")
    service.wants(1, order())
    with kept(ending):
        service.wait_phase(Phase.WAITING)
        ended = service.ended()
        assert (ended.code, ended.failures) == (ClusterVmCode.GUEST_ENDED, 1)
        assert "ended with status 3" in ended.message
        assert "no pool here" in ended.message
        assert {"staging", "booting"} <= set(ended.seconds)
        wait_until(lambda: b"no pool here" in service.console(), SECONDS, "the service has it, too")
        service.wait(lambda last: last.failures == 2, "it is tried again, which counts")
        assert_forgotten(ending, service, 2)


def test_a_vm_that_gets_no_token_is_not_at_fault(
    service: Service, new_parts: NewParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is retried after a pause, until the service has a token for it."""
    monkeypatch.setattr(plan, "REFUSED_PAUSE_SECONDS", 3.0)
    needy = new_parts(more="with_retries ask >token || exit 69")
    service.refusal = Forbidden("the pool's key is not here")
    service.wants(1, order())
    with kept(needy):
        service.wait_phase(Phase.WAITING)
        refused = service.ended()
        assert (refused.code, refused.failures) == (ClusterVmCode.TOKEN_REFUSED, 0)
        assert refused.message == "it got no token for the pool: the pool's key is not here"
        assert refused.retry is not None
        assert 2 < (refused.retry - refused.since).total_seconds() < 4
        service.refusal = None
        again = (Phase.RUNNING, True)  # in any incarnation: a pause may be over before
        service.wait(lambda last: (last.phase, last.incarnation > 1) == again, "it runs")
        wait_out(needy, "with token-")
        assert_forgotten(needy, service, 2)


def test_disks_of_a_persistent_vm_outlive_it(service: Service, new_parts: NewParts) -> None:
    looks = "echo root:$(cat /etc/mark) scratch:$(cat /job/mark) mine:$(cat mark)."
    marks = "for place in /etc /job .; do echo here >$place/mark; done; sync; echo marked"
    lasting = new_parts(more=f"{looks}; {marks}")
    service.wants(1, order(lifecycle="persistent"))
    with kept(lasting):
        wait_out(lasting, "marked")
        assert "root: scratch: mine:." in out(lasting)
        kill(lasting)
        service.wait_running(2)
        wait_out(lasting, "marked")
        assert "root:here scratch:here mine:." in out(lasting)
        assert_forgotten(lasting, service, 2)


def _killed(disk: Path) -> None:
    """Check that the VM was killed during a write: the disk's journal is to be replayed."""
    assert b"needs_recovery" in subprocess.check_output(["dumpe2fs", "-h", disk])


def _without_superblock(disk: Path) -> None:
    with disk.open("r+b") as file:
        file.seek(1024)
        file.write(bytes(1024))


@pytest.mark.parametrize(
    ("damage", "message"), [(_killed, None), (_without_superblock, "cannot be mounted")]
)
def test_a_kept_disk_is_mended_or_left_as_it_is(
    service: Service, new_parts: NewParts, damage: Callable[[Path], None], message: str | None
) -> None:
    more = "cat /job/mine; echo precious >/job/mine; sync; echo marked; cat /dev/zero >/job/more"
    lasting = new_parts(more=more)
    disk = lasting.journal.paths(order().id).kept / "scratch.disk"
    service.wants(1, order(lifecycle="persistent"))
    with kept(lasting):
        wait_out(lasting, "marked")
        assert "precious" not in out(lasting)
    kill(lasting)
    prefix = lasting.journal.prefix
    gone = "the VM is gone, and writes nothing to the disk"
    wait_until(lambda: not any(n.startswith(prefix) for n in UML.list()), SECONDS, gone)
    damage(disk)
    before = disk.read_bytes()
    lasting = new_parts(more=more)
    with kept(lasting):
        if message is None:
            wait_out(lasting, "precious")
        else:
            service.wait(lambda last: message in str(last), "it says why")
            after = disk.read_bytes()
            assert after == before or b"precious\n" in after, "a journal may be replayed, and no more"
        assert_forgotten(lasting, service, 2)


def test_a_vm_that_cannot_be_had_holds_up_no_other(service: Service, new_parts: NewParts) -> None:
    slow = Images(cluster_vm_guest(), stuck="sha256:" + "f" * 64)
    waiting = new_parts(slow)
    service.wants(1, order(0, image=slow.stuck), order(1))
    with kept(waiting):
        service.wait_running(1, number=1)
        service.wait_phase(Phase.STAGING)
        service.wants(2, order(1, goal=Goal.STOP))
        service.wait_phase(Phase.GONE, number=1)
        assert_forgotten(waiting, service, 3)


def test_an_order_reaches_the_script_though_the_answer_is_lost(
    parts: ClusterVmServices, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[list[int]] = []
    accept = GuestSession.take_signals

    def lose_the_first(link: GuestSession, done: int | None) -> list[int]:
        taken = accept(link, done)
        if taken and not lost:
            lost.append(taken)
            return []
        return taken

    monkeypatch.setattr(GuestSession, "take_signals", lose_the_first)
    service.wants(1, order())
    with kept(parts):
        wait_out(parts, "I am tiny-0 (1)")
        service.wants(2, order(admitted=1))
        wait_out(parts, "admitted")
        assert lost == [[signal.SIGUSR1]]
        service.wants(3, order(admitted=1, goal=Goal.DRAIN))
        service.wait_phase(Phase.GONE)
        assert out(parts).count("admitted") == 1
        assert_forgotten(parts, service, 4)


def test_a_record_of_another_release_is_left_alone_with_its_vm(
    parts: ClusterVmServices, service: Service, new_parts: NewParts
) -> None:
    service.wants(1, order())
    with kept(new_parts()):
        service.wait_running(1)
    path, pid = parts.journal.paths(order().id).record, machine_pid(parts)
    understood = path.read_text()
    other = json.dumps({**json.loads(understood), "mood": "good"})
    path.write_text(other)
    with kept(new_parts()):
        service.wait(lambda last: last.code is ClusterVmCode.INTERNAL, "the report of it")
        service.wants(2, order(), order(1))
        service.wait_running(1, number=1)
        assert (service.last().phase, service.last().incarnation) == (Phase.RUNNING, 1)
    assert path.read_text() == other
    assert pid in machine_pids(parts), "besides the other one"
    path.write_text(understood)
    with kept(new_parts()):
        service.wants(3, order(admitted=1))
        wait_out(parts, "admitted")
        assert pid in machine_pids(parts)
        assert_forgotten(parts, service, 4)


def test_a_frozen_vm_is_replaced(
    service: Service, new_parts: NewParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_tokens, "MIN_LIFE_SECONDS", 1.0)
    service.token_seconds = 4.0  # new tokens for a guest are no sign of its life
    impatient = new_parts(silence=12.0)
    service.wants(1, order())
    with kept(impatient):
        service.wait_running(1)
        os.kill(kernel_pid(impatient), signal.SIGSTOP)
        name = impatient.journal.vm_name(order().id, 1)
        wait_until(lambda: UML.state(name) is not VmState.RUNNING, SECONDS, "it is frozen")
        service.wait_running(2)
        assert (service.ended().code, service.ended().failures) == (ClusterVmCode.GUEST_LOST, 1)
        assert service.ended().retry is not None
        assert UML.state(name) is VmState.GONE
        assert_forgotten(impatient, service, 2)


def test_a_condemned_vm_is_replaced_and_a_guest_that_hangs_is_given_up(
    service: Service, new_parts: NewParts
) -> None:
    hanging = new_parts(more="trap '' TERM")
    service.wants(1, order(drain_seconds=1))
    with kept(hanging):
        service.wait_running(1)
        why = {"why": ClusterVmCode.JOIN_TIMED_OUT, "why_message": "it is not in the pool"}
        service.wants(2, order(drain_seconds=1, condemned=1, **why))
        service.wait_running(2)
        ended = service.ended()
        assert (ended.code, ended.message) == (ClusterVmCode.JOIN_TIMED_OUT, "it is not in the pool")
        assert ended.failures == 1
        wait_out(hanging, "I am tiny-0 (2)")
        service.wants(3, order(goal=Goal.DRAIN, drain_seconds=1))
        service.wait_phase(Phase.GONE)
        assert service.last().code is ClusterVmCode.DRAIN_TIMED_OUT
