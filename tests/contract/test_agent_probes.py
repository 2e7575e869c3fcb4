"""An agent whose probe fails, as a process: with machines to look after, and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from unit.members_kit import member_order, member_record

from vmjobs.agent.members.journal import MemberJournal
from vmjobs.agent.node import member_directory
from vmjobs.config import Config

SECONDS = 60.0


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """Of an agent on a node on which nothing boots."""
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
    program = Path(sys.executable).with_name("vmjobs")
    return subprocess.Popen([program, "agent"], env=settings, stderr=subprocess.PIPE, text=True)


def test_one_without_machines_ends(settings: dict[str, str]) -> None:
    with agent(settings) as running:
        _, said = running.communicate(timeout=SECONDS)
    assert running.returncode != 0
    assert "no hypervisor works on this node: uml:" in said
    assert not Path(settings["VMJOBS_SOCKET"]).exists()


def test_one_with_machines_looks_after_them(settings: dict[str, str], tmp_path: Path) -> None:
    order = member_order()
    journal = MemberJournal(member_directory(Config(state_dir=tmp_path / "state")))
    journal.write(member_record(order))
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
    assert "1 members of clusters" in said
    assert journal.place(order.id).record.exists()
