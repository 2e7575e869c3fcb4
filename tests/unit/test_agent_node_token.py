"""A node's token, renewed in its file."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from vmjobs.agent.node_token import RETRY_SECONDS, NodeToken


def token(issued: float, expires: float) -> str:
    claims = json.dumps({"iat": issued, "exp": expires}).encode()
    return f"head.{base64.urlsafe_b64encode(claims).rstrip(b'=').decode()}.signature"


def test_it_is_due_when_half_of_its_life_is_over_and_then_once_an_hour(tmp_path: Path) -> None:
    now = 0.0
    file = tmp_path / "token"
    file.write_text(token(0, 20_000))
    own = NodeToken(file, lambda: now)
    due = []
    for now in (0.0, 9_999.0, 10_000.0, 10_001.0, 10_000 + RETRY_SECONDS):  # noqa: B007
        due.append(own.is_due())
    assert due == [False, False, True, False, True]
    own.replace(token(now, now + 20_000))
    assert file.read_text() == token(now, now + 20_000) + "\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    now += 9_999
    assert not own.is_due()


@pytest.mark.parametrize("text", ["", "opaque", "a.b.c", "\N{SNOWMAN}", token(0, 1)[:10]])
def test_one_that_says_nothing_of_itself_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text, "utf-8")
    assert not NodeToken(tmp_path / "token").is_due()
    assert not NodeToken(tmp_path / "none").is_due()


def test_where_it_cannot_be_kept_nothing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(token(0, 1))
    monkeypatch.setattr("os.access", lambda *_: False)
    assert not NodeToken(file).is_due()
    NodeToken(tmp_path / "none" / "token").replace("x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]
