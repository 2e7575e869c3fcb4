"""Reads HTCondor's tokens."""

from __future__ import annotations

import base64
import json
from typing import Any


def claims_of(token: bytes | str) -> dict[str, Any]:
    """Return what a token (a JSON web token) claims; its signature is not checked."""
    part = (token.decode() if isinstance(token, bytes) else token).split(".")[1]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return found
