"""The agent on a node whose disk is full: it can write none of its own files."""

from __future__ import annotations

from tests.kit.cluster_vm_node import Service, kept, order, remains
from tests.kit.full_disk import nothing_fits
from vmjobs.agent.cluster_vms.reconciler import RETRY_SECONDS, Reconciler
from vmjobs.agent.cluster_vms.services import ClusterVmServices
from vmjobs.cluster.vm_state import ClusterVmCode, Phase
from vmjobs.cluster.wire import Assignment

pytest_plugins = ["tests.kit.cluster_vm_node"]
NOW = 1_800_000_000.0


def test_a_vm_of_which_nothing_can_be_kept_says_so_and_mends(
    parts: ClusterVmServices, service: Service
) -> None:
    keeper = Reconciler(parts, lambda: NOW)
    keeper.accept(Assignment(revision=1, members=(order(),)))
    with nothing_fits():
        until = keeper.step(NOW)
    assert until == NOW + RETRY_SECONDS
    (report,) = parts.reporter.known()
    assert (report.phase, report.code) == (Phase.WAITING, ClusterVmCode.NODE_FAILED)
    assert "record cannot be stored" in report.message
    assert "too large" in report.message
    # A partial record does not count: the next agent starts anew.
    assert parts.journal.load() == []
    assert remains(parts) == []

    service.wants(1, order())
    with kept(parts):
        service.wait_running(1)


def test_what_was_told_of_a_full_disk_is_taken_back(parts: ClusterVmServices) -> None:
    keeper = Reconciler(parts, lambda: NOW)
    keeper.accept(Assignment(revision=1, members=(order(),)))
    with nothing_fits():
        keeper.step(NOW)
    # The VM is no longer wanted when there is space again; its record is unchanged.
    keeper.accept(Assignment(revision=2, members=(order(goal="drain"),)))
    with nothing_fits():
        keeper.step(NOW + 1)
    assert [r.code for r in parts.reporter.known()] == [ClusterVmCode.NODE_FAILED]
    keeper.step(NOW + 2)
    assert [(r.phase, r.code) for r in parts.reporter.known()] == [(Phase.GONE, ClusterVmCode.DRAINED)]
