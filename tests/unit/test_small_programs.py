"""Programs beside each job of a node are small, and find the agent by its own settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import ROOT
from vmjobs.agent_socket import agent_socket
from vmjobs.config import load

#: Each takes longer to import than a tenth of such a program's work may take, or imports much.
LARGE = ("argparse", "dataclasses", "inspect", "logging", "pathlib", "pydantic", "subprocess", "typing")


@pytest.mark.parametrize("program", ["condor.node.exec_transparent", "condor.node.startd_cron"])
def test_what_runs_beside_each_job_imports_nothing_large(program: str) -> None:
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); import {program}; "
        f"print(*sorted(sys.modules.keys() & {set(LARGE)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_a_job_with_chirp_needs_the_standard_library_only() -> None:
    code = (
        f"import sys; sys.path.append({str(ROOT)!r}); import vmjobs.agent.condor_job.stream_multiplexer"
    )
    subprocess.run([sys.executable, "-IS", "-c", code], check=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        'socket = "/run/x y/agent.sock"',
        'node_name = "n"\n socket="/a"  # where it was',
        "socket = '/a'",
        'socket = "/a\\u0062"',
        'site = """\nsocket = "/wrong"\n"""\nsocket = "/right"',
        "site = '''\nsocket = \"/wrong\"\n'''",
        'node_name = "socket"\n',
        '"socket" = "/a"',
    ],
)
def test_the_agent_is_looked_for_where_it_listens(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    monkeypatch.delenv("VMJOBS_SOCKET", raising=False)
    monkeypatch.setenv("VMJOBS_CONFIG", str(file))
    assert agent_socket() == str(load().socket)
    monkeypatch.setenv("VMJOBS_SOCKET", "/elsewhere")
    assert agent_socket() == str(load().socket) == "/elsewhere"
