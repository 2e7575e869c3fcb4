"""What a node keeps of members, and what a kill at any point leaves it with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
from members_kit import NOW, member_order, member_record

from vmjobs.agent.journal import Journal
from vmjobs.agent.members.journal import MemberJournal
from vmjobs.cluster.member import MemberCode, Phase
from vmjobs.cluster.wire import NodeShare
from vmjobs.hypervisor.base import Hypervisor
from vmjobs.hypervisor.uml_boot import MAX_NAME
from vmjobs.model import HypervisorKind

MEMBER = member_order().id


@dataclass
class Machines:
    """Machines by name, as a driver knows them."""

    names: list[str] = field(default_factory=list)

    def list(self) -> list[str]:
        return list(self.names)

    def destroy(self, name: str) -> None:
        self.names.remove(name)

    @property
    def drivers(self) -> dict[HypervisorKind, Hypervisor]:
        return {HypervisorKind.UML: cast(Hypervisor, self)}


@pytest.fixture
def journal(tmp_path: Path) -> MemberJournal:
    return MemberJournal(tmp_path / "members")


def test_a_record_comes_back_as_it_was_kept(journal: MemberJournal) -> None:
    record = member_record(
        incarnation=3, phase=Phase.RUNNING, machine="m", hypervisor="uml", token="t", retry=NOW + 0.25
    )
    journal.write(record)
    assert journal.load() == [record]
    assert journal.root.stat().st_mode & 0o777 == 0o700


def test_the_share_comes_back(journal: MemberJournal) -> None:
    assert journal.last_share() is None
    share = NodeShare(revision=7, members=(member_order(), member_order(1)))
    journal.keep_share(share)
    assert journal.last_share() == share
    (journal.root / "share.json").write_text('{"revision": 7')
    assert journal.last_share() is None


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_a_directory_without_a_good_record_is_removed(
    journal: MemberJournal, content: str | None
) -> None:
    directory = journal.place(MEMBER).directory
    directory.mkdir()
    (directory / "console-1").write_text("left")
    if content is not None:
        (directory / "record.json").write_text(content)
    assert journal.load() == []
    assert not directory.exists()


def test_a_record_of_a_later_release_is_left_alone_and_so_is_its_machine(
    journal: MemberJournal,
) -> None:
    later = later_record(journal, phase=Phase.RUNNING, incarnation=3, hypervisor="uml")
    journal.place(MEMBER).console(3).write_text("console")
    name, other = journal.machine_name(MEMBER, 3), journal.machine_name("f" * 32, 1)
    machines = Machines([name, other])
    assert journal.load() == []
    assert journal.sweep([], machines.drivers) == [other]
    assert machines.names == [name]
    assert journal.place(MEMBER).record.read_text() == later
    assert journal.place(MEMBER).console(3).exists()
    (aside,) = journal.aside()
    told = aside.report(journal.place(MEMBER).record, NOW)
    assert (told.id, told.incarnation, told.phase) == (MEMBER, 3, Phase.RUNNING)
    assert (told.code, told.hypervisor) == (MemberCode.INTERNAL, HypervisorKind.UML)
    assert "left alone" in told.message
    assert journal.clear(machines.drivers) == 1  # an operator wants all of it gone
    assert machines.names == []


@pytest.mark.parametrize("phase", ["dreaming", 7, None, ["running"]])
def test_a_later_release_may_mean_anything(journal: MemberJournal, phase: object) -> None:
    later_record(journal, phase=phase, incarnation="many", hypervisor={})
    (aside,) = journal.aside()
    assert (aside.id, aside.incarnation, aside.phase) == (MEMBER, 0, Phase.WAITING)


def later_record(journal: MemberJournal, **fields: object) -> str:
    """A record that a later release has kept."""
    journal.write(member_record())
    path = journal.place(MEMBER).record
    content = json.dumps({**json.loads(path.read_text()), "mood": "good", **fields})
    path.write_text(content)
    return content


def test_a_half_written_record_counts_as_the_one_before(journal: MemberJournal) -> None:
    record = member_record(phase=Phase.RUNNING)
    journal.write(record)
    (journal.place(MEMBER).directory / "record.tmp").write_text('{"order"')
    assert journal.load() == [record]


def test_forgetting_may_be_cut_off_anywhere(journal: MemberJournal) -> None:
    journal.write(member_record())
    place = journal.place(MEMBER)
    place.begin(1)
    (place.machine / "scratch.disk").write_text("disk")
    place.console(1).write_text("console")
    journal.forget(MEMBER)
    assert not place.directory.exists()
    journal.forget(MEMBER)
    journal.write(member_record())  # killed when all but the record had gone
    assert len(journal.load()) == 1
    journal.forget(MEMBER)
    assert list(journal.root.iterdir()) == []


def test_a_new_machine_finds_nothing_of_the_last_but_its_console(journal: MemberJournal) -> None:
    journal.write(member_record())
    place = journal.place(MEMBER)
    for incarnation in (1, 2, 3):
        place.begin(incarnation)
        (place.machine / "vm").mkdir()
        place.console(incarnation).write_text("console")
    place.begin(4)
    left = sorted(path.name for path in place.directory.iterdir())
    assert left == ["console-3", "machine", "record.json"]
    assert list(place.machine.iterdir()) == []


def test_sweeps_of_jobs_and_of_members_leave_one_another_alone(tmp_path: Path) -> None:
    from vmjobs.agent.journal import sweep

    jobs, members = Journal(tmp_path / "runs"), MemberJournal(tmp_path / "members")
    ours = members.machine_name(MEMBER, 2)
    unknown = members.machine_name(MEMBER, 1)
    job = jobs.machine_name("a" * 32)
    machines = Machines([ours, unknown, job, "vmjobs-of-others"])
    assert members.sweep([member_record(machine=ours)], machines.drivers) == [unknown]
    assert machines.names == [ours, job, "vmjobs-of-others"]
    assert sweep(jobs, machines.drivers) == [job]
    assert machines.names == [ours, "vmjobs-of-others"]


def test_all_members_can_be_removed_at_once(journal: MemberJournal) -> None:
    machines = Machines([journal.machine_name(MEMBER, 2), "vmjobs-of-others"])
    journal.write(member_record(machine=machines.names[0]))
    journal.keep_share(NodeShare(revision=1))
    assert journal.clear(machines.drivers) == 1
    assert machines.names == ["vmjobs-of-others"]
    assert list(journal.root.iterdir()) == []


def test_names_of_machines_are_short_enough_for_uml(journal: MemberJournal) -> None:
    assert len(journal.machine_name("f" * 32, 10**12)) <= MAX_NAME
