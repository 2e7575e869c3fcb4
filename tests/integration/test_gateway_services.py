"""Real grid gateways, used only through their users' commands.

One has the example's four VMs and publishes its computing element; the other is where jobs for it come
from. They need no grid, only images, which are built if they are missing (`make gateway-images`).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.kit.grid import wait_for
from tests.kit.grid_gateway import COMMAND, Gateway
from tests.kit.hypervisors import host_addresses, mentioning
from tests.kit.sockets import free_ports

#: It takes five virtual machines and their images.
pytestmark = pytest.mark.soak

#: Seconds for a job's way through the gateway and back.
JOB = 180.0

#: Submits the example's job with another program.
JOB_OF = (
    "sed 's|^executable.*|executable = {program}|; s|^arguments.*|arguments = {arguments}|;"
    " s| example[.]| {name}.|' example.sub >{name}.sub && condor_submit {name}.sub"
)


#: Another gateway, whose users submit to the first one's computing element, and a node for that one.
ELSEWHERE = """\
gateway: elsewhere
domain: elsewhere.example
network: 10.78.0.0/24
people: {ada: {}}
machines:
  ce: {role: computing-element, image: gateway-ce, address: 10.78.0.10, memory: 384, disk: 512}
  ui: {role: user-interface, image: gateway-ui, address: 10.78.0.12, memory: 384, disk: 512}
  wn7: {role: service, image: worker, address: 10.78.0.20, memory: 512, disk: 512, run: sleep 86400}
"""
NODE = "wn7.elsewhere.example"
#: Starts HTCondor in a VM whose image lacks what its package makes.
START_NODE = """\
cd /var && mkdir -p log/condor lib/condor/execute lib/condor/spool /run/condor /run/lock/condor &&
    chown -R condor:condor log/condor lib/condor /run/condor /run/lock/condor && setsid condor_master
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The example gateway with a published computing element, booted."""
    folder = tmp_path_factory.mktemp("g")
    made = Gateway(folder / "state", *free_ports(2))
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    declared = (ROOT / "examples" / "gateway.yaml").read_text()
    public = key.with_suffix(".pub").read_text().strip()
    for old, new in {
        "role: computing-element": f"role: computing-element\n    publish: [{made.pool_port}]",
        "role: user-interface": f"role: user-interface\n    publish: ['{made.login_port}:22']",
        "people:": f"host: {host_addresses()[0]}\npeople:",
        "ada: {keys: []}": f"bob: {{}}\n  ada: {{keys: ['{public}']}}",
    }.items():
        assert declared.count(old) == 1, old
        declared = declared.replace(old, new)
    (folder / "gateway.yaml").write_text(declared)
    made.command("install", folder / "gateway.yaml")
    try:
        made.command("boot")
        yield made
    finally:
        made.command("delete", "--yes")
    assert not made.place.exists()
    wait_for(lambda: not mentioning(str(made.place)), "all of it to be gone", 60)


def test_a_job_goes_from_the_user_interface_to_the_worker_and_comes_back(gateway: Gateway) -> None:
    assert "1 job(s) submitted" in gateway.ada("condor_submit example.sub")
    gateway.ada(f"condor_wait -wait {JOB:.0f} example.log")
    output = gateway.ada("cat example.out")
    assert output.startswith("Linux wn.tier3.example "), output
    assert "GridResource: condor ce.tier3.example" in gateway.ada("cat example.log")
    # The computing element keeps a job until its output has been fetched.
    asked = "condor_history -limit 1 -autoformat Owner LastRemoteHost ExitCode"
    ran = wait_for(lambda: gateway.run("ce", asked), "the job's record", JOB)
    assert re.fullmatch(r"ada slot1_\d+@wn\.tier3\.example 0\n", ran), ran


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("e")
    (folder / "elsewhere.yaml").write_text(ELSEWHERE)
    made = Gateway(folder / "state", allowed=host_addresses())
    made.command("install", folder / "elsewhere.yaml")
    try:
        made.command("boot")
        yield made
    finally:
        made.command("delete", "--yes")


def test_a_job_comes_from_a_schedd_elsewhere(gateway: Gateway, elsewhere: Gateway) -> None:
    pool = f"{host_addresses()[0]}:{gateway.pool_port}"
    asked = f"condor_status -pool {pool} -autoformat Machine"
    assert "wn.tier3.example" not in elsewhere.ada(asked, status=1), "without a token"
    token = gateway.command("token", "bob").stdout.decode().strip()
    elsewhere.ada(f"umask 077; echo {token} >.condor/tokens.d/tier3")
    assert "wn.tier3.example" in elsewhere.ada(asked)
    route = f"s|^grid_resource.*|grid_resource = condor ce.tier3.example {pool}|"
    elsewhere.ada(f"sed '{route}' example.sub >there.sub && condor_submit there.sub")
    elsewhere.ada(f"condor_wait -wait {JOB:.0f} example.log")
    output = elsewhere.ada("cat example.out")
    assert output.startswith("Linux wn.tier3.example "), output


def test_a_node_of_the_site_runs_jobs_until_it_is_removed(
    gateway: Gateway, elsewhere: Gateway, tmp_path: Path
) -> None:
    """It is behind a firewall: nothing can connect to it."""

    def in_pool() -> bool:
        return NODE in gateway.run("ce", "condor_status -autoformat Machine")

    gateway.command("worker add", NODE, "--output", tmp_path)
    for file, mode, place in (
        ("60-gateway-tier3.conf", 644, "config.d/60-gateway-tier3.conf"),
        ("token", 600, "tokens.d/gateway-tier3"),
    ):
        put = f"cd /etc/condor && mkdir -p tokens.d && install -m {mode} /dev/stdin {place}"
        elsewhere.run("wn7", put, stdin=(tmp_path / file).read_bytes())
    elsewhere.run("wn7", START_NODE)
    wait_for(in_pool, "the node in the pool", JOB)
    assert NODE in gateway.command("worker list").stdout.decode()

    chosen = f's|^+remote_Requirements.*|+remote_Requirements = Machine == "{NODE}"|'
    gateway.ada(f"cp example.sub any.sub; sed -i '{chosen}' example.sub; condor_submit example.sub")
    gateway.ada(f"condor_wait -wait {JOB:.0f} example.log")
    assert gateway.ada("tail -1 example.out").startswith(f"Linux {NODE} ")
    gateway.ada(JOB_OF.format(program="/bin/sleep", arguments="100", name="gone"))
    gateway.ada("mv any.sub example.sub")
    wait_for(lambda: 2 in gateway.jobs("ce").values(), "the job to run", JOB)

    gateway.command("worker remove", NODE)
    assert not in_pool()
    wait_for(lambda: 2 not in gateway.jobs("ce").values(), "the job to wait for another node", JOB)
    refused = f"grep -c 'DENIED to node-{NODE}' /job/log/CollectorLog || true"
    before = int(gateway.run("ce", refused))
    elsewhere.run("wn7", "condor_restart -master")
    wait_for(lambda: int(gateway.run("ce", refused)) > before, "the node to try again", JOB)
    assert not in_pool()
    gateway.command("worker remove", NODE, status=66)
    gateway.ada("condor_rm -all")


def test_people_log_in_from_elsewhere_by_their_own_keys(gateway: Gateway, tmp_path: Path) -> None:
    def login(user: str, *command: str) -> subprocess.CompletedProcess[str]:
        key = gateway.place.parent / "key"
        options = ["-F", "none", "-i", str(key), "-p", str(gateway.login_port), "-o", "BatchMode=yes"]
        options += [
            "-o",
            "StrictHostKeyChecking=accept-new",
            "-o",
            f"UserKnownHostsFile={tmp_path}/known",
        ]
        argv = ["ssh", *options, f"{user}@{host_addresses()[0]}", *command]
        return subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND, check=False)

    there = login("ada", "id -un; hostname; ls .condor/tokens.d .xrd; ls ../bob")
    assert there.stdout.split() == [
        *("ada", "ui.tier3.example", ".condor/tokens.d:", "gateway", ".xrd:", "sss.keytab")
    ]
    assert "Permission denied" in there.stderr, "bob's home is his own"
    for other in ("bob", "root"):
        assert login(other, "id").returncode == 255


def test_a_file_is_stored_listed_and_read_back(gateway: Gateway) -> None:
    data = os.urandom(300_000)
    gateway.run("ui", "cat >/tmp/events.dat", stdin=data)
    url = "root://se.tier3.example//store/run1/events.dat"
    gateway.ada(f"xrdcp --nopbar --cksum adler32:source /tmp/events.dat {url}")
    listing = gateway.ada("xrdfs se.tier3.example ls -l /store/run1")
    assert re.search(r" 300000 .* /store/run1/events\.dat$", listing.strip()), listing
    assert re.search(
        "adler32 [0-9a-f]{8}",
        gateway.ada("xrdfs se.tier3.example query checksum /store/run1/events.dat"),
    )
    gateway.ada(f"rm -f back.dat; xrdcp --nopbar {url} back.dat")
    known = hashlib.sha256(data).hexdigest()
    assert gateway.ada("sha256sum <back.dat").split()[0] == known
    assert known in gateway.run("se", "sha256sum /job/xrootd/store/run1/events.dat")


def test_who_has_no_key_stores_nothing(gateway: Gateway) -> None:
    tried = "cd /tmp && echo mine >x && exec 2>&1; xrdcp --nopbar x root://se.tier3.example//store/x"
    said = gateway.run("ui", tried, status=52)
    assert "Auth failed" in said
    assert "x" not in gateway.run("se", "ls /job/xrootd/store").split()


def test_who_has_no_token_of_the_pools_gets_nowhere(gateway: Gateway) -> None:
    pool = f"ce.tier3.example:{gateway.pool_port}"
    asked = f"condor_{{0}} -name ce.tier3.example -pool {pool} {{1}} 2>&1"
    assert "ada" in gateway.ada(asked.format("ping -type schedd", "WRITE"))
    gateway.run("ui", asked.format("ping -type schedd", "READ"), status=1)
    # A worker's own token only advertises this worker; it does not allow submitting.
    gateway.run("wn", asked.format("ping -type schedd", "WRITE"), status=1)


def test_a_backup_while_jobs_are_under_way_brings_queue_and_files_back(
    gateway: Gateway, tmp_path: Path
) -> None:
    gateway.ada("echo precious >kept && xrdcp --nopbar -f kept root://se.tier3.example//store/kept")
    # One job runs and one waits behind it: the worker has one slot.
    gateway.ada(JOB_OF.format(program="/bin/sleep", arguments="100", name="long"))
    gateway.ada(JOB_OF.format(program="/bin/echo", arguments="it is done", name="next"))
    wait_for(lambda: sorted(gateway.jobs("ce").values()) == [1, 2] or None, "a job to run", JOB)
    before = gateway.jobs("ui")

    archive = tmp_path / "gateway.backup"
    gateway.command("backup", "--no-images", archive)  # the images stay here
    # The gateway continues to run; the backup contains no later change.
    gateway.ada("xrdfs se.tier3.example rm /store/kept")
    gateway.command("delete", "--yes")
    assert not gateway.place.exists()

    gateway.command("restore", archive)
    gateway.command("boot")
    assert gateway.ada("xrdcp --nopbar root://se.tier3.example//store/kept -") == "precious\n"
    # Jobs run as soon as it is up: a job that waited may have ended by now.
    assert set(before) <= set(gateway.jobs("ui")) | gateway.ended("ui")
    gateway.ada(f"condor_wait -wait {JOB + 200:.0f} next.log")
    assert gateway.ada("cat next.out") == "it is done\n"
