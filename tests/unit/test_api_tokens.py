"""Tokens: issued tokens are accepted, all others are refused with a reason."""

from __future__ import annotations

import base64
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from api.tokens import (
    USER_SCOPES,
    ApiTokenIssuer,
    InsufficientScope,
    MissingToken,
    Scope,
    bearer_token,
    challenge,
    load_or_create_key,
)
from tests.kit.waiting import Clock
from vmjobs.errors import ConfigError, Forbidden, Unauthenticated

ISSUER = "https://vmjobs.example.org"


@pytest.fixture(autouse=True)
def issued(clock: Clock) -> None:
    clock.now = 1_800_000_000.0


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "issuer.pem"


@pytest.fixture
def issuer(key_file: Path, clock: Clock) -> ApiTokenIssuer:
    return ApiTokenIssuer(key_file, ISSUER, clock)


def signed(key_file: Path, algorithm: str = "ES256", **changes: Any) -> str:
    """A token made with the right key and wrong claims."""
    claims = {
        "iss": ISSUER,
        "sub": "ada",
        "aud": "vmjobs",
        "iat": 1_800_000_000,
        "nbf": 1_800_000_000,
        "exp": 1_800_000_100,
        "jti": "1",
        "scope": "compute.read",
    }
    claims = {k: v for k, v in {**claims, **changes}.items() if v is not None}
    return jwt.encode(claims, load_or_create_key(key_file), algorithm)


def test_what_tokens_are_good_for(issuer: ApiTokenIssuer) -> None:
    """A job's token is valid for that job and nothing else."""
    for token, subject, scopes, job in (
        (issuer.user_token("ada"), "ada", USER_SCOPES, None),
        (
            issuer.user_token("ada", [Scope.COMPUTE_READ], lifetime=60),
            "ada",
            {Scope.COMPUTE_READ},
            None,
        ),
        (issuer.job_token("abc123", "ada"), "ada", frozenset(), "abc123"),
        (issuer.node_token("wn1.grid"), "wn1.grid", {Scope.NODE}, None),
    ):
        principal = issuer.verify(token)
        assert (principal.subject, principal.scopes, principal.job_id) == (subject, scopes, job)
    assert Scope.NODE not in USER_SCOPES


def test_claims_follow_the_profile(issuer: ApiTokenIssuer) -> None:
    token = issuer.user_token("ada", [Scope.STORAGE_READ, Scope.COMPUTE_READ], lifetime=60)
    claims = jwt.decode(token, options={"verify_signature": False})
    assert claims["wlcg.ver"] == "1.0"
    assert claims["scope"] == "compute.read storage.read:/"
    assert claims["exp"] - claims["iat"] == 60
    assert jwt.get_unverified_header(token)["alg"] == "ES256"
    assert len(claims["jti"]) == 32


@pytest.mark.parametrize(("still", "no_more", "why"), [(9, 1, "expired"), (-20, -20, "not valid yet")])
def test_they_have_their_time_and_clocks_may_differ_a_little(
    issuer: ApiTokenIssuer, clock: Clock, still: int, no_more: int, why: str
) -> None:
    token = issuer.user_token("ada", lifetime=10)
    assert issuer.verify(token).subject == "ada"
    clock.now += still
    assert issuer.verify(token).subject == "ada"
    clock.now += no_more
    with pytest.raises(Unauthenticated, match=why):
        issuer.verify(token)


def test_foreign_issuers_and_foreign_keys_with_our_name(
    tmp_path: Path, key_file: Path, issuer: ApiTokenIssuer, clock: Clock
) -> None:
    elsewhere = ApiTokenIssuer(key_file, "https://elsewhere.example.org", clock)
    for other, why in (
        (elsewhere, "from an issuer"),
        (ApiTokenIssuer(tmp_path / "other.pem", ISSUER, clock), "signature"),
    ):
        with pytest.raises(Unauthenticated, match=why):
            issuer.verify(other.user_token("ada"))


def test_unsigned_and_symmetric_tokens(key_file: Path, issuer: ApiTokenIssuer) -> None:
    claims = {"iss": ISSUER, "sub": "eve", "aud": "vmjobs", "exp": 2_000_000_000}
    unsigned = jwt.encode(claims, None, "none")  # type: ignore[arg-type]
    public = load_or_create_key(key_file).public_key()
    der = public.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for token in (unsigned, jwt.encode(claims, base64.b64encode(der).decode(), "HS256")):
        with pytest.raises(Unauthenticated, match="not signed with ES256"):
            issuer.verify(token)


NO_TOKENS = ["a", "a.b", "a.b.c", "....", "\x00.\x00.\x00", "é.é.é", "eyJhbGciOiJFUzI1NiJ9.e30"]


@pytest.mark.parametrize("token", [*NO_TOKENS, "", "x" * 9000, "[" * 2000 + ".a.b"])
def test_malformed(issuer: ApiTokenIssuer, token: str) -> None:
    with pytest.raises(Unauthenticated, match="malformed"):
        issuer.verify(token)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"aud": "other"}, "another service"),
        ({"aud": None}, "no claim aud"),
        ({"sub": None}, "no claim sub"),
        ({"exp": None}, "no claim exp"),
        ({"exp": "soon"}, "malformed"),
        ({"exp": True}, "malformed"),
        ({"sub": ""}, "malformed"),
        ({"scope": ["compute.read"]}, "malformed"),
        ({"scope": "vmjobs.job:1 vmjobs.job:2"}, "malformed"),
    ],
)
def test_wrong_claims(
    key_file: Path, issuer: ApiTokenIssuer, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Unauthenticated, match=sentence):
        issuer.verify(signed(key_file, **change))


def test_unknown_scopes_are_ignored(key_file: Path, issuer: ApiTokenIssuer) -> None:
    token = signed(key_file, scope="compute.read compute.rule offline_access")
    assert issuer.verify(token).scopes == {Scope.COMPUTE_READ}


def test_key_is_private_and_made_once(key_file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: load_or_create_key(key_file), range(8)))
    assert len({key.private_numbers().private_value for key in keys}) == 1
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert os.listdir(key_file.parent) == ["issuer.pem"]  # noqa: PTH208


def test_bad_key_files(tmp_path: Path) -> None:
    other_curve = ec.generate_private_key(ec.SECP384R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "folder").mkdir()
    for name, content, why in (
        ("folder", None, "folder"),
        ("empty", b"", "empty"),
        ("text", b"no key", "text"),
        ("curve", other_curve, "P-256"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=why) as caught:
            load_or_create_key(tmp_path / name)
        assert "Errno" not in caught.value.message


def test_bearer_header() -> None:
    assert bearer_token("Bearer abc") == "abc"
    assert bearer_token("bearer  abc ") == "abc"
    for missing in (None, "", "  "):
        with pytest.raises(MissingToken):
            bearer_token(missing)
    for bad in ("Basic YTpi", "Bearer", "Bearer ", "Bearer a b"):
        with pytest.raises(Unauthenticated):
            bearer_token(bad)


def test_challenges() -> None:
    assert challenge(MissingToken("x")) == 'Bearer realm="vmjobs"'
    assert challenge(Unauthenticated('so "said" she\n')) == (
        'Bearer realm="vmjobs", error="invalid_token", error_description="so \'said\' she\'"'
    )
    assert challenge(Forbidden("x")) == 'Bearer realm="vmjobs", error="insufficient_scope"'
    assert challenge(InsufficientScope("x", "compute.read")).endswith(', scope="compute.read"')
