"""SSH to a cluster VM, for real: service, node, UML, OpenSSH."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from api.tokens import USER_SCOPES, Scope, make_issuer
from repository.service import open_repository
from tests.kit import KIT, ROOT
from tests.kit.cli import VMJOBS
from tests.kit.cluster_nodes import POOLS, World
from tests.kit.cluster_vm_node import clear
from tests.kit.processes import children, running
from tests.kit.repository_jobs import push_library
from tests.kit.sockets import free_port
from tests.kit.waiting import wait_until
from vmjobs.agent.cluster_vms.journal import ClusterVmJournal
from vmjobs.client import Client
from vmjobs.config import Config
from vmjobs.errors import NotFound, SessionEnded

SECONDS = 240.0
#: From a keystroke to the VM's answer on the screen; without a wake-up, requests wait for 10 s.
KEYSTROKE_SECONDS = 2.5
SECRETS = ("/run/vmjobs/job/job.env", "/run/vmjobs-ssh/key", "/run/vmjobs-ssh/config")
KEY = "ssh-ed25519 " + "A" * 68


@dataclass
class Grid:
    """A service of three processes, and a node with one VM of the cluster `vc`."""

    config: Config
    folder: Path
    service: subprocess.Popen[bytes]
    node: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        return f"http://{self.config.listen}"

    def start_node(self) -> None:
        token = make_issuer(self.config).node_token("n1")
        argv = [
            sys.executable,
            str(KIT / "cluster_ssh_node.py"),
            str(self.folder / "members"),
            self.url,
            token,
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with (self.folder / "node.log").open("ab") as sink:
            self.node = subprocess.Popen(argv, stdout=sink, stderr=sink, env=env)

    def client(self, user: str = "root") -> Client:
        return Client(self.url, self.token(user))

    def token(self, user: str = "root") -> str:
        return make_issuer(self.config).user_token(user, USER_SCOPES | {Scope.ADMIN})

    def environ(self) -> dict[str, str]:
        path = self.folder / "token"
        path.write_text(self.token())
        own = {"VMJOBS_API_URL": self.url, "VMJOBS_TOKEN_FILE": str(path), "VMJOBS_CONFIG": "/dev/null"}
        return {**os.environ, **own}

    def vmjobs(self, *words: str) -> list[str]:
        return [VMJOBS, "cluster", *words]

    def ssh(self, *words: str, **more: object) -> subprocess.CompletedProcess[bytes]:
        """Run `vmjobs cluster ssh`."""
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            self.vmjobs("ssh", *words),
            env=self.environ(),
            capture_output=True,
            timeout=SECONDS,
            check=False,
            **{"stdin": subprocess.DEVNULL, **({} if "input" not in more else {"stdin": None}), **more},
        )


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    folder = tmp_path_factory.mktemp("ssh")
    listen = f"127.0.0.1:{free_port()}"
    config = Config(data_dir=folder / "data", listen=listen, api_workers=3, pools=POOLS)
    with closing(open_repository(config)) as repository:
        push_library(repository, "tiny", b"disk" * 1024)
        world = World(repository, "n1")
        world.apply(image="tiny")
        world.step()
    with running(config, folder / "log") as service:
        made = Grid(config, folder, service)
        made.start_node()
        with made.client() as api:
            wait_until(lambda: api.clusters.get("vc").members[0].state == "JOINING", SECONDS, "it runs")
            wait_until(lambda: made.ssh("vc-0", "--", "true").returncode == 0, SECONDS, "a login")
            yield made
        made.node.kill()
        made.node.wait()
    clear(ClusterVmJournal(folder / "members").prefix)


def test_a_command_runs_as_root_and_its_status_comes_through(grid: Grid) -> None:
    done = grid.ssh("vc-0", "--", "id", "-u")
    assert (done.stdout, done.returncode) == (b"0\n", 0), done.stderr.decode()
    assert grid.ssh("vc-0", "--", "exit", "7").returncode == 7
    assert grid.ssh("vc-0", "echo 'a  b'").stdout == b"a  b\n"
    with grid.client() as api:
        lines = [e for e in api.clusters.events("vc") if e.code == "LOGIN"]
        assert [(e.member, e.node, e.message) for e in lines[-3:]] == [
            ("vc-0", "n1", "root logs in as root")
        ] * 3


def test_bytes_arrive_as_they_were_sent(grid: Grid, tmp_path: Path) -> None:
    data = os.urandom(20 * 1024 * 1024)
    done = grid.ssh("vc-0", "--", "cat", input=data)
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest(), done.stderr
    (tmp_path / "there").write_bytes(data[:100_000])
    for source, target in (("there", "vc-0:/root/x"), ("vc-0:/root/x", "back")):
        copied = subprocess.run(
            grid.vmjobs("scp", source, target),
            env=grid.environ(),
            cwd=tmp_path,
            timeout=SECONDS,
            check=False,
        )
        assert copied.returncode == 0
    assert (tmp_path / "back").read_bytes() == data[:100_000]


def test_a_jobs_account_can_neither_pose_as_the_guest_nor_read_keys(grid: Grid) -> None:
    """Only root can read the keys, and no server listens that a job could ask."""
    job = "setpriv --reuid 64101 --regid 64101 --clear-groups"
    done = grid.ssh("vc-0", "--", f"{job} sh -c 'id -u; cat {' '.join(SECRETS)}; ls /run/vmjobs-ssh'")
    assert done.stdout == b"64101\n"
    assert done.stderr.count(b"Permission denied") == len(SECRETS) + 1
    assert grid.ssh("vc-0", "--", f"wc -c {' '.join(SECRETS)}").returncode == 0  # they exist
    posing = f"vmjobs-door 1 {'x' * 43} {KEY}"
    words = f'exec 3<>/dev/tcp/10.0.2.100/22; echo "{posing}" >&3; timeout 20 cat <&3; echo left'
    pose = grid.ssh("vc-0", "--", f"{job} bash -c '{words}'")
    assert pose.stdout == b"left\n"
    listening = grid.ssh("vc-0", "--", "cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\"'")
    assert (listening.stdout, listening.returncode) == (b"", 0)
    assert grid.ssh("vc-0", "--", "ls /etc/ssh/ | grep -c ssh_host").stdout == b"0\n"
    assert grid.ssh("vc-0", "--", "ls /run/vmjobs-ssh").stdout.split()[:3] == [
        b"config",
        b"key",
        b"key.pub",
    ]


def test_who_may_not_log_in_is_told_why(grid: Grid) -> None:
    with grid.client() as root:
        for cluster, vm in (("vc", "vc-9"), ("none", "none-0"), ("none", "vc-0")):
            with pytest.raises(NotFound):
                root.clusters.open_session(cluster, vm, KEY)
        session = root.clusters.open_session("vc", "vc-0", KEY)
        with grid.client(user="eve") as eve, pytest.raises(SessionEnded):
            eve.clusters.session(session.id).receive(0, 0)
        stream = root.clusters.session(session.id)
        data = wait_until(lambda: stream.receive(0, 10)[0], SECONDS, "its greeting")
        assert data.startswith(b"SSH-2.0-")
        stream.close()
        with pytest.raises(SessionEnded):
            stream.receive(len(data), 10)
    done = grid.ssh("vc-9", "--", "true")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        66,
        b"vmjobs: vc has no VM vc-9 [NOT_FOUND]",
    )
    assert grid.ssh("elsewhere").returncode == 64


def test_another_key_is_not_let_in(grid: Grid, tmp_path: Path) -> None:
    for name in ("mine", "other"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", tmp_path / name], check=True
        )
    public = (tmp_path / "mine.pub").read_text().strip()
    outcomes = []
    for name in ("other", "mine"):
        with grid.client() as api:
            session = api.clusters.open_session("vc", "vc-0", public)
        (tmp_path / "known").write_text(f"vc-0 {session.host_key}\n")
        proxy = shlex.join(grid.vmjobs("connect", session.id))
        settings = ["BatchMode=yes", "IdentitiesOnly=yes", "StrictHostKeyChecking=yes"]
        settings += [f"UserKnownHostsFile={tmp_path / 'known'}", f"IdentityFile={tmp_path / name}"]
        settings += [f"ProxyCommand={proxy}"]
        options = [word for setting in settings for word in ("-o", setting)]
        done = subprocess.run(
            ["ssh", "-F", "none", *options, "root@vc-0", "echo in"],
            env=grid.environ(),
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        outcomes.append((done.returncode, done.stdout, b"Permission denied" in done.stderr))
    assert outcomes == [(255, b"", True), (0, b"in\n", False)]


def test_a_keystroke_comes_back_soon(grid: Grid) -> None:
    with begun(grid) as typing:
        assert typing.stdin is not None
        assert typing.stdout is not None
        took = []
        for _ in range(20):
            began = time.monotonic()
            typing.stdin.write(b"x")
            assert typing.stdout.read(1) == b"x"
            took.append(time.monotonic() - began)
        typing.stdin.close()
        assert typing.wait(SECONDS) == 0
    assert sorted(took[1:])[len(took) // 2] < KEYSTROKE_SECONDS


def begun(grid: Grid) -> subprocess.Popen[bytes]:
    """Open a session, and wait until it runs."""
    made = subprocess.Popen(
        grid.vmjobs("ssh", "vc-0", "--", "echo in; cat"),
        env=grid.environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert made.stdout is not None
    assert made.stdout.read(3) == b"in\n"
    return made


def is_as_before(grid: Grid) -> bool:
    """Whether a login works, and finds no other session and no leftovers."""
    done = grid.ssh("vc-0", "--", "ls /run/vmjobs-ssh | grep -c keys; pgrep -c '^cat$'")
    return done.stdout == b"1\n0\n"


def test_killing_the_agent_ends_sessions_and_the_next_one_lets_in_again(grid: Grid) -> None:
    session = begun(grid)
    grid.node.kill()
    grid.node.wait()
    assert session.wait(SECONDS) == 255
    grid.start_node()
    wait_until(lambda: is_as_before(grid), SECONDS, "nothing is left of the session")


@pytest.mark.soak
def test_killing_the_services_processes_ends_sessions_and_no_more(grid: Grid) -> None:
    session = begun(grid)
    for pid in children(grid.service):
        os.kill(pid, signal.SIGKILL)
    assert session.wait(SECONDS) == 255
    wait_until(lambda: is_as_before(grid), SECONDS, "nothing is left of the session")


@pytest.mark.soak
def test_killing_the_client_leaves_nothing(grid: Grid) -> None:
    session = begun(grid)
    session.kill()
    session.wait()
    assert session.stdin is not None
    session.stdin.close()
    wait_until(lambda: is_as_before(grid), SECONDS, "nothing is left of the session")
