"""The reason shown for a cluster VM, from its state and its agent's report."""

from __future__ import annotations

from repository.clusters.history import reason_of
from repository.clusters.tables import ClusterVmRow
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Phase

UNLIMITED = "the speed of its disks is not limited: there is no cgroup"


def vm(phase: Phase, message: str = "") -> ClusterVmRow:
    return ClusterVmRow(phase=phase.value, code=ClusterVmCode.PROGRESS.value, message=message)


def test_what_a_vm_is_not_held_to_is_told_for_as_long_as_it_runs() -> None:
    for state in (ClusterVmState.JOINING, ClusterVmState.PROBING, ClusterVmState.UP):
        plain = reason_of(vm(Phase.RUNNING), state)[1]
        assert plain
        assert reason_of(vm(Phase.RUNNING, UNLIMITED), state)[1] == f"{plain}; {UNLIMITED}"
    booting = reason_of(vm(Phase.BOOTING, UNLIMITED), ClusterVmState.BOOTING)
    assert booting == (ClusterVmCode.PROGRESS.value, UNLIMITED)


def test_a_vm_with_a_node_that_has_not_heard_of_it_is_told_nothing_of_before() -> None:
    said = reason_of(vm(Phase.WAITING, "of before"), ClusterVmState.ASSIGNED)[1]
    assert "of before" not in said
