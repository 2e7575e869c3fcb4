"""Two clusters with different releases of an operating system, on the same nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kit import ROOT
from tests.kit.cli import vmjobs
from tests.kit.grid import NODES, Grid
from tests.kit.grid_clusters import Submitter, delete, up
from vmjobs.client import Client
from vmjobs.cluster.spec import ClusterSpec

FORKY = ROOT / "examples" / "worker-forky.toml"
BUILD_SECONDS = 900
#: The attributes of a machine ad in which HTCondor describes the operating system.
ATTRIBUTES = ("OpSysAndVer", "OpSysName", "OpSysLongName", "OpSysMajorVer")


def operate(*words: str, grid: Grid, state: Path, environ: Mapping[str, str] = os.environ) -> str:
    own: dict[str, Any] = {"image_dir": grid.images.root, "token_file": grid.admin_token}
    return vmjobs(*words, code=0, timeout=BUILD_SECONDS, environ=environ, state_dir=state, **own).out


@pytest.fixture(scope="module")
def images(grid: Grid, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Image by release; the second is built if missing, booted, and pushed to the library."""
    state = tmp_path_factory.mktemp("state")
    operate("image", "build", str(FORKY), grid=grid, state=state)
    operate(
        "image", "push", "worker-forky", "--namespace", "library", "--public", grid=grid, state=state
    )
    return {"trixie": "worker", "forky": "worker-forky"}


@pytest.fixture
def clusters(images: dict[str, str], operator: Client) -> Iterator[dict[str, str]]:
    """Cluster by release, each with a VM on each node."""
    farm = f"r{os.urandom(4).hex()}"
    made = {release: f"{farm}-{release}" for release in images}
    try:
        for release, name in made.items():
            spec = ClusterSpec(
                name=name,
                image=images[release],
                size=len(NODES),
                memory=512,
                disk=512,
                attributes={"Farm": farm},
            )
            operator.clusters.put(spec)
        yield made
    finally:
        for name in made.values():
            delete(operator, name)


def ads(grid: Grid, cluster: str) -> set[tuple[str, ...]]:
    """The distinct systems in the collector's ads of a cluster's VMs."""
    constraint = f'VMJobsCluster == "{cluster}" && PartitionableSlot =?= true'
    told = grid.on("site", "condor_status", "-constraint", constraint, "-af:,", *ATTRIBUTES)
    return {tuple(word.strip() for word in line.split(",")) for line in told.splitlines()}


@pytest.mark.soak
def test_each_release_advertises_itself_and_runs_the_jobs_that_ask_for_it(
    grid: Grid,
    operator: Client,
    clusters: dict[str, str],
    tmp_path: Path,
) -> None:
    told: dict[str, tuple[str, ...]] = {}
    for release, name in clusters.items():
        cluster = up(operator, name, len(NODES))
        assert {vm.node for vm in cluster.members} == {f"{node}.grid" for node in NODES}
        (told[release],) = ads(grid, name)
        # The operator sees the system that the VMs report.
        assert {vm.system for vm in cluster.members} == {told[release][2]}
    assert told["trixie"][0] == "Debian13"
    assert told["trixie"][2].startswith("Debian GNU/Linux 13")
    assert "forky" in told["forky"][2]
    assert told["forky"][0] != told["trixie"][0]

    # Jobs name a system, not a cluster. The farm keeps them off other VMs of these releases.
    farm = clusters["trixie"].partition("-")[0]
    user = Submitter(grid)
    jobs = {
        release: user.submit_where(
            f'TARGET.OpSysAndVer == "{system[0]}" && TARGET.OpSysLongName == "{system[2]}"'
            f' && TARGET.Farm == "{farm}"',
            "hostname; . /etc/os-release; echo $VERSION_CODENAME; echo $PRETTY_NAME",
        )
        for release, system in told.items()
    }
    for release, job in jobs.items():
        host, codename, pretty = user.output(job, timeout=240).splitlines()
        assert host.rpartition("-")[0] == clusters[release]
        assert codename == release
        assert pretty.startswith(told[release][2])  # HTCondor leaves out a name in brackets

    for release, name in clusters.items():
        for columns in (80, 120):
            terminal = {**os.environ, "COLUMNS": str(columns), "FORCE_COLOR": "1"}
            shown = operate("cluster", "show", name, grid=grid, state=tmp_path, environ=terminal)
            assert shown.count(told[release][2]) == len(NODES)
