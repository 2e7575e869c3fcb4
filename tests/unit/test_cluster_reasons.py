"""What people are told about a member, by its state and what its agent said."""

from __future__ import annotations

from repository.clusters.history import reason_of
from repository.clusters.tables import MemberRow
from vmjobs.cluster.member import MemberCode, MemberState, Phase

UNLIMITED = "the speed of its disks is not limited: there is no cgroup"


def member(phase: Phase, message: str = "") -> MemberRow:
    return MemberRow(phase=phase.value, code=MemberCode.PROGRESS.value, message=message)


def test_what_a_machine_is_not_held_to_is_told_for_as_long_as_it_runs() -> None:
    for state in (MemberState.JOINING, MemberState.PROBING, MemberState.UP):
        plain = reason_of(member(Phase.RUNNING), state)[1]
        assert plain
        assert reason_of(member(Phase.RUNNING, UNLIMITED), state)[1] == f"{plain}; {UNLIMITED}"
    booting = reason_of(member(Phase.BOOTING, UNLIMITED), MemberState.BOOTING)
    assert booting == (MemberCode.PROGRESS.value, UNLIMITED)


def test_a_member_with_a_node_that_has_not_heard_of_it_is_told_nothing_of_before() -> None:
    said = reason_of(member(Phase.WAITING, "of before"), MemberState.ASSIGNED)[1]
    assert "of before" not in said
