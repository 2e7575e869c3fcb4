"""Make HTCondor IDTOKENS from a signing key, without HTCondor's programs.

A token is a JSON web token, signed by HMAC-SHA256 with a key that HKDF derives from the key file
(``condor_token_create`` of HTCondor 23.9, and its source: condor_auth_passwd.cpp, token_utils.cpp).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import cycle
from typing import Final

#: HTCondor XORs its key files with this, so that they are not read by accident.
_SCRAMBLE: Final = b"\xde\xad\xbe\xef"


def create_token(
    key: bytes,
    key_name: str,
    identity: str,
    *,
    now: datetime,
    lifetime: timedelta,
    authorizations: Sequence[str] = (),
) -> str:
    """A token for ``identity`` (``user@trust-domain``).

    key: contents of the key file; key_name: its name, except ``POOL``, which HTCondor treats
    differently. authorizations: those that it is limited to, e.g. ``ADVERTISE_STARTD``; empty: all that
    the identity has.
    """
    claims = {
        "exp": int((now + lifetime).timestamp()),
        "iat": int(now.timestamp()),
        "iss": identity.partition("@")[2],
        "jti": secrets.token_hex(16),
        "sub": identity,
    }
    if authorizations:
        claims["scope"] = " ".join(f"condor:/{name}" for name in authorizations)
    signed = f"{_part({'alg': 'HS256', 'kid': key_name})}.{_part(claims)}"
    return f"{signed}.{sign(key, signed)}"


def sign(key: bytes, signed: str) -> str:
    """The signature, a token's third part, for the first two."""
    return _base64(hmac.digest(_derived(key), signed.encode(), hashlib.sha256))


def _derived(key: bytes) -> bytes:
    """HKDF (RFC 5869) of the key: one block of SHA-256."""
    plain = bytes(byte ^ mask for byte, mask in zip(key, cycle(_SCRAMBLE), strict=False))
    extracted = hmac.digest(b"htcondor", plain, hashlib.sha256)
    return hmac.digest(extracted, b"master jwt\x01", hashlib.sha256)


def _part(content: object) -> str:
    return _base64(json.dumps(content, separators=(",", ":")).encode())


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
