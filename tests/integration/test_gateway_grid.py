"""A gateway beside the grid: a node with an agent joins its pool, and runs jobs of the grid in VMs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.kit.grid import PHYSICIST, Grid, run, wait_for
from tests.kit.grid_gateway import Gateway
from tests.kit.hypervisors import host_addresses, kill_all
from tests.kit.sockets import free_ports
from tests.kit.submit_host import Desk
from vmjobs.model import JobState

pytestmark = [pytest.mark.soak, pytest.mark.disruptive]

#: Seconds for a node to change the pool, and for jobs to end while the computing element boots.
CHANGE, JOBS = 120.0, 400.0
NODE, HOST = "node2", "node2.grid"
NODE_CONFIG = "/etc/condor/config.d/25-gateway-tier3.conf"
USERS = ("vmjobs", PHYSICIST)
DECLARED = """\
gateway: tier3
domain: tier3.example
network: 10.77.0.0/24
host: {host}
people: {{vmjobs: {{}}, physicist: {{}}}}
machines:
  ce:
    role: computing-element
    image: gateway-ce
    address: 10.77.0.10
    memory: 384
    disk: 512
    publish: [{port}]
"""


def grid_up(routes: str) -> None:
    """Give the grid's service these routes, besides its own."""
    state = Path(os.environ["VMJOBS_TOKEN_FILE"]).parent.relative_to(ROOT)
    environ = {
        **os.environ,
        "VMJOBS_PROJECT": os.environ["VMJOBS_GRID"],
        "VMJOBS_GRID_STATE": str(state),
    }
    environ |= {"VMJOBS_ROUTES": f"grid=condor site.grid site.grid{routes}", "GRID_SECONDS": "400"}
    subprocess.run([ROOT / "deploy" / "grid.sh", "up"], env=environ, check=True, capture_output=True)


def volume(grid: Grid, service: str, place: str) -> Path:
    """The directory of this host that is mounted in a container, maybe without the right to write."""
    mounts = json.loads(run("docker", "inspect", "-f", "{{json .Mounts}}", grid.container(service)))
    return next(Path(mount["Source"]) for mount in mounts if mount["Destination"] == place)


@pytest.fixture(scope="module")
def gateway(grid: Grid, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a computing element, to which one of the grid's nodes belongs meanwhile."""
    folder = tmp_path_factory.mktemp("g")
    made = Gateway(folder / "state", *free_ports(1))
    text = DECLARED.format(host=host_addresses()[0], port=made.pool_port)
    (folder / "gateway.yaml").write_text(text)
    made.command("install", folder / "gateway.yaml")
    ready = ("condor_status", "-constraint", "HasVMJobs", "-autoformat", "Machine")
    tokens = [volume(grid, "submit", f"/home/{user}/.condor/tokens.d") / "tier3" for user in USERS]
    try:
        made.command("boot")
        for user, path in zip(USERS, tokens, strict=True):
            path.write_bytes(made.command("token", user).stdout)
            owner = path.parent.stat()
            os.chown(path, owner.st_uid, owner.st_gid)
            path.chmod(0o600)
        grid_up(f";tier3=condor ce.tier3.example {pool(made)}")
        made.command("worker add", HOST, "--output", folder, "--account", "vmjobs")
        config = folder / "60-gateway-tier3.conf"
        # HTCondor reads it before the configuration of vmjobs, 30-vmjobs.conf, as it must.
        run("docker", "cp", str(config), f"{grid.container(NODE)}:{NODE_CONFIG}")
        shutil.copy(folder / "token", volume(grid, NODE, "/etc/condor/tokens.d") / "gateway-tier3")
        run("docker", "restart", grid.container(NODE))
        wait_for(lambda: HOST in made.run("ce", " ".join(ready)), "the node in the pool", CHANGE)
        yield made
    finally:
        for force in ((), ("-forcex",)):
            gone = ("-constraint", 'regexp("ce[.]tier3[.]example", GridResource)')
            grid.on("submit", "condor_rm", *force, *gone, check=False)
        grid.on(NODE, "rm", "-f", NODE_CONFIG)
        for path in (*tokens, volume(grid, NODE, "/etc/condor/tokens.d") / "gateway-tier3"):
            path.unlink(missing_ok=True)
        run("docker", "restart", grid.container(NODE))
        grid_up("")
        made.command("delete", "--yes")
        wait_for(lambda: HOST in grid.on("site", *ready), "the node in the grid's pool", CHANGE)


def pool(gateway: Gateway) -> str:
    return f"{host_addresses()[0]}:{gateway.pool_port}"


def test_jobs_of_a_service_run_by_its_route_though_the_computing_element_dies(
    grid: Grid, gateway: Gateway
) -> None:
    jobs = grid.submit("echo begun; sleep 20; echo done", count=4, route="tier3")
    for job in jobs:
        grid.until(job, JobState.RUNNING)
    owners = grid.on(NODE, "pgrep", "-fa", "-u", "vmjobs", "vmjobs").splitlines()
    assert len(owners) >= len(jobs), "they run as the account of that name"
    # A collector that has lost its list of connections to nodes gets them back some minutes later.
    gateway.run("ce", "sync")
    kill_all(str(gateway.place / "members"))
    for job in grid.wait(*jobs, timeout=JOBS):
        assert (job.state, grid.out(job)) == (JobState.COMPLETED, "begun\ndone\n"), job.reason
        assert job.node == HOST
    grid.assert_clean(*jobs)


def test_a_transparent_job_comes_by_condor_c(grid: Grid, gateway: Gateway) -> None:
    route = f"""
universe = grid
grid_resource = condor ce.tier3.example {pool(gateway)}
+remote_ShouldTransferFiles = "YES"
+remote_WhenToTransferOutput = "ON_EXIT"
"""
    with Desk(grid, "submit", route) as desk:
        ended = desk.succeeded(desk.submit("uname -n; id -un; cat data"))
        assert ended["ChirpVMNode"] == HOST
        told = desk.read("out").splitlines()[1:]
        assert told == ["nobody", "from a file"], "the node has no account for physicist"
