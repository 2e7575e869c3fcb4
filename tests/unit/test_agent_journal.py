"""What a killed agent leaves behind, and how the next one recovers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.full_disk import nothing_fits
from vmjobs.agent.journal import RECORD_FILE, Journal, RunRecord, sweep, write_durably
from vmjobs.errors import HypervisorError
from vmjobs.model import HypervisorKind

ATTEMPT = "a" * 32


class Shelf:
    """VMs by name, as a driver sees them; it can be made to fail."""

    kind = HypervisorKind.UML

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.broken = False

    platform = ""

    def destroy(self, name: str) -> None:
        if self.broken:
            raise HypervisorError("cannot destroy it")
        if name in self.names:
            self.names.remove(name)

    def list(self) -> list[str]:
        return list(self.names)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """A journal; its directory must be empty after each test."""
    yield Journal(tmp_path)
    assert list(tmp_path.iterdir()) == []


def record(journal: Journal) -> RunRecord:
    return RunRecord(ATTEMPT, "job", journal.vm_name(ATTEMPT), HypervisorKind.UML)


def killed(journal: Journal) -> Path:
    """The directory of a run as it is while the run is in progress."""
    with journal.run(record(journal), Shelf()) as directory:
        (directory / "disk").write_bytes(b"x")
        (directory / "machine").mkdir()
        copy = directory.with_name("copy")
        directory.rename(copy)
        directory.mkdir()
        (directory / RECORD_FILE).write_bytes((copy / RECORD_FILE).read_bytes())
    copy.rename(directory)
    return directory


def test_a_run_that_ends_leaves_nothing(journal: Journal) -> None:
    shelf = Shelf(journal.vm_name(ATTEMPT))
    with journal.run(record(journal), shelf) as directory:
        assert (directory / RECORD_FILE).exists()
    assert shelf.names == []


def test_a_run_that_finds_no_room_leaves_nothing(journal: Journal, tmp_path: Path) -> None:
    with nothing_fits(), pytest.raises(OSError), journal.run(record(journal), Shelf()):
        raise AssertionError("it began")
    assert list(tmp_path.iterdir()) == []
    with journal.run(record(journal), Shelf()) as directory:
        assert directory.exists(), "once there is room, it begins"


def test_what_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a" / "kept"
    file.parent.mkdir()
    write_durably(file, b"before")
    with nothing_fits(), pytest.raises(OSError):
        write_durably(file, b"after")
    assert [path.read_bytes() for path in file.parent.iterdir()] == [b"before"]


def test_another_driver_may_turn_out_to_be_needed(journal: Journal) -> None:
    name = journal.vm_name(ATTEMPT)
    first, second = Shelf(), Shelf(name)
    with journal.run(record(journal), first):
        journal.reassign(ATTEMPT, journal.vm_name(ATTEMPT), second)
    assert second.names == []


def test_the_other_driver_is_known_after_a_kill(journal: Journal, tmp_path: Path) -> None:
    """So is the name of an earlier run that its VM keeps."""
    killed(journal)
    machine = journal.vm_name("b" * 32)
    second = Shelf(machine)
    second.kind = HypervisorKind.QEMU
    journal.reassign(ATTEMPT, machine, second)
    (left,) = Journal(tmp_path).recover({HypervisorKind.UML: Shelf(), second.kind: second})
    assert (left.record.machine, left.record.hypervisor) == (machine, HypervisorKind.QEMU)
    assert second.names == []


def test_a_vm_that_cannot_be_removed_keeps_its_record(journal: Journal, tmp_path: Path) -> None:
    shelf = Shelf(journal.vm_name(ATTEMPT))
    shelf.broken = True
    with pytest.raises(HypervisorError), journal.run(record(journal), shelf):
        pass
    shelf.broken = False
    (left,) = Journal(tmp_path).recover({HypervisorKind.UML: shelf})
    assert (left.record.job, left.outcome, shelf.names) == ("job", "", [])


def test_what_a_killed_agent_left_is_removed_and_its_verdict_survives(journal: Journal) -> None:
    assert killed(journal).exists()
    journal.record_outcome(ATTEMPT, '{"state": "COMPLETED"}')
    shelf = Shelf(journal.vm_name(ATTEMPT))
    (left,) = journal.recover({HypervisorKind.UML: shelf})
    assert (left.outcome, shelf.names) == ('{"state": "COMPLETED"}', [])


def test_a_directory_without_record_had_no_vm(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / ATTEMPT).mkdir()
    assert journal.recover({}) == []


def test_only_vms_of_this_journal_are_swept(tmp_path: Path) -> None:
    journal, other = Journal(tmp_path / "a"), Journal(tmp_path / "b")
    shelf = Shelf(journal.vm_name(ATTEMPT), other.vm_name(ATTEMPT))
    assert sweep(journal, {HypervisorKind.UML: shelf}) == [journal.vm_name(ATTEMPT)]
    assert shelf.names == [other.vm_name(ATTEMPT)]


def test_a_vm_that_keeps_the_name_of_an_earlier_run_is_not_swept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs")
    machine = journal.vm_name("b" * 32)
    shelf = Shelf(machine)
    with journal.run(record(journal), shelf):
        journal.reassign(ATTEMPT, machine, shelf)
        assert sweep(journal, {HypervisorKind.UML: shelf}) == []
    assert shelf.names == []
