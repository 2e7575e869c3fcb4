"""A cluster VM and its pool, without the service: token, probe, drain.

The VM is a container with the guest's real script and startd, the real network to the site's central
manager, and real signals.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from typing import Any, Final

import pytest

from condor.worker import WorkerKit
from tests.kit import ROOT
from tests.kit.grid import PHYSICIST, Grid, run, wait_for
from tests.kit.grid_pool import advertise, as_bearer, mint, pool, withdraw
from vmjobs.cluster.pool import PoolVm
from vmjobs.cluster.vm_state import Goal
from vmjobs.cluster.wire import ClusterVmOrder, PoolAddress

PORT: Final = 8099
TOKEN: Final = "/run/vmjobs/pool-token"

#: The VM's guest endpoint, as far as the script uses it.
ENDPOINT: Final = f"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers["Authorization"] == "Bearer job" and self.path == "/v1/token"
        body = open("{TOKEN}", "rb").read() if known else b""
        self.send_response(200 if known else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", {PORT}), Handler).serve_forever()
"""


class Machine:
    """A container in place of a cluster VM."""

    def __init__(self, grid: Grid, folder: Path, name: str, **fields: Any) -> None:
        self.grid, self.name = grid, name
        self.order = ClusterVmOrder(
            id=uuid.uuid4().hex,
            cluster=name.rpartition("-")[0],
            name=name,
            goal=Goal.RUN,
            image="sha256:" + "0" * 64,
            cpus=1,
            memory=512,
            disk=512,
            pool=PoolAddress(name="site", collector="site.grid", trust_domain="grid"),
            boot_seconds=100,
            drain_seconds=100,
            **fields,
        )
        self.known = PoolVm(name, 1, self.order.id)
        self._kit = folder
        self.container = run(
            *("docker", "run", "-d", "--init", "--network", f"{grid.project}_grid", "--user", "root"),
            *(f"{grid.project}/builder", "sleep", "infinity"),
        ).strip()

    def start(self, token: str) -> None:
        """Install the files where the guest program does, and run the script as it does."""
        for name, content in WorkerKit().files(self.order, 1).items():
            (self._kit / name).write_bytes(content)
        self("mkdir", "-p", "/job", "/run/vmjobs/job", "/run/lock", "/usr/lib/vmjobs")
        run("docker", "cp", str(self._kit), f"{self.container}:/job/work")
        for part in ("base.sh", "http.sh", "talk"):
            run(
                "docker",
                "cp",
                str(ROOT / "images" / "guest" / part),
                f"{self.container}:/usr/lib/vmjobs/",
            )
        self(
            "sh",
            "-c",
            "rm -f /etc/condor/config.d/*; chown -R root:root /job/work; chmod 0755 /job/work",
        )
        env = f"VMJOBS_ENDPOINT='http://127.0.0.1:{PORT}'\\nVMJOBS_TOKEN='job'\\n"
        self("sh", "-c", f'printf "{env}" >/run/vmjobs/job/job.env')
        self.put_token(token)
        run("docker", "exec", "-d", self.container, "python3", "-c", ENDPOINT)
        wait_for(lambda: f":{PORT:04X} " in self("cat", "/proc/net/tcp") or None, "the endpoint", 60)
        script = "cd /job/work; echo $$ >/run/pid; exec sh ./script"
        wrapped = f"setsid --wait sh -c '{script}' >/run/said 2>&1; echo $? >/run/status"
        run("docker", "exec", "-d", self.container, "sh", "-c", wrapped)

    def put_token(self, token: str) -> None:
        self("sh", "-c", f"umask 077; printf %s '{token}' >{TOKEN}")

    def __call__(self, *command: str, check: bool = True) -> str:
        return run("docker", "exec", self.container, *command, check=check)

    def signal(self, *names: str) -> None:
        """Signal the whole process group, as the guest program does."""
        words = " ".join(names)
        self("sh", "-c", f'for name in {words}; do kill -s $name -- "-$(cat /run/pid)" || exit; done')

    def heeds(self, number: int) -> bool:
        """Whether the script has installed a handler for this signal."""
        asked = 'sed -n "s/^SigCgt://p" "/proc/$(cat /run/pid)/status"'
        caught = self("sh", "-c", asked, check=False).strip()
        return bool(int(caught or "0", 16) >> (number - 1) & 1)

    def status(self, seconds: float = 60) -> str:
        """The exit status of the script, once it ends."""
        look = ("cat", "/run/status")
        return wait_for(lambda: self(*look, check=False).strip(), "the script to end", seconds)

    def said(self) -> str:
        return self("cat", "/run/said")

    def ad(self, attribute: str) -> str:
        """An attribute of the VM's ad in the collector; empty if it has no ad."""
        where = f'VMJobsMember == "{self.name}" && PartitionableSlot'
        return self.grid.on("site", "condor_status", "-constraint", where, "-af", attribute).strip()

    def remove(self) -> None:
        run("docker", "rm", "-f", self.container)


def probes(grid: Grid, vm: Machine) -> list[str]:
    """States of the probe jobs for a cluster VM in the pool."""
    mine = f"[m for m in pool.vms() if m.id == '{vm.order.id}']"
    states: list[str] = pool(grid, f"list(pool.probes({mine}).values())")
    return states


MakeVm = Callable[..., Machine]


@pytest.fixture
def vm(grid: Grid, tmp_path: Path) -> Iterator[MakeVm]:
    """A factory for VMs; afterwards they are removed, from the pool too."""
    made: list[Machine] = []

    def make(**fields: Any) -> Machine:
        name = f"t{uuid.uuid4().hex[:8]}-0"
        folder = tmp_path / name
        folder.mkdir()
        made.append(Machine(grid, folder, name, **fields))
        made[-1].start(mint(grid, made[-1].known)["token"])
        wait_for(lambda: made[-1].ad("Name"), f"{name} to join; it said: {made[-1].said()}", 120)
        return made[-1]

    yield make
    for each in made:
        each.remove()
        withdraw(grid, each.known)


@pytest.fixture
def queue(grid: Grid) -> Iterator[Queue]:
    jobs = Queue(grid)
    yield jobs
    jobs.clear()


class Queue:
    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.ids: list[str] = []

    def submit(self, cluster: str, script: str, who: str = PHYSICIST, **extra: str) -> str:
        lines = {
            "executable": "/bin/sh",
            "transfer_executable": "false",
            "arguments": f"\"-c '{script}'\"",
            "initialdir": "/var/tmp",  # noqa: S108
            "requirements": f'TARGET.VirtualCluster == "{cluster}"',
            "should_transfer_files": "YES",
            "when_to_transfer_output": "ON_EXIT",
            "request_memory": "16",
            "request_disk": "1024",
            **extra,
        }
        text = "".join(f"{k} = {v}\n" for k, v in lines.items()) + "queue\n"
        command = ("sh", "-c", 'printf "%s" "$1" | condor_submit -terse -', "-", text)
        self.ids.append(self.grid.on("site", *command, user=who).split()[0])
        return self.ids[-1]

    def state(self, job: str) -> tuple[str, ...]:
        """JobStatus (a number), exit code, number of starts."""
        words = ("-af", "JobStatus", "ExitCode", "NumShadowStarts")
        found = self.grid.on("site", "condor_q", job, *words, user="vmjobs").split()
        if not found:
            found = self.grid.on("site", "condor_history", "-limit", "1", job, *words).split()
        return tuple(found)

    def until(self, job: str, status: str, seconds: float = 60) -> tuple[str, ...]:
        return wait_for(
            lambda: said if (said := self.state(job))[:1] == (status,) else None,
            f"job {job} to get to {status}",
            seconds,
        )

    def clear(self) -> None:
        for job in self.ids:
            self.grid.on("site", "condor_rm", job, check=False)


def refused(grid: Grid) -> list[str]:
    """Users whose tokens the site's collector refuses now."""
    asked = ("condor_config_val", "-name", "site.grid", "-collector", "VMJOBS_REVOKED")
    return grid.on("site", *asked, check=False).strip().split(",")


def user_of(vm: PoolVm) -> str:
    return f"vmjobs-{vm.name}.{vm.id}.{vm.incarnation}"


def test_the_tokens_of_a_vm_that_ended_are_refused(grid: Grid, vm: MakeVm, queue: Queue) -> None:
    """Copied tokens are refused too, even in an existing session; other VMs' tokens work."""
    here, other = vm(), vm()
    wait_for(lambda: probes(grid, here) == ["ran"] or None, "the probe to run", 90)
    here.signal("USR1")
    job = queue.submit(here.order.cluster, "sleep 40; exit 9")
    queue.until(job, "2")
    copied, following = mint(grid, here.known)["token"], replace(here.known, incarnation=2)

    withdraw(grid, here.known)
    wait_for(lambda: user_of(here.known) in refused(grid) or None, "the collector to be told", 60)
    withdraw(grid, here.known)  # its startd may have sent another ad meanwhile
    ping = ("condor_ping", "-pool", "site.grid", "-type", "collector", "-table", "ADVERTISE_STARTD")
    assert " ALLOW " not in as_bearer(grid, copied, *ping)
    # The next VM of that name is unaffected.
    token = mint(grid, following)["token"]
    wait_for(lambda: " ALLOW " in as_bearer(grid, token, *ping) or None, "it to be let in", 60)

    # The refused VM lives, its session is valid, it sends ads every 20 s: all are rejected.
    heard = int(other.ad("LastHeardFrom"))
    wait_for(lambda: int(other.ad("LastHeardFrom")) > heard + 20 or None, "the other's next ads", 90)
    assert here.ad("Name") == ""
    assert other.ad("Name")
    # A job that runs in the refused VM is not lost: it ends, once.
    assert queue.until(job, "4", 120) == ("4", "9", "1")


def test_whose_tokens_are_over_is_the_services_word(grid: Grid) -> None:
    victim = PoolVm(f"t{uuid.uuid4().hex[:8]}-0", 1, uuid.uuid4().hex)
    entry = f"{int(time.time()) + 600}:{user_of(victim)}"
    forged = {"MyType": "StartD", "Name": "revoked.offline.vc", "VMJobsRevoked": entry}
    advertise(grid, mint(grid, victim)["token"], **forged)
    found = ("condor_status", "-any", "-constraint", "VMJobsRevoked =!= undefined", "-af")
    assert user_of(victim) not in grid.on("site", *found, "VMJobsRevoked")


def test_a_list_of_tokens_that_are_over_goes_with_them(grid: Grid) -> None:
    short = PoolVm(f"t{uuid.uuid4().hex[:8]}-0", 1, uuid.uuid4().hex)
    pool(grid, f"[setattr(pool, '_token_seconds', -30), pool.withdraw([{short}])][1:]")
    wait_for(lambda: user_of(short) in refused(grid) or None, "the collector to be told", 60)
    # The collector forgets an expired entry at the next update: each update delays its search for
    # stale ads.
    kept = ("cat", "/etc/condor/config.d/70-vmjobs-revoked.conf")
    wait_for(lambda: user_of(short) not in grid.on("site", *kept) or None, "it to be forgotten", 120)


def test_a_probe_that_somebody_else_submits_is_none(grid: Grid, vm: MakeVm, queue: Queue) -> None:
    here = vm()
    forged = {
        "executable": "/usr/local/libexec/vmjobs-probe",
        "arguments": "",
        "+VMJobsProbe": f'"{here.order.id}.1"',
        "requirements": f'TARGET.VMJobsMachine == "{here.order.id}.1"',
    }
    job = queue.submit(here.order.cluster, "", who="games", **forged)
    assert probes(grid, here) == ["waiting"]
    wait_for(lambda: probes(grid, here) == ["ran"] or None, "the probe to run", 90)
    assert queue.state(job)[0] == "1"  # the VM accepts it neither before nor after the probe
    here.signal("TERM")


def test_a_vm_joins_is_probed_admitted_and_drained(grid: Grid, vm: MakeVm, queue: Queue) -> None:
    here = vm(attributes={"Flavour": 'a "b" $(HOME)'}, start="TARGET.Wanted =?= True")
    cluster = here.order.cluster
    assert here.ad("Flavour") == 'a "b" $(HOME)'
    (known,) = [m for m in pool(grid, "pool.vms()") if m["name"] == here.name]
    assert (known["incarnation"], known["busy"], known["jobs"]) == (1, False, 0)
    assert known["system"].startswith("Debian")

    wanted = {"+Wanted": "True"}
    early = queue.submit(cluster, "test $(id -u) != 0 && exit 7", **wanted)
    refused = queue.submit(cluster, "true")
    wait_for(lambda: probes(grid, here) == ["ran"] or None, "the probe to run", 60)
    assert queue.state(early)[0] == "1"  # it does not start before admission
    here.signal("USR1")
    assert queue.until(early, "4")[1] == "7"
    assert queue.state(refused)[0] == "1"  # the operator's START expression rejects it

    # A job with max_job_retirement_time 0 must not be ended by a drain either.
    running = queue.submit(cluster, "sleep 40; exit 5", **wanted, max_job_retirement_time="0")
    queue.until(running, "2")

    def busy() -> bool:
        (known,) = [m for m in pool(grid, "pool.vms()") if m["name"] == here.name]
        return bool(known["busy"] and known["jobs"] >= 1)  # the ad may not include the second job yet

    wait_for(busy, "the ad to tell of jobs", 30)
    here.signal("TERM")
    late = queue.submit(cluster, "true", **wanted)
    assert queue.until(running, "4", 120) == ("4", "5", "1")
    assert here.status() == "0"
    wait_for(lambda: not here.ad("Name") or None, "its ad to go", 60)
    assert queue.state(late) == ("1", "undefined", "undefined")
    assert "drained" in here.said()


def test_a_new_token_replaces_the_old_one_and_the_script_ends_as_its_startd_does(
    grid: Grid, vm: MakeVm
) -> None:
    here = vm()
    fresh = mint(grid, here.known, 1200)["token"]
    here.put_token(fresh)
    here.signal("USR2")
    file = "/etc/condor/tokens.d/vmjobs"
    wait_for(lambda: here("cat", file).strip() == fresh or None, "the new token", 60)
    assert here("stat", "-c", "%a %U", file).split() == ["600", "root"]
    assert fresh not in here("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
    assert fresh not in here.said()

    here("pkill", "-KILL", "-x", "condor_startd")
    assert here.status() == "137"
    assert here.ad("Name")  # the collector has not been told
    withdraw(grid, here.known)
    assert here.ad("Name") == ""


def test_a_drain_before_the_vm_has_joined_is_heeded(grid: Grid, tmp_path: Path) -> None:
    here = Machine(grid, tmp_path, f"t{uuid.uuid4().hex[:8]}-0")
    try:
        here.start("")  # the endpoint has no token: the script retries
        wait_for(lambda: here.heeds(SIGTERM) or None, "the script to run", 60)
        here.signal("USR1", "USR2", "TERM")  # at once: the script does not retry for ever
        here.put_token(mint(grid, here.known)["token"])
        assert here.status() == "0"
        assert "drained" in here.said()
        assert "startd started" not in here.said()
    finally:
        here.remove()


def test_probes_of_vms_that_are_gone_are_removed(grid: Grid, vm: MakeVm) -> None:
    here = vm()
    here("pkill", "-STOP", "-x", "condor_startd")
    assert probes(grid, here) == ["waiting"]
    where = f'VMJobsProbe == "{here.order.id}.1"'
    queued = ("condor_q", "-all", "-constraint", where, "-af", "ClusterId")
    assert len(grid.on("site", *queued).split()) == 1
    assert probes(grid, here) == ["waiting"]
    assert len(grid.on("site", *queued).split()) == 1  # found again, not submitted again
    withdraw(grid, here.known)
    wait_for(lambda: not grid.on("site", *queued).strip() or None, "the probe to leave the queue", 60)
    assert probes(grid, here) == []  # the VM is not in the pool
    assert not grid.on("site", *queued).strip()
