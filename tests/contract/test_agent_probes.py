"""The process of an agent whose probe fails: with VMs to look after, and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.cli import VMJOBS
from tests.kit.cluster_vm_orders import cluster_vm_order, cluster_vm_record
from tests.kit.waiting import wait_until
from vmjobs.agent.cluster_vms.journal import ClusterVmJournal
from vmjobs.agent.node import cluster_vm_directory
from vmjobs.config import Config
from vmjobs.hypervisor import probe, procs
from vmjobs.hypervisor.uml.driver import UserModeLinux

SECONDS = 240.0


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """Settings of an agent on a node where nothing boots."""
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    return {
        **os.environ,
        "PATH": str(tmp_path),
        "VMJOBS_HYPERVISORS": "uml",
        "VMJOBS_STATE_DIR": str(tmp_path / "state"),
        "VMJOBS_SOCKET": str(tmp_path / "agent.sock"),
        "VMJOBS_API_URL": "http://127.0.0.1:9",
        "VMJOBS_AGENT_TOKEN_FILE": str(token),
        "VMJOBS_CLUSTER_MEMORY": "1024",
    }


def agent(settings: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen([VMJOBS, "agent"], env=settings, stderr=subprocess.PIPE, text=True)


def test_one_with_vms_looks_after_them(settings: dict[str, str], tmp_path: Path) -> None:
    order = cluster_vm_order()
    journal = ClusterVmJournal(cluster_vm_directory(Config(state_dir=tmp_path / "state")))
    journal.write(cluster_vm_record(order))
    with agent(settings) as running:
        assert running.stderr is not None
        said = ""
        while "ready at" not in said:
            line = running.stderr.readline()
            assert line, said
            said += line
        running.terminate()
        assert running.wait(SECONDS) == 0
    assert "no hypervisor works on this node: uml:" in said
    assert "1 cluster VMs" in said
    assert journal.paths(order.id).record.exists()


#: Answers ``--version`` as UML does; its guest hangs. A sandbox has no shell for a script.
_HANGS = """
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words) {
    if (count > 1 && !strcmp(words[1], "--version"))
        return puts("1") < 0;
    for (;;)
        pause();
}
"""


#: Probes as an agent does, with that kernel.
_PROBES = """
import sys
from vmjobs.hypervisor.uml.driver import UserModeLinux
UserModeLinux(sys.argv[1]).probe(600)
"""


def test_what_a_killed_process_was_probing_with_is_gone_with_the_next_agent(
    settings: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "linux.uml"
    compiler = ["musl-gcc", "-static", "-x", "c", "-o", program, "-"]
    subprocess.run(compiler, check=True, input=_HANGS, text=True)
    (tmp_path / "tmp").mkdir()
    settings |= {"TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", _PROBES, program]
    with subprocess.Popen(command, env=settings | {"PATH": os.environ["PATH"]}) as running:
        wait_until(lambda: guest_runs(running.pid), SECONDS, "the guest")
        left = probes(running.pid)
        running.kill()
    assert list((tmp_path / "tmp").iterdir())
    assert probes(running.pid) == left
    with agent(settings) as following:  # it has no sandbox to probe in, and no VMs: it ends
        _, said = following.communicate(timeout=SECONDS)
    assert following.returncode != 0
    assert "no hypervisor works on this node: uml:" in said
    assert not Path(settings["VMJOBS_SOCKET"]).exists()
    assert not probes(running.pid)
    assert not list((tmp_path / "tmp").iterdir())


def probes(pid: int) -> set[str]:
    """Names of the VMs of one process's probes; other tests have some, too."""
    return {name for name in UserModeLinux().list() if name.startswith(f"{probe.PROBE_PREFIX}{pid}-")}


def guest_runs(pid: int) -> bool:
    """Whether the sandbox of a process's probe has started its program."""
    umid = f"umid={probe.PROBE_PREFIX}{pid}-"
    processes = procs.processes_of(os.getuid())
    kernels = (process for process in processes if process.program == "linux.uml")
    return any(word.startswith(umid) for kernel in kernels for word in kernel.argv)
