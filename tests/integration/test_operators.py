"""A node set up as docs/operators.md says, from a wheel, in a fresh container."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.kit import ROOT
from tests.kit.grid import Grid, run, wait_for
from tests.kit.submit_host import Desk
from vmjobs.model import ExitChannel, JobState

pytestmark = [pytest.mark.soak, pytest.mark.disruptive, pytest.mark.timeout(1800)]

NODE: Final = "node3.grid"
#: More memory than the grid's other nodes have, so that jobs that request it run here.
MEMORY: Final = 5000
#: Configuration of an existing pool's node, without the settings that the whole pool shares.
BEFORE: Final = f"""
LOG_TO_SYSLOG = FALSE
DEFAULT_DOMAIN_NAME = grid
CONDOR_HOST = site.grid
DAEMON_LIST = MASTER, STARTD
MEMORY = {MEMORY + 1000}
NUM_SLOTS = 1
NUM_SLOTS_TYPE_1 = 1
SLOT_TYPE_1 = 100%
SLOT_TYPE_1_PARTITIONABLE = TRUE
"""
#: The wheel's Python dependencies, from Debian: no package index is used.
PYTHON: Final = (
    "cryptography h11 prometheus-client pycdlib regex "  # agent
    "click pydantic yaml requests rich zstandard"
)


def blocks(title: str) -> list[str]:
    """The commands and files that a section of the page shows, in order."""
    page = (ROOT / "docs" / "operators.md").read_text("utf-8")
    _, _, rest = page.partition(f"{title}\n")
    section = re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]
    shown = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE).strip() + "\n" for block in shown]


def here(text: str) -> str:
    """Replace the page's host names by the grid's."""
    for theirs, ours in (
        ("node17.example.org", NODE),
        ("https://vmjobs.example.org", "https://api.grid:8443"),
        ("example.org", "grid"),
    ):
        text = text.replace(theirs, ours)
    return text


class Host:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, script: str, *, user: str = "root") -> str:
        return run("docker", "exec", "-u", user, "-w", "/src", self.name, "sh", "-euxc", script)

    def write(self, path: str, text: str, owner: str = "root", mode: str = "0644") -> None:
        command = f"install -D -m {mode} -o {owner} -g {owner} /dev/stdin {path}"
        done = subprocess.run(
            ["docker", "exec", "-i", self.name, "sh", "-ec", command],
            input=text,
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture
def host(grid: Grid, tmp_path: Path) -> Iterator[Host]:
    """A Debian with HTCondor and the packages that the page names."""
    packages = " ".join(f"python3-{name}" for name in PYTHON.split())
    named = blocks("## 1. Packages and users, on each node")[0].replace(
        "install", "install -qy --no-install-recommends", 1
    )
    image, name = f"{grid.project}/fresh", f"{grid.project}-fresh"
    (tmp_path / "Dockerfile").write_text(
        "FROM debian:trixie-slim\nENV DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8\n"
        "RUN apt-get update -q && apt-get install -qy --no-install-recommends condor gcc libc6-dev "
        f"{packages}\nRUN {named}"
    )
    subprocess.run(["docker", "build", "-q", "-t", image, str(tmp_path)], check=True)
    network = f"{grid.project}_grid"
    isolation = ["--security-opt", f"seccomp={ROOT}/deploy/seccomp.json"]
    isolation += ["--security-opt", "apparmor=unconfined"]
    names = ["--network", network, "--network-alias", NODE, "--hostname", NODE, "--name", name]
    trusted = ["--env", "REQUESTS_CA_BUNDLE=/etc/vmjobs/ca.pem"]
    isolation += ["--device", "/dev/net/tun"]
    memory = ["--tmpfs", "/dev/shm:exec,mode=1777,size=8g"]  # noqa: S108
    run(
        "docker",
        "run",
        "-d",
        "--init",
        *names,
        *isolation,
        *trusted,
        *memory,
        image,
        "sleep",
        "infinity",
    )
    try:
        yield Host(name)
    finally:
        run("docker", "exec", name, "condor_off", "-master", check=False)
        run("docker", "rm", "-f", name)
        run("docker", "rmi", "-f", image)


def unpacked(folder: Path) -> Path:
    """Unpack the committed source, without untracked files."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
    return folder


def test_a_node_made_as_the_page_says_runs_jobs(grid: Grid, host: Host, tmp_path: Path) -> None:
    source = unpacked(tmp_path / "src")
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*wheel, "-w", str(tmp_path), str(source))
    (made,) = tmp_path.glob("*.whl")
    run("docker", "cp", str(source), f"{host.name}:/src")
    run("docker", "cp", str(made), f"{host.name}:/tmp/")

    # The existing node of the pool, with its token.
    limited = here(blocks("### Who may submit")[0]).partition(">node17.condor")[0]
    token = grid.on("site", "sh", "-ec", limited)
    host.write("/etc/condor/tokens.d/condor", token, mode="0600")
    host.write("/etc/condor/config.d/10-pool.conf", BEFORE)
    host("useradd -m vmjobs; useradd -m physicist; rm -f /etc/condor/config.d/00-htcondor-9.0.config")
    host("install -d -o condor -g condor /run/condor /run/lock/condor /var/lib/condor/execute")
    host("cp condor/config/security.conf /etc/condor/config.d/05-security.conf; condor_master")

    # The steps of the page.
    _, programs = blocks("## 1. Packages and users, on each node")
    host(programs.replace("'vmjobs[agent]'", f"--no-index '/tmp/{made.name}[agent]'"))
    settings, make_token, *_ = blocks("## 2. The agent's settings")
    host.write("/etc/vmjobs/ca.pem", grid.on("api", "cat", "/etc/vmjobs/ca.pem"))
    host.write("/etc/vmjobs/config.toml", here(settings))
    command = here(make_token).replace("--file node17.token", "")
    host.write("/etc/vmjobs/token/token", grid.on("api", *command.split()), "vmjobs-agent", "0600")
    host("chown vmjobs-agent: /etc/vmjobs/token")
    host(blocks("## 3. The drop-in")[0])

    offered = ("condor_status", "-constraint", f'Machine == "{NODE}" && HasVMJobs', "-af", "Name")
    wait_for(lambda: grid.on("site", *offered).strip() or None, "the node to offer VMs", 120)
    host("vmjobs doctor --for node", user="vmjobs-agent")

    (job,) = grid.wait(*grid.submit("#!/bin/sh\necho $((6 * 7))\n", memory=MEMORY))
    assert (job.state, grid.out(job)) == (JobState.COMPLETED, "42\n")
    assert job.exit is not None
    assert job.exit.channel is ExitChannel.ENDPOINT
    assert job.node == NODE
    desk = Desk(grid, "site")
    cluster = desk.submit("cat data; uname -r", requirements=f'TARGET.Machine == "{NODE}"')
    desk.succeeded(cluster)
    assert desk.read("out").startswith("from a file\n")
    assert desk.shown(cluster)[0] == "COMPLETED"
