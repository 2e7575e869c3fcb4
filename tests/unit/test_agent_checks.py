"""Node checks: faults that keep a node from running any job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vmjobs.agent import checks
from vmjobs.agent.checks import MIN_FREE_BYTES, FaultCause, NodeChecks
from vmjobs.agent.node_health import FAILURE_LIMIT, NodeHealth
from vmjobs.agent.run.outcome import image_failed
from vmjobs.errors import Unauthenticated
from vmjobs.model import MIB


def test_an_account_that_is_missing_among_others(tmp_path: Path) -> None:
    """HTCondor runs each person's jobs under an account of their own."""
    said = NodeChecks(tmp_path, tmp_path / "images", ["root", "no-such-account"]).faults()
    assert list(said) == [FaultCause.ACCOUNT]
    assert "no account no-such-account" in said[FaultCause.ACCOUNT]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {"free": 40 * MIB}
    monkeypatch.setattr(checks, "disk_usage", lambda _path: SimpleNamespace(**left))
    made = NodeChecks(tmp_path, tmp_path / "images")
    said = f"the disk of {tmp_path} has 40 MiB free (at least 64 are needed): free some space"
    assert made.faults() == {FaultCause.DISK: said}
    left["free"] = MIN_FREE_BYTES
    assert made.faults() == {}


def test_a_token_that_the_service_refuses_is_told_once_as_it_changes(tmp_path: Path) -> None:
    told: list[dict[FaultCause, str]] = []
    made = NodeChecks(tmp_path, tmp_path / "images")
    made.on_change = lambda: told.append(made.faults())
    for why in ("", "it has expired", "it has expired", "", ""):
        made.note_token_fault(why)
    said = "the service rejects this node's token: it has expired"
    assert told == [{FaultCause.TOKEN: said}, {}]


def test_images_that_the_nodes_token_does_not_get_are_the_nodes_fault() -> None:
    health = NodeHealth()
    for _ in range(FAILURE_LIMIT):
        assert health.fault() == ""
        health.count_run(image_failed(Unauthenticated("the token has expired")).outcome)
    assert health.fault()
