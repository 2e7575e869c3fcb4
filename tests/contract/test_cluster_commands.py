"""``vmjobs cluster`` as typed, with the real REST interface, and agents that obey."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.api_site import Site
from tests.kit.cli import Run
from tests.kit.cluster_nodes import POOLS, World
from tests.kit.repository_jobs import clusters_of
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal, Phase

pytestmark = pytest.mark.settings(pools=POOLS)
Shell = Callable[..., str]
DECLARED = """\
name: vc
image: tiny
size: 2
memory: 256
disk: 100
"""


@pytest.fixture
def shell(site: Site, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Run) -> Shell:
    """The command line of an administrator; returns all that it prints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text(site.admin().token)
    (tmp_path / "vc.yaml").write_text(DECLARED)
    monkeypatch.setenv("VMJOBS_API_URL", url)
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", str(tmp_path / "token"))

    def run(*words: str, status: int = 0) -> str:
        done = typed(*words, code=status)
        return done.out + done.err

    return run


@contextmanager
def at_work(world: World) -> Iterator[None]:
    """Run the worker and the nodes' agents while a command waits for them."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.05):
            if clusters_of(world.repository):  # its declaration may take a moment
                world.bring_up()
                world.obey("n1", "n2")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_cluster_from_its_declaration_to_its_end(world: World, shell: Shell) -> None:
    assert "room for 2 VMs (1 on n1, 1 on n2)" in shell("cluster", "validate", "vc.yaml")
    assert "vc would be created" in shell("cluster", "diff", "vc.yaml", status=1)
    with at_work(world):
        said = shell("cluster", "apply", "--wait", "--timeout", "240", "vc.yaml")
    assert "vc created, 2 VMs of tiny" in said
    assert set(world.states().values()) == {ClusterVmState.UP}
    assert shell("cluster", "apply", "vc.yaml") == "vc unchanged\n"
    assert shell("cluster", "diff", "vc.yaml") == ""
    assert "2 UP of 2 (size 2)" in shell("cluster", "show", "vc")
    assert "1 of 4 cpus, 256 of 1024 MiB" in shell("node", "list")
    Path("vc.yaml").write_text(DECLARED.replace("disk: 100", "disk: 120"))
    with at_work(world):
        said = shell("cluster", "apply", "--wait", "--timeout", "240", "vc.yaml")
        assert "vc changed\n  disk: 100 -> 120\n" in said
        assert {m.generation for m in world.vms().values() if m.goal is Goal.RUN} == {2}
        assert "vc: 2 -> 3 VMs" in shell("cluster", "scale", "vc", "3", "--wait", "--timeout", "240")
    assert "size: 3 -> 2" in shell("cluster", "diff", "vc.yaml", status=1)
    assert "3 VMs up, 0 of them with jobs" in shell("cluster", "drain", "vc")
    assert "vc is drained" in shell("cluster", "apply", "--wait", "vc.yaml", status=65)
    assert "vc is resumed" in shell("cluster", "resume", "vc")
    assert "vc is deleted" in shell("cluster", "delete", "--now", "vc")
    assert "is being deleted" in shell("cluster", "apply", "vc.yaml", status=65)
    world.step()
    assert {order.goal for node in ("n1", "n2") for order in world.orders(node).values()} == {Goal.STOP}
    world.obey("n1", "n2")
    world.step()
    shell("cluster", "show", "vc", status=66)
    assert clusters_of(world.repository) == []


def test_faults_that_the_service_finds_have_lines(world: World, shell: Shell) -> None:
    Path("vc.yaml").write_text(
        DECLARED.replace("tiny", "nosuch")
        + "pool: elsewhere\nattributes:\n  Tier: 2\n  Machine: mine\nstart: TARGET.x = 3\n"
    )
    said = shell("cluster", "validate", "vc.yaml", status=64)
    faults = [line.strip() for line in said.splitlines()[1:]]
    expected = (
        "vc.yaml:2:1: image: there is no image nosuch",
        "vc.yaml:6:1: pool: there is no pool 'elsewhere'",
        "vc.yaml:9:3: attributes.Machine: Machine is HTCondor's own",
        "vc.yaml:10:1: start: start is not a ClassAd expression: '=' assigns",
    )
    for fault, begin in zip(faults, expected, strict=True):
        assert fault.startswith(begin)
    assert shell("cluster", "apply", "vc.yaml", status=64).count("vc.yaml:") == 4
    assert clusters_of(world.repository) == []


def test_a_declaration_that_fails_is_taken_back_and_tried_again(world: World, shell: Shell) -> None:
    shell("cluster", "apply", "vc.yaml")
    world.bring_up()
    world.step()
    Path("vc.yaml").write_text(DECLARED.replace("disk: 100", "disk: 120"))
    shell("cluster", "apply", "vc.yaml")
    world.step()
    world.obey("n1", "n2")
    (new,) = [m for m in world.vms().values() if m.generation == 2]
    more = {"failures": 3, "code": ClusterVmCode.KERNEL_PANIC, "message": "no root"}
    world.report(new, Phase.WAITING, 3, **more)
    world.step()
    why = (
        f"generation 2 failed ({new.name} failed 3 times: KERNEL_PANIC: no root): back to generation 1"
    )
    shown = " ".join(shell("cluster", "show", "vc").split())
    assert why in shown
    assert f"guard {new.node}: 3 VMs of " in shown
    assert "generation 2 failed" in shell("cluster", "list")
    said = shell("cluster", "events", "vc")
    assert why in said
    assert "GUARD_CLOSED" in said
    said = shell("cluster", "apply", "vc.yaml")
    assert said.startswith(f"vc unchanged\n  {why}; fix the declaration, or retry it")
    assert shell("cluster", "diff", "vc.yaml") == ""
    assert why in shell("cluster", "apply", "--wait", "vc.yaml", status=65)
    with at_work(world):
        shell("cluster", "scale", "vc", "2", "--wait", "--timeout", "240")  # scales generation 1
        said = shell("cluster", "retry", "vc", "--wait", "--timeout", "240")
    assert said.startswith("vc is retried: generation 2 is declared again\n")
    assert {m.generation for m in world.vms().values() if m.goal is Goal.RUN} == {3}
    assert "guard" not in shell("cluster", "show", "vc")
