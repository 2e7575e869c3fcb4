"""Bytes that do not compress."""

from __future__ import annotations

import random


def noise(size: int, seed: object = 0) -> bytes:
    """Incompressible bytes, always the same for the same seed."""
    return random.Random(repr(seed)).randbytes(size)
