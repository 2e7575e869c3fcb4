"""Isolation of a VM and its job from other users of the node and of the service."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.kit import KIT
from tests.kit.grid import NODES, PHYSICIST, Grid, wait_for
from tests.kit.secret_search import STRANGER, feed
from tests.kit.submit_host import Desk, site, where
from tests.kit.wrapper import build_evil
from vmjobs.client import Client
from vmjobs.model import Job, JobSpec, JobState

__all__ = ["site"]

TRIES = (KIT / "node_tries.py").read_text("utf-8")
STATE = "/var/lib/vmjobs/agent"
AGENT = "vmjobs-agent"
#: The account of the service's jobs on a node. Its own tries are the control.
OWNER = "vmjobs"
#: Matches a guest's kernel or QEMU by its command line; group 1 is its name.
KERNEL = {
    "uml": re.compile(r"[^ ]*linux\.uml .*\bumid=([^ ]+)"),
    "qemu": re.compile(r"[^ ]*qemu-system-[^ ]+ .*\bguest=([^ ,]+)"),
}
#: A domain for libvirt where it has none.
DOMAIN = "safety-test"
SOCKET = f"qemu+unix:///session?socket={STATE}/.cache/libvirt/libvirt-sock"
#: Sends a request to the agent and prints the first line of its answer.
ASK = """
import socket, sys
with socket.socket(socket.AF_UNIX) as agent:
    agent.connect("/run/vmjobs/agent.sock")
    agent.sendall(sys.stdin.buffer.read())
    agent.shutdown(socket.SHUT_WR)
    print(agent.makefile().readline())
"""


def tries(grid: Grid, node: str, user: str, wish: Mapping[str, Any]) -> dict[str, str]:
    """Run node_tries.py on a node as a user: result of each try. wish: what to try."""
    home = STATE if user == AGENT else "/nonexistent"
    command = ("env", f"HOME={home}", "python3", "-c", TRIES)
    found: dict[str, str] = json.loads(feed(grid, node, json.dumps(wish), *command, user=user))
    return found


def processes(grid: Grid, node: str, attempt: str, hypervisor: str) -> dict[int, str]:
    """The command lines of all processes of a run, except its guest's processes.

    Guest processes come and go; their parent, the guest's kernel, traces them.
    """
    listed = [line.split(None, 2) for line in grid.on(node, "ps", "-eo", "pid,ppid,args").splitlines()]
    ours = {pid: (parent, args) for pid, parent, args in listed if attempt in args}
    kernels = {pid for pid, (_, args) in ours.items() if KERNEL[hypervisor].match(args)}
    return {int(pid): args for pid, (parent, args) in ours.items() if parent not in kernels}


@dataclass
class Victim:
    """A running job, its VM, a client of its owner, and the token of another user.

    files, sockets, folders: all that its run has on the node. domain: the domain to look up in libvirt.
    """

    grid: Grid
    job: Job
    owner: Client
    others_token: str
    hypervisor: str
    node: str = ""
    domain: str = DOMAIN
    pids: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    sockets: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)

    def tries(self, user: str) -> dict[str, str]:
        wish = {
            "pids": self.pids,
            "folders": self.folders,
            "files": self.files,
            "sockets": self.sockets,
            "libvirt": [SOCKET],
            "domain": self.domain,
        }
        return tries(self.grid, self.node, user, wish)

    def ask_agent(self, user: str, **message: Any) -> dict[str, Any]:
        line = json.dumps(message) + "\n"
        said = feed(self.grid, self.node, line, "python3", "-c", ASK, user=user)
        found: dict[str, Any] = json.loads(said.strip() or b"{}")
        return found


@pytest.fixture(scope="module", params=KERNEL)
def victim(grid: Grid, request: pytest.FixtureRequest) -> Iterator[Victim]:
    make = ("vmjobs", "token", "create", "user")
    tokens = {n: grid.on("api", *make, f"safety-{n}").strip() for n in ("owner", "other")}
    spec = JobSpec(
        image="generic", memory=160, disk=64, run_seconds=3600, hypervisor=request.param,
        outputs=("left",),
        script="#!/bin/sh\necho to the owner; echo x >left; while :; do sleep 1; done\n",
    )  # fmt: skip
    with Client(grid.url, tokens["owner"]) as owner:
        (job,) = owner.submit(spec).jobs
        try:
            wait_for(lambda: _runs(owner, job), f"job {job.id} to run", 240)
            yield _found(Victim(grid, job, owner, tokens["other"], request.param))
            assert _runs(owner, job), "the job was harmed by what others tried"
        finally:
            owner.cancel(job.id)


def _runs(client: Client, job: Job) -> bool:
    said = client.job(job.id)
    assert not said.state.final, said.reason
    return said.state is JobState.RUNNING


def _found(victim: Victim) -> Victim:
    """Find the job's node, and what its run has there."""
    grid = victim.grid
    attempt = next(e.attempt for e in reversed(victim.owner.events(victim.job.id)) if e.attempt)
    vms: list[tuple[int, str]] = []
    for node in NODES:
        for pid, args in processes(grid, node, attempt, victim.hypervisor).items():
            victim.node, victim.pids = node, [*victim.pids, pid]
            if found := KERNEL[victim.hypervisor].match(args):
                vms.append((pid, found[1]))
    ((pid, name),) = vms
    if victim.hypervisor == "uml":
        victim.sockets.append(f"/proc/{pid}/cwd/{name}/mconsole")
    else:
        victim.domain = name
        libvirts = grid.on(victim.node, "find", f"{STATE}/.config/libvirt", "-path", f"*{name[:20]}*")
        victim.sockets += [path for path in libvirts.split() if path.endswith(".sock")]
        victim.folders += [str(Path(path).parent) for path in victim.sockets]
        victim.files.append(f"{STATE}/.cache/libvirt/qemu/log/{name}.log")
        assert victim.sockets, libvirts
    assert len(victim.pids) > len({"its sandbox", "it", "its network"}), victim.pids
    run = f"{STATE}/runs/{attempt}"
    for kind, paths in (("f", victim.files), ("s", victim.sockets), ("d", victim.folders)):
        paths.extend(grid.on(victim.node, "find", run, "-type", kind).split())
    scratch = "/var/lib/condor/execute"
    victim.files += grid.on(victim.node, "find", scratch, "-name", "job.token").split()
    victim.folders += [STATE, f"{STATE}/runs", f"{STATE}/images", f"{STATE}/.cache/libvirt"]
    victim.sockets.append(f"{STATE}/.cache/libvirt/libvirt-sock")
    assert any("stream-console" in path for path in victim.files), victim.files
    return victim


@pytest.fixture(scope="module")
def domain(victim: Victim) -> Iterator[None]:
    """Define a domain in the agent's libvirt, which never runs; a QEMU job's VM is one itself."""
    if victim.domain != DOMAIN:
        yield  # libvirt knows the VM
        return
    grid, virsh = victim.grid, ("env", f"HOME={STATE}", "virsh", "-c", "qemu:///session")
    inside = f"<name>{DOMAIN}</name><memory>65536</memory><os><type>hvm</type></os>"
    text = f"<domain type='qemu'>{inside}</domain>"
    feed(grid, victim.node, text, *virsh, "define", "/dev/stdin", user=AGENT)
    yield
    grid.on(victim.node, *virsh, "undefine", DOMAIN, user=AGENT, check=False)


def test_nothing_of_an_transparent_jobs_vm_is_in_anothers_reach(grid: Grid, site: Desk) -> None:
    """The agent owns the job's data at the agent, its run, sockets and processes.

    The job's directory belongs to the job's owner.
    """
    mark = f"mark-{uuid.uuid4().hex}"
    cluster = site.submit(f": {mark}; exec sleep 3600", __VMJobHypervisor='"uml"')
    node, name = where(site, cluster)

    def holding(text: str, place: str) -> str:
        """The directory of the file there that contains this text."""
        paths = grid.on(
            node, "grep", "-rslF", text, place, check=False
        ).split()  # other files come and go
        (folder,) = {str(Path(path).parent) for path in paths}
        return folder

    run = holding(f'"{name}"', f"{STATE}/runs")
    agents: dict[str, list[Any]] = {
        "folders": [STATE, f"{STATE}/handed", holding(mark, f"{STATE}/handed"), run],
        "files": [],
        "pids": list(processes(grid, node, Path(run).name, "uml")),
    }
    agents["files"] = grid.on(node, "find", *agents["folders"][2:], "-type", "f").split()
    own = {"folders": [holding(mark, "/var/lib/condor/execute")]}
    own["files"] = [f"{own['folders'][0]}/{name}" for name in (".job.ad", "_condor_stdout", "data")]
    assert all(len(agents[kind]) >= 2 for kind in agents), agents
    for theirs, wish in ((AGENT, agents), (PHYSICIST, own)):
        control = tries(grid, node, theirs, wish)
        assert set(control.values()) == {"ok"}, control
        for user in {AGENT, OWNER, PHYSICIST, STRANGER} - {theirs}:
            got = tries(grid, node, user, wish)
            assert got.keys() == control.keys()
            assert {said.partition(":")[0] for said in got.values()} == {"PermissionError"}, got
    assert site.ad(cluster)["JobStatus"] == 2


@pytest.mark.soak_for("qemu")
@pytest.mark.usefixtures("domain")
def test_nothing_of_a_vm_is_in_anothers_reach(victim: Victim) -> None:
    """Control: the agent's user succeeds in all tries. The job's token is its owner's."""
    control = victim.tries(AGENT)
    tokens = {name for name in control if name.endswith("job.token")}
    refused = {name: said for name, said in control.items() if said != "ok" and name not in tokens}
    assert not refused, refused
    assert tokens
    for user in (STRANGER, PHYSICIST, OWNER):
        got = victim.tries(user)
        assert got.keys() == control.keys()
        open_to = {name for name, said in got.items() if said == "ok"}
        assert open_to <= (tokens if user == OWNER else set())
        kinds = {(said.partition(":")[0], name.startswith("process ")) for name, said in got.items()}
        kinds -= {("FileNotFoundError", True)}  # a process has ended since the control
        assert {kind for kind, _ in kinds} <= {"PermissionError", "ok"}, got


def test_the_agent_has_no_right_but_its_users(victim: Victim) -> None:
    """The agent has no capability, whichever process started it."""
    told = victim.grid.on(
        victim.node, "sh", "-c", "cat /proc/$(pgrep -of 'vmjobs [a]gent')/status", user=AGENT
    )
    said = dict(line.partition(":")[::2] for line in told.splitlines())
    assert set(said["Uid"].split()) == {victim.grid.on(victim.node, "id", "-u", AGENT).strip()}
    for which in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(said[which], 16) == 0, which


def test_the_agents_user_has_no_port_and_no_abstract_socket(victim: Victim) -> None:
    """They have no permissions: any process on the node, or even off it, could connect."""
    said = victim.grid.on(
        victim.node, "sh", "-c", "ls -l /proc/[0-9]*/fd 2>/dev/null; true", user=AGENT
    )
    inodes = set(re.findall(r"socket:\[(\d+)\]", said))
    table = [line.split() for line in victim.grid.on(victim.node, "cat", "/proc/net/unix").splitlines()]
    names = {words[7] for words in table[1:] if len(words) > 7 and words[6] in inodes}
    assert "/run/vmjobs/agent.sock" in names
    assert [name for name in names if name.startswith("@")] == []
    uid = victim.grid.on(victim.node, "id", "-u", AGENT).strip()
    tables = victim.grid.on(victim.node, "sh", "-c", "cat /proc/net/tcp /proc/net/tcp6 /proc/net/udp")
    rows = [line.split() for line in tables.splitlines() if ":" in line.split()[0]]
    assert any(row[3] == "0A" for row in rows), "nothing listens at all"
    assert [row for row in rows if row[7] == uid and row[3] == "0A"] == []


def test_the_agents_socket_knows_who_asks(victim: Victim) -> None:
    def status(user: str) -> list[str]:
        running: list[str] = victim.ask_agent(user, type="status")["node"]["running"]
        return running

    assert victim.job.id in status(OWNER)
    assert victim.job.id in status(AGENT)
    assert status(STRANGER) == []
    assert victim.job.id not in status(PHYSICIST)
    message = {"job": victim.job.id, "token": victim.others_token}
    for user in (STRANGER, OWNER):
        assert victim.ask_agent(user, type="run", **message)["type"] == "error"
    entering = victim.ask_agent(STRANGER, type="enter", mark="0" * 32)
    assert (entering["type"], entering["code"]) == ("error", "FORBIDDEN")
    # Signals belong to the connection of a run: this one has none.
    assert victim.ask_agent(STRANGER, type="signal", number=9) == {}
    assert _runs(victim.owner, victim.job)


def test_a_library_of_a_jobs_is_loaded_on_no_node(grid: Grid, site: Desk, tmp_path: Path) -> None:
    """HTCondor starts the wrapper in the job's environment."""
    mark = Path(f"/run/lock/loaded-{uuid.uuid4().hex}")
    evil = base64.b64encode(build_evil(tmp_path, mark).read_bytes()).decode()
    more: dict[str, Any] = {
        "environment": '"LD_PRELOAD=./evil.so MINE=1"',
        "transfer_input_files": "data, evil.so",
    }
    site.describe("tr '\\0' '\\n' </proc/$$/environ | grep -e ^MINE= -e ^LD_PRELOAD=", **more)
    site("sh", "-c", 'echo "$1" | base64 -d >"$2"', "sh", evil, f"{site.folder}/evil.so")
    site.tool("condor_submit", "-terse", "job.sub")
    ad = site.ended(site.clusters[-1])
    assert ad["JobStatus"] == 4, ad.get("HoldReason")
    assert sorted(site.read("out").splitlines()) == ["LD_PRELOAD=./evil.so", "MINE=1"]
    for node in NODES:
        assert grid.on(node, "find", "/run/lock", "-name", mark.name).strip() == "", node


def test_links_that_a_job_leaves_bring_no_file_of_its_node(site: Desk) -> None:
    """HTCondor's starter follows these links, on the node."""
    script = """
        ln -s /etc/passwd a; ln -s /var/log/condor/StartLog b; ln -s /etc d; ln -s d/passwd through
        mkdir in; ln -s ../../../../../../../etc/passwd in/deep; ln -s "$PWD/data" inner
        sha256sum </etc/passwd
    """
    ad = site.ended(site.submit(script, transfer_output_files="a, through, in, inner"))
    assert ad["JobStatus"] == 4, ad.get("HoldReason")
    guests = site.read("out")
    for name in ("a", "through", "in/deep"):
        found = site("sh", "-c", 'sha256sum <"$1"', "sh", f"{site.folder}/{name}")
        assert found == guests, name
    assert site.read("inner") == "from a file\n"
    assert "'b': a link whose target is neither" in ad["ChirpVMRejected"]
    assert "'d': a link out of" in ad["ChirpVMRejected"]
