"""Ids of jobs and arrays: 32 hex digits that sort by time and cannot be guessed."""

from __future__ import annotations

import re
import secrets
import time
from typing import Final

_PATTERN: Final = re.compile(r"[0-9a-f]{32}")


def new_ids(count: int) -> list[str]:
    """``count`` fresh ids: 48 bits of milliseconds, 80 bits of chance; the greatest comes first.

    Lists show the newest job first; so an array's jobs come in the order of their index.
    """
    stamp = f"{time.time_ns() // 1_000_000:012x}"
    return sorted((stamp + secrets.token_hex(10) for _ in range(count)), reverse=True)


def is_id(text: str) -> bool:
    """Whether ``text`` could be an id of ours."""
    return _PATTERN.fullmatch(text) is not None
