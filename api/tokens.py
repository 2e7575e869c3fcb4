"""Bearer tokens: ES256 JSON web tokens in the WLCG profile, and their permissions.

One key signs and verifies. It is in a file of its own (0600), created on first use; several
processes may start at once and still agree on one key.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from repository.tokens import TokenRecord
from vmjobs.config import Config
from vmjobs.errors import ConfigError, Forbidden, Unauthenticated, reason_of

AUDIENCE: Final = "vmjobs"
ALGORITHM: Final = "ES256"
JOB_SCOPE: Final = "vmjobs.job:"
REALM: Final = "vmjobs"
MAX_TOKEN_BYTES: Final = 8192
CLOCK_SKEW_SECONDS: Final = 30
CACHED_TOKENS: Final = 4096

USER_LIFETIME: Final = 12 * 3600
NODE_LIFETIME: Final = 365 * 86400
ROOSTER_LIFETIME: Final = NODE_LIFETIME
#: Longer than any job may run. A job's token is worthless once the job has ended.
JOB_LIFETIME: Final = 60 * 86400


class Scope(StrEnum):
    """Permissions of a token. The ``compute`` and ``storage`` scopes are WLCG's."""

    COMPUTE_READ = "compute.read"
    COMPUTE_CREATE = "compute.create"
    COMPUTE_MODIFY = "compute.modify"
    COMPUTE_CANCEL = "compute.cancel"
    STORAGE_READ = "storage.read:/"
    STORAGE_CREATE = "storage.create:/"
    STORAGE_MODIFY = "storage.modify:/"
    NODE = "vmjobs.node"
    WAKE = "vmjobs.wake"
    ADMIN = "vmjobs.admin"


USER_SCOPES: Final = frozenset(Scope) - {Scope.NODE, Scope.WAKE, Scope.ADMIN}
#: The WLCG profile's claim for a user's groups.
GROUPS: Final = "wlcg.groups"
MAX_GROUPS: Final = 100
MAX_ID: Final = 255


@dataclass(frozen=True)
class Principal:
    """The caller. ``job_id`` is set for a token of a single job.

    issued, expires: seconds since 1970.
    """

    subject: str
    scopes: frozenset[Scope]
    job_id: str | None = None
    groups: frozenset[str] = frozenset()
    token_id: str = ""
    issued: float = 0.0
    expires: float = 0.0

    @property
    def record(self) -> TokenRecord:
        """The record of the token."""
        kinds = {Scope.NODE: "node", Scope.WAKE: "rooster", Scope.ADMIN: "admin"}
        return TokenRecord(
            id=self.token_id,
            kind=next((kind for scope, kind in kinds.items() if scope in self.scopes), "user"),
            subject=self.subject,
            issued=datetime.fromtimestamp(self.issued, UTC),
            expires=datetime.fromtimestamp(self.expires, UTC),
        )


class MissingToken(Unauthenticated):
    """The request has no bearer token."""


class InsufficientScope(Forbidden):
    """The token is valid, but lacks a permission. ``scope``: would have been enough."""

    def __init__(self, message: str, scope: str = "") -> None:
        super().__init__(message, hint=f"get a token with the scope {scope}" if scope else "")
        self.scope = scope


def bearer_token(header: str | None) -> str:
    """Return the token in an ``Authorization`` header.

    Raises:
        MissingToken: there is none.
        Unauthenticated: the header has another scheme, or not exactly one token.
    """
    if not header or not header.strip():
        raise MissingToken("this needs a bearer token", hint="send 'Authorization: Bearer TOKEN'")
    scheme, _, token = header.strip().partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated("the Authorization header is not of the Bearer scheme")
    if not token.strip() or " " in token.strip():
        raise Unauthenticated("the Authorization header does not hold exactly one token")
    return token.strip()


def challenge(error: Unauthenticated | Forbidden) -> str:
    """Return the ``WWW-Authenticate`` header (RFC 6750) of a refusal."""
    parts = [f'Bearer realm="{REALM}"']
    if isinstance(error, Forbidden):
        parts.append('error="insufficient_scope"')
        scope = getattr(error, "scope", "")
        parts += [f'scope="{scope}"'] if scope else []
    elif not isinstance(error, MissingToken):
        parts += ['error="invalid_token"', f'error_description="{_quotable(error.message)}"']
    return ", ".join(parts)


def _quotable(text: str) -> str:
    return "".join(c if " " <= c <= "~" and c not in '"\\' else "'" for c in text)


class ApiTokenIssuer:
    """Issues tokens and verifies them, with the key in ``key_file``.

    ``issuer`` is the ``iss`` claim; tokens of any other issuer are refused.
    """

    def __init__(self, key_file: Path, issuer: str, clock: Callable[[], float] = time.time) -> None:
        self.issuer = issuer
        self._clock = clock
        key = load_or_create_key(key_file)
        # Any: PyJWT's older releases annotate keys as str, though they take key objects.
        self._key: Any = key
        self._public: Any = key.public_key()
        self._kid = thumbprint(key.public_key())
        # Pollers send one token thousands of times; only its times need another check.
        self._claims = lru_cache(maxsize=CACHED_TOKENS)(self._verified_claims)

    def user_token(
        self,
        user: str,
        scopes: Iterable[Scope] = USER_SCOPES,
        lifetime: float = USER_LIFETIME,
        groups: Iterable[str] = (),
    ) -> str:
        """Issue a token for a user who is in ``groups``; ``lifetime`` in seconds."""
        return self._mint(user, sorted(scopes), lifetime, sorted(groups))

    def node_token(self, node: str, lifetime: float = NODE_LIFETIME) -> str:
        """Issue a token for an execute node: to announce itself, and to read images."""
        return self._mint(node, [Scope.NODE], lifetime)

    def renewed_node_token(self, old: Principal) -> str:
        """Issue a new token like a node's old one; "" in the first half of its life."""
        if self._clock() < (old.issued + old.expires) / 2:
            return ""
        return self.node_token(old.subject, old.expires - old.issued)

    def rooster_token(self, pool: str, lifetime: float = ROOSTER_LIFETIME) -> str:
        """Issue a token for a pool's condor_rooster: it may only wake clusters."""
        return self._mint(pool, [Scope.WAKE], lifetime)

    def job_token(self, job_id: str, owner: str, lifetime: float = JOB_LIFETIME) -> str:
        """Issue a token for the agent that runs a job, on behalf of the job's owner."""
        return self._mint(owner, [JOB_SCOPE + job_id], lifetime)

    def _mint(
        self, subject: str, scopes: list[str], lifetime: float, groups: Sequence[str] = ()
    ) -> str:
        start = int(self._clock())
        claims: dict[str, Any] = {
            "iss": self.issuer,
            "sub": subject,
            "aud": AUDIENCE,
            "iat": start,
            "nbf": start,
            "exp": int(start + lifetime),
            "jti": secrets.token_hex(16),
            "wlcg.ver": "1.0",
            "scope": " ".join(scopes),
        }
        if groups:
            claims[GROUPS] = list(groups)
        return jwt.encode(claims, self._key, ALGORITHM, headers={"kid": self._kid})

    def verify(self, token: str) -> Principal:
        """Return the holder of this token, with its permissions.

        Raises:
            Unauthenticated: malformed, expired, not yet valid, from another issuer, for another
                service, or with a signature that is not ours.
        """
        claims = self._claims(token)
        self._check_times(claims)
        return _principal(claims)

    def _verified_claims(self, token: str) -> dict[str, Any]:
        """Return the claims of a token that we signed, without a check of its times."""
        self._check_shape(token)
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._public,
                algorithms=[ALGORITHM],
                audience=AUDIENCE,
                issuer=self.issuer,
                options={
                    "require": ["iss", "sub", "aud", "exp", "iat", "jti"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.InvalidSignatureError as error:
            raise Unauthenticated("the token's signature is not ours") from error
        except jwt.InvalidAudienceError as error:
            raise Unauthenticated("the token is meant for another service") from error
        except jwt.InvalidIssuerError as error:
            raise _foreign_issuer() from error
        except jwt.MissingRequiredClaimError as error:
            raise Unauthenticated(f"the token has no claim {error.claim}") from error
        except (jwt.InvalidTokenError, ValueError) as error:
            raise _malformed() from error
        return claims

    def _check_shape(self, token: str) -> None:
        """Check the unverified parts only to report *why* a token is refused."""
        if len(token) > MAX_TOKEN_BYTES or token.count(".") != 2:
            raise _malformed()
        try:
            header = jwt.get_unverified_header(token)
            claims = jwt.decode(token, options={"verify_signature": False})
        except (jwt.InvalidTokenError, ValueError, RecursionError) as error:
            raise _malformed() from error
        if claims.get("iss") != self.issuer:
            raise _foreign_issuer()
        if header.get("alg") != ALGORITHM:
            raise Unauthenticated(f"the token is not signed with {ALGORITHM}")

    def _check_times(self, claims: dict[str, Any]) -> None:
        moments = [claims["exp"], claims["iat"], claims.get("nbf", 0)]
        if not all(isinstance(m, int | float) and not isinstance(m, bool) for m in moments):
            raise _malformed()
        present = self._clock()
        if present >= claims["exp"]:
            raise Unauthenticated("the token has expired", hint="get a new one")
        if present + CLOCK_SKEW_SECONDS < claims.get("nbf", 0):
            raise Unauthenticated("the token is not valid yet", hint="compare the clocks")


def make_issuer(config: Config) -> ApiTokenIssuer:
    """Create the issuer of this service's tokens; its key is created on first use.

    Raises:
        ConfigError: the key cannot be read or created.
    """
    return ApiTokenIssuer(config.data_dir / "keys" / "issuer.pem", config.issuer)


def _malformed() -> Unauthenticated:
    return Unauthenticated("the token is malformed: it is not a JSON web token")


def _foreign_issuer() -> Unauthenticated:
    return Unauthenticated("the token is from an issuer that this service does not trust")


def _principal(claims: dict[str, Any]) -> Principal:
    subject, granted = claims["sub"], claims.get("scope", "")
    if not (isinstance(subject, str) and subject and isinstance(granted, str)):
        raise _malformed()
    if not (isinstance(token_id := claims["jti"], str) and 0 < len(token_id) <= MAX_ID):
        raise _malformed()
    words = granted.split()
    known = frozenset(Scope(word) for word in words if word in frozenset(Scope))
    jobs = [word.removeprefix(JOB_SCOPE) for word in words if word.startswith(JOB_SCOPE)]
    if len(jobs) > 1:
        raise _malformed()
    groups = _groups(claims.get(GROUPS, []))
    job = jobs[0] if jobs else None
    return Principal(subject, known, job, groups, token_id, claims["iat"], claims["exp"])


def _groups(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or len(value) > MAX_GROUPS:
        raise _malformed()
    if not all(isinstance(name, str) and 0 < len(name) <= 255 for name in value):
        raise _malformed()
    return frozenset(value)


# --------------------------------------------------------------------------- the key


def load_or_create_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the P-256 key in ``path``; if missing, create it, readable by its owner.

    Raises:
        ConfigError: the file cannot be read or created, or holds something else.
    """
    try:
        if not path.exists():
            _make_key(path)
        loaded = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"cannot use the token key {path}: {reason_of(error)}") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the token key {path} is not a private key in PEM form") from error
    if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.curve.name != "secp256r1":
        raise ConfigError(f"the token key {path} is not a P-256 key")
    return loaded


def _make_key(path: Path) -> None:
    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".issuer-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        # A link never replaces: if two processes start at once, the first one's key stays.
        os.link(name, path)
    except FileExistsError:
        return
    finally:
        Path(name).unlink()


def thumbprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the key's RFC 7638 thumbprint, used as key id."""
    numbers = key.public_numbers()
    x, y = (_base64url(n.to_bytes(32, "big")) for n in (numbers.x, numbers.y))
    members = {"crv": "P-256", "kty": "EC", "x": x, "y": y}
    text = json.dumps(members, sort_keys=True, separators=(",", ":"))
    return _base64url(hashlib.sha256(text.encode()).digest())


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
