"""A cluster of a range of sizes on the grid: no machine, a job, a machine, no machine."""

from __future__ import annotations

from grid_kit import Grid, wait_for
from test_cluster_grid import UP_SECONDS, Submitter, name, operator  # noqa: F401  fixtures

from vmjobs.client import Client
from vmjobs.cluster.spec import ClusterSpec, Size


def shown(grid: Grid, cluster: str) -> str:
    """What the pool says of a machine of the cluster that is switched off: `true`, or nothing."""
    constraint = f'VMJobsCluster == "{cluster}" && Offline =?= true'
    return grid.on("site", "condor_status", "-constraint", constraint, "-af", "Offline").strip()


def test_a_job_wakes_a_cluster_that_sleeps_again_when_it_has_ended(
    grid: Grid,
    operator: Client,  # noqa: F811
    name: str,  # noqa: F811
) -> None:
    spec = ClusterSpec(
        name=name, image="worker", size=Size(min=0, max=2), memory=512, disk=512, idle_seconds=20
    )
    assert operator.clusters.put(spec).cluster.target == 0
    wait_for(lambda: shown(grid, name) == "true" or None, "the pool to show the cluster", 60)
    assert operator.clusters.get(name).members == ()

    user = Submitter(grid)
    job = user.submit(name, "hostname")
    assert user.output(job, timeout=UP_SECONDS) == f"{name}-0.vc\n"
    told = [e.message for e in operator.clusters.events(name) if e.state == "SCALED"]
    assert told == ["1 machine: 1 idle job that only this cluster can run"]

    wait_for(lambda: not operator.clusters.get(name).members or None, "the machine to go", 120)
    assert operator.clusters.get(name).target == 0
    assert shown(grid, name) == "true"
