"""Jobs of all kinds on a node that is a Xen host, which `make xen` adds to a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.kit.cli import vmjobs
from tests.kit.foreign_images import (
    FIT,
    LIFETIME,
    disk,
    kernel,
    kernel_options,
    push,
    submit,
    with_unpacked_kernel,
)
from tests.kit.grid import Grid
from tests.kit.grid_clusters import Submitter, up
from tests.kit.submit_host import Desk, site
from vmjobs.client import Client
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.model import ExitChannel, HypervisorKind, JobState

__all__ = ["site"]

pytestmark = [pytest.mark.soak, pytest.mark.xen, pytest.mark.timeout(1800)]

NODE: Final = "node-xen.grid"
HERE: Final = f'TARGET.Machine == "{NODE}"'


@pytest.fixture(scope="module", autouse=True)
def offered(operator: Client) -> None:
    """The agent of the Xen host has booted a VM."""
    nodes = {
        node.name: [found.kind for found in node.hypervisors if found.works]
        for node in operator.nodes()
    }
    assert nodes[NODE] == [HypervisorKind.XEN]


def test_a_script_job(grid: Grid) -> None:
    script = "#!/bin/sh\ncat /sys/hypervisor/type\nnproc\nls -d /sys/class/net/e*\nexit 3\n"
    (job,) = grid.wait(*grid.submit(script, cpus=2, hypervisor=HypervisorKind.XEN), timeout=600)
    assert (job.state, job.node) == (JobState.FAILED, NODE), job.reason
    assert job.exit is not None
    assert (job.exit.code, job.exit.channel) == (3, ExitChannel.ENDPOINT)
    kind, cpus, *cards = grid.out(job).split()
    assert (kind, cpus, len(cards)) == ("xen", "2", 1)


def test_jobs_with_their_own_kernels(grid: Grid, tmp_path: Path) -> None:
    """One kernel is stored beside its disk, one starts by the GRUB menu on its disk."""
    linux, initrd = kernel()
    files = ("--kernel", linux, "--initrd", initrd, "--xen")
    push(disk("trixie"), "xen-kernel", *files, *kernel_options("odd-poweroff"))
    push(with_unpacked_kernel(tmp_path), "xen-grub", "--boot", "bios", "--xen")
    options = ("--exit", "poweroff", "--hypervisor", "xen", "--memory", "256", "--output", "*.csv")
    names = [
        submit(image, *options, "--boot-seconds", "900")[0] for image in ("xen-kernel", "xen-grub")
    ]
    for job in grid.wait(*(grid.api.job(name) for name in names), timeout=600):
        assert (job.state, job.node) == (JobState.COMPLETED, NODE), job.reason
        vmjobs("job", "outputs", job.id, "--fetch", tmp_path / job.id, code=0)
        assert (tmp_path / job.id / "fit.csv").read_text("utf-8") == FIT
        assert LIFETIME in vmjobs("job", "console", job.id).out


def test_an_ordinary_job_with_one_line_and_a_login_to_it(site: Desk) -> None:
    cluster = site.submit(
        "cat data /sys/hypervisor/type; until [ -e /tmp/over ]; do sleep 1; done; kill -TERM $$",
        requirements=HERE,
    )
    site.running(cluster)
    login = site("condor_ssh_to_job", "-auto-retry", cluster, "uname -n; touch /tmp/over")
    assert login.splitlines()[-1] == "vmjob-0"
    ad = site.ended(cluster)
    ending = ad["JobStatus"], ad.get("ExitBySignal"), ad.get("ExitSignal")
    assert ending == (4, True, 15), ad.get("HoldReason")
    assert site.read("out") == "from a file\nxen\n"


def test_a_virtual_cluster(grid: Grid, operator: Client, name: str) -> None:
    spec = ClusterSpec(name=name, image="worker", size=1, memory=512, disk=512, nodes=(NODE,))
    operator.clusters.put(spec.model_copy(update={"boot_seconds": 900, "join_seconds": 900}))
    (vm,) = up(operator, name, 1).members
    assert (vm.node, vm.hypervisor) == (NODE, HypervisorKind.XEN)
    user = Submitter(grid)
    job = user.submit(name, "hostname; cat /sys/hypervisor/type")
    assert user.output(job, timeout=600).split() == [f"{name}-0.vc", "xen"]
