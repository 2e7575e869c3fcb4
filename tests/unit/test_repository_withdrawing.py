"""Records of incarnations whose ads are withdrawn from the pool."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from repository.clusters.reconciler import _ActionExecutor
from repository.clusters.tables import ClusterVmRow
from vmjobs.cluster.actions import RemoveAd


@pytest.mark.parametrize(
    ("incarnation", "before", "told", "after"),
    [
        (2, 0, {1, 2}, 2),
        (2, 1, {2}, 2),
        (2, 2, set(), 2),
        # The next ad was withdrawn too, when the cluster VM was to be deleted. The VM stayed; once it
        # is deleted, that ad has to be withdrawn again, or the VM never goes.
        (2, 0, {1, 2, 3}, 2),
        (2, 2, {3}, 2),
    ],
)
def test_no_vm_that_is_not_there_yet_counts_as_withdrawn(
    incarnation: int, before: int, told: set[int], after: int
) -> None:
    row = ClusterVmRow(id="m", incarnation=incarnation, withdrawn=before, advertised=incarnation)
    world: Any = SimpleNamespace(vms={"m": row})
    nothing: Any = None
    doing = _ActionExecutor(nothing, nothing, world, {"m": told}, datetime.now(UTC))
    doing.carry_out(RemoveAd("m"))
    assert row.withdrawn == after
    assert row.advertised == (0 if incarnation in told else incarnation)
