"""A node's records of cluster VMs, and what a kill at any point leaves of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from tests.kit.cluster_vm_orders import NOW, cluster_vm_order, cluster_vm_record
from vmjobs.agent.cluster_vms.journal import ClusterVmJournal
from vmjobs.agent.journal import Journal, sweep
from vmjobs.cluster.vm_state import ClusterVmCode, Phase
from vmjobs.cluster.wire import Assignment
from vmjobs.hypervisor.base import Hypervisor
from vmjobs.hypervisor.uml.kernel_boot import MAX_NAME
from vmjobs.model import HypervisorKind

CLUSTER_VM = cluster_vm_order().id


@dataclass
class Machines:
    """VMs by name, as a hypervisor driver lists them."""

    names: list[str] = field(default_factory=list)

    def list(self) -> list[str]:
        return list(self.names)

    def destroy(self, name: str) -> None:
        self.names.remove(name)

    @property
    def drivers(self) -> dict[HypervisorKind, Hypervisor]:
        return {HypervisorKind.UML: cast(Hypervisor, self)}


@pytest.fixture
def journal(tmp_path: Path) -> ClusterVmJournal:
    return ClusterVmJournal(tmp_path / "members")


def test_a_record_comes_back_as_it_was_kept(journal: ClusterVmJournal) -> None:
    record = cluster_vm_record(
        incarnation=3, phase=Phase.RUNNING, machine="m", hypervisor="uml", token="t", retry=NOW + 0.25
    )
    journal.write(record)
    assert journal.load() == [record]
    assert journal.root.stat().st_mode & 0o777 == 0o700


def test_the_assignment_comes_back(journal: ClusterVmJournal) -> None:
    assert journal.load_assignment() is None
    assignment = Assignment(revision=7, members=(cluster_vm_order(), cluster_vm_order(1)))
    journal.store_assignment(assignment)
    assert journal.load_assignment() == assignment
    (journal.root / "share.json").write_text('{"revision": 7')
    assert journal.load_assignment() is None


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_a_directory_without_a_good_record_is_removed(
    journal: ClusterVmJournal, content: str | None
) -> None:
    directory = journal.paths(CLUSTER_VM).directory
    directory.mkdir()
    (directory / "console-1").write_text("left")
    if content is not None:
        (directory / "record.json").write_text(content)
    assert journal.load() == []
    assert not directory.exists()


def test_a_record_of_a_later_release_is_left_alone_and_so_is_its_vm(
    journal: ClusterVmJournal,
) -> None:
    later = later_record(journal, phase=Phase.RUNNING, incarnation=3, hypervisor="uml")
    journal.paths(CLUSTER_VM).console(3).write_text("console")
    name, other = journal.vm_name(CLUSTER_VM, 3), journal.vm_name("f" * 32, 1)
    machines = Machines([name, other])
    assert journal.load() == []
    assert journal.destroy_unknown([], machines.drivers) == [other]
    assert machines.names == [name]
    assert journal.paths(CLUSTER_VM).record.read_text() == later
    assert journal.paths(CLUSTER_VM).console(3).exists()
    (incompatible,) = journal.incompatible()
    told = incompatible.report(journal.paths(CLUSTER_VM).record, NOW)
    assert (told.id, told.incarnation, told.phase) == (CLUSTER_VM, 3, Phase.RUNNING)
    assert (told.code, told.hypervisor) == (ClusterVmCode.INTERNAL, HypervisorKind.UML)
    assert "left alone" in told.message
    assert journal.clear(machines.drivers) == 1  # an operator removes everything
    assert machines.names == []


@pytest.mark.parametrize("phase", ["dreaming", 7, None, ["running"]])
def test_a_later_release_may_mean_anything(journal: ClusterVmJournal, phase: object) -> None:
    later_record(journal, phase=phase, incarnation="many", hypervisor={})
    (incompatible,) = journal.incompatible()
    assert incompatible.id == CLUSTER_VM
    assert (incompatible.incarnation, incompatible.phase) == (0, Phase.WAITING)


def later_record(journal: ClusterVmJournal, **fields: object) -> str:
    """Write a record of a later release; return its text."""
    journal.write(cluster_vm_record())
    path = journal.paths(CLUSTER_VM).record
    content = json.dumps({**json.loads(path.read_text()), "mood": "good", **fields})
    path.write_text(content)
    return content


def test_a_half_written_record_counts_as_the_one_before(journal: ClusterVmJournal) -> None:
    record = cluster_vm_record(phase=Phase.RUNNING)
    journal.write(record)
    (journal.paths(CLUSTER_VM).directory / "record.tmp").write_text('{"order"')
    assert journal.load() == [record]


def test_forgetting_may_be_cut_off_anywhere(journal: ClusterVmJournal) -> None:
    journal.write(cluster_vm_record())
    paths = journal.paths(CLUSTER_VM)
    paths.begin(1)
    (paths.vm_directory / "scratch.disk").write_text("disk")
    paths.console(1).write_text("console")
    journal.forget(CLUSTER_VM)
    assert not paths.directory.exists()
    journal.forget(CLUSTER_VM)
    journal.write(cluster_vm_record())  # a kill left only the record
    assert len(journal.load()) == 1
    journal.forget(CLUSTER_VM)
    assert list(journal.root.iterdir()) == []


def test_a_new_vm_finds_nothing_of_the_last_but_its_console(journal: ClusterVmJournal) -> None:
    journal.write(cluster_vm_record())
    paths = journal.paths(CLUSTER_VM)
    for incarnation in (1, 2, 3):
        paths.begin(incarnation)
        (paths.vm_directory / "vm").mkdir()
        paths.console(incarnation).write_text("console")
    paths.begin(4)
    left = sorted(path.name for path in paths.directory.iterdir())
    assert left == ["console-3", "machine", "record.json"]
    assert list(paths.vm_directory.iterdir()) == []


def test_sweeps_of_jobs_and_of_vms_leave_one_another_alone(tmp_path: Path) -> None:
    jobs, vms = Journal(tmp_path / "runs"), ClusterVmJournal(tmp_path / "members")
    ours = vms.vm_name(CLUSTER_VM, 2)
    unknown = vms.vm_name(CLUSTER_VM, 1)
    job = jobs.vm_name("a" * 32)
    machines = Machines([ours, unknown, job, "vmjobs-of-others"])
    assert vms.destroy_unknown([cluster_vm_record(machine=ours)], machines.drivers) == [unknown]
    assert machines.names == [ours, job, "vmjobs-of-others"]
    assert sweep(jobs, machines.drivers) == [job]
    assert machines.names == [ours, "vmjobs-of-others"]


def test_all_vms_can_be_removed_at_once(journal: ClusterVmJournal) -> None:
    machines = Machines([journal.vm_name(CLUSTER_VM, 2), "vmjobs-of-others"])
    journal.write(cluster_vm_record(machine=machines.names[0]))
    journal.store_assignment(Assignment(revision=1))
    assert journal.clear(machines.drivers) == 1
    assert machines.names == ["vmjobs-of-others"]
    assert list(journal.root.iterdir()) == []


def test_names_of_vms_are_short_enough_for_uml(journal: ClusterVmJournal) -> None:
    assert len(journal.vm_name("f" * 32, 10**12)) <= MAX_NAME
