"""``vmjobs worker`` before it works: what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from vmjobs.cli.main import cli
from vmjobs.errors import ConfigError


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the service would keep its data."""
    monkeypatch.setenv("VMJOBS_CONFIG", "/dev/null")
    monkeypatch.setenv("VMJOBS_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def test_a_builder_does_not_run_as_root(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    done = CliRunner().invoke(cli, ["worker", "--builds"])
    refused = done.exception
    assert isinstance(refused, ConfigError)
    assert (refused.code, refused.exit_code) == ("BAD_CONFIG", 78)
    assert "does not run as root" in refused.message
    assert "setpriv" in refused.hint
    assert not data.exists()  # nothing is there that would be root's
