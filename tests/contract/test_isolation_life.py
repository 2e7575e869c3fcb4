"""The life of a VM whose guest is hostile: its start, its identity and its end."""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.kit.hostile_vms import Node, each, hostile_node
from tests.kit.hypervisors import BOOT, mentioning, said
from tests.kit.waiting import wait_until
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import BootImage, ShutdownCause, VmConfig, VmState
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.sandbox.process_launcher import LaunchedProcess, Launcher
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import BootMethod, HypervisorKind

pytest_plugins = ["tests.kit.hostile_vms"]
node = hostile_node  # tests.kit.agent_node has a fixture of this name


def test_nothing_is_left_of_it_however_it_hides(node: Node) -> None:
    driver, vm = node.driver(isolated=True), node.broken({}, then="hide")
    driver.start(vm)
    assert driver.wait(vm.name, BOOT) is VmState.GONE
    wait_until(lambda: not mentioning(vm.name), what="all are gone")
    driver.destroy(vm.name)


def test_it_cannot_pass_for_another_vm(node: Node, victim: VmConfig) -> None:
    driver, vm = node.begun("pose", victim.name)
    nowhere = f"vmjobs-test-phantom-{secrets.token_hex(6)}"
    _, phantom = node.begun("pose", nowhere)
    wait_until(lambda: len(mentioning(f"umid={victim.name}")) > 4, what="it poses")
    names = driver.list()
    assert {vm.name, phantom.name, victim.name} <= set(names)
    assert nowhere not in names
    driver.destroy(vm.name)
    driver.destroy(phantom.name)
    assert mentioning(vm.name) == mentioning(nowhere) == []
    assert UserModeLinux().state(victim.name) is VmState.RUNNING


def chain(words: str) -> list[int]:
    """Process ids of a VM, oldest first."""
    stats = {
        p: Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split() for p in mentioning(words)
    }
    assert len(stats) == 4
    return sorted(stats, key=lambda pid: (int(stats[pid][19]), pid))


# The first process of a namespace, the third of a VM, ignores SIGTERM.
@pytest.mark.parametrize(
    ("node", "which", "number"),
    [
        *((HypervisorKind.UML, which, signal.SIGKILL) for which in range(4)),
        *((HypervisorKind.UML, which, signal.SIGTERM) for which in (0, 1, 3)),
        *((HypervisorKind.QEMU, which, signal.SIGKILL) for which in range(4)),
    ],
    indirect=["node"],
)
def test_when_one_of_its_processes_is_killed_all_are_gone(
    node: Node, image: BootImage, which: int, number: signal.Signals
) -> None:
    if node.kind is HypervisorKind.UML:
        driver, vm = node.begun(then="stay")
        words = f"umid={vm.name}"
    else:  # the VM need not boot
        driver = Libvirt(HypervisorKind.QEMU, node_connection())
        vm = node.vm(BootImage(image.digest, image.root, boot=BootMethod.BIOS), "do=count")
        driver.start(vm)
        words = f"guest={vm.name},"
    os.kill(chain(words)[which], number)
    assert driver.wait(vm.name, BOOT) is VmState.GONE
    wait_until(lambda: not mentioning(vm.name), what="all are gone")
    assert driver.shutdown_cause(vm.name) in {ShutdownCause.KILLED, ShutdownCause.CRASHED}


def test_who_asks_its_first_process_to_end_asks_it(node: Node) -> None:
    """As libvirt ends QEMU, which then writes the state of its disks."""
    driver, vm = node.begun(then="heed")
    os.kill(chain(f"umid={vm.name}")[0], signal.SIGTERM)
    assert driver.wait(vm.name, BOOT) is VmState.GONE
    wait_until(lambda: not mentioning(vm.name), what="all are gone")
    assert "told to end" in said(vm.console).splitlines()


@pytest.mark.parametrize("node", [HypervisorKind.UML], indirect=True)
def test_one_that_has_ended_before_it_is_looked_at(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Launcher.start

    def start_and_see_it_end(*args: Any) -> LaunchedProcess:
        process = begin(*args)
        assert process.status(BOOT) == 1
        return process

    _break_sandbox(node, monkeypatch)
    monkeypatch.setattr(Launcher, "start", start_and_see_it_end)
    with pytest.raises(HypervisorError, match="cannot isolate VMs here: bwrap: No permissions"):
        node.driver(isolated=True).start(node.broken({}))


def _break_sandbox(node: Node, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a bubblewrap that fails first on the path; return its directory."""
    empty = node.directory / "bin"
    empty.mkdir()
    fake = empty / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{empty}:{os.environ['PATH']}")
    return empty


@each
def test_without_a_sandbox_nothing_runs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """If bubblewrap fails, and if it is missing."""
    empty = _break_sandbox(node, monkeypatch)
    driver, vm = node.driver(isolated=True), node.broken({})
    with pytest.raises(
        HypervisorError, match="cannot isolate VMs here: bwrap: No permissions"
    ) as refused:
        driver.start(vm)
    assert "isolation" in refused.value.hint
    assert not UserModeLinux().probe(BOOT).works
    assert mentioning(vm.name) == []
    if node.kind is HypervisorKind.QEMU:
        return  # its driver needs other programs on the path, too
    monkeypatch.setenv("PATH", str(empty))
    (empty / "bwrap").unlink()
    with pytest.raises(HypervisorError, match="bwrap is not installed"):
        node.driver(isolated=True).start(node.broken({}))
    assert mentioning(vm.name) == []
