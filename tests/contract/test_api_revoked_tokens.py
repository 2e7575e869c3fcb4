"""Tokens that are listed, and revoked early: by the command, and as the API sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import repository.tokens
from api.tokens import USER_SCOPES, Scope, make_issuer
from repository.tokens import TokenRegister
from tests.kit.api_site import Site, make_site
from tests.kit.cli import Run
from vmjobs.errors import AmbiguousId, InvalidRequest, NotFound, Unavailable

pytestmark = pytest.mark.in_process

Good = Callable[..., str]
Listed = Callable[..., list[dict[str, str]]]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("VMJOBS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(repository.tokens, "REFRESH_SECONDS", 0.0)
    return make_site(tmp_path)


@pytest.fixture
def good(typed: Run) -> Good:
    """Run ``vmjobs token``, which succeeds; return its output."""
    return lambda *words: typed("token", *words, code=0).out.strip()


@pytest.fixture
def listed(typed: Run) -> Listed:
    return lambda *words: typed("token", "list", "--json", *words).json


def status(site: Site, token: str) -> int:
    return site.caller(token)("GET", "/v1/jobs").status_code


@pytest.mark.parametrize("by", ["beginning", "subject", "file", "id"])
def test_a_token_is_made_listed_and_revoked(
    site: Site, tmp_path: Path, by: str, good: Good, listed: Listed
) -> None:
    made = good("create", "user", "ada", "--days", "1")
    others = good("create", "user", "bob")
    (known,) = listed("--subject", "ada")
    assert (known["kind"], known["subject"], known["revoked"]) == ("user", "ada", None)
    assert [status(site, token) for token in (made, others)] == [200, 200]
    file = tmp_path / "leaked"
    file.write_text(made)
    words = {
        "beginning": (known["id"][:6],),
        "subject": ("--subject", "ada"),
        "file": ("--file", str(file)),
        "id": (known["id"],),
    }[by]
    assert "revoked" in good("revoke", *words)
    assert [status(site, token) for token in (made, others)] == [401, 200]
    problem = site.caller(made).problem(401, "GET", "/v1/jobs")
    assert problem["detail"] == "the token was revoked"
    assert listed("--subject", "ada") == []
    (known,) = listed("--subject", "ada", "--all")
    assert known["revoked"]
    good("revoke", known["id"])
    assert listed("--subject", "ada", "--all") == [known], "revoking it again changes nothing"


def test_a_token_made_without_the_database_is_listed_once_it_is_used(
    site: Site, good: Good, listed: Listed
) -> None:
    nodes = good("create", "node", "wn1.grid", "--offline")
    assert listed() == []
    assert site.caller(nodes)("GET", "/v1/nodes").status_code in {200, 403}
    (known,) = listed()
    assert (known["kind"], known["subject"]) == ("node", "wn1.grid")


def test_kinds_and_former_spellings(site: Site, good: Good, listed: Listed) -> None:
    assert good("user", "eve", "--admin").count(".") == 2
    assert good("rooster", "site").count(".") == 2
    assert good("node", "wn1").count(".") == 2
    assert [(t["subject"], t["kind"]) for t in listed()] == [
        ("eve", "admin"),
        ("site", "rooster"),
        ("wn1", "node"),
    ]
    assert "works" in good("list")


def test_tokens_of_jobs_are_not_listed(site: Site, listed: Listed) -> None:
    (job,) = site.user().submit()
    site.agent(job)("GET", f"/v1/jobs/{job}")
    assert [known["subject"] for known in listed()] == ["ada"]


def test_expired_tokens_are_listed_on_demand_and_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = make_issuer(site.config)
    register = TokenRegister(site.repository.database)
    for lifetime in (500, 1000):
        register.record(issuer.verify(issuer.user_token("ada", lifetime=lifetime)).record)
    (short, long) = sorted(register.tokens(), key=lambda t: t.expires)
    monkeypatch.setattr(repository.tokens, "utc_now", lambda: short.expires)
    assert register.tokens() == [long]
    assert {t.id for t in register.tokens(everything=True)} == {short.id, long.id}
    late = short.expires + repository.tokens.LIST_EXPIRED_FOR
    monkeypatch.setattr(repository.tokens, "utc_now", lambda: late.replace(year=late.year + 1))
    register.record(long)
    assert register.tokens(everything=True) == [long]


def test_what_cannot_be_revoked_is_told(site: Site, typed: Run) -> None:
    register = TokenRegister(site.repository.database)
    issuer = make_issuer(site.config)
    record = issuer.verify(issuer.user_token("ada")).record
    for ending in "01":
        register.record(record.model_copy(update={"id": "abcdef" + ending * 26}))
    for words, error in (
        ((), InvalidRequest),
        (("--subject", "bob"), NotFound),
        (("abcdef",), AmbiguousId),
        (("abcdef" + "0" * 26, "fedcba"), NotFound),
    ):
        done = typed("token", "revoke", *words)
        assert (done.code, f"[{error.code}]" in done.err) == (error.exit_code, True), done.err
    assert register.revoked() == frozenset(), "all or none"


def test_without_the_database_known_revocations_hold(
    site: Site, monkeypatch: pytest.MonkeyPatch, good: Good
) -> None:
    revoked, works = (good("create", "user", name) for name in ("ada", "bob"))
    good("revoke", "--subject", "ada")
    assert [status(site, token) for token in (revoked, works)] == [401, 200]

    def away(*_: object) -> None:
        raise Unavailable("database", "it is away")

    monkeypatch.setattr(TokenRegister, "revoked", away)
    monkeypatch.setattr(TokenRegister, "record", away)
    new = site.issuer.user_token("eve", USER_SCOPES | {Scope.ADMIN})
    assert [status(site, token) for token in (revoked, works, new)] == [401, 200, 200]
    begins = make_site(site.config.data_dir / "another")
    assert begins.user()("GET", "/v1/jobs").status_code == 503
