"""CRC-32C (Castagnoli), the checksum of VHDX's headers and tables."""

from __future__ import annotations

from typing import Final

_POLYNOMIAL: Final = 0x82F63B78


def _entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE: Final = tuple(_entry(value) for value in range(256))


def crc32c(data: bytes) -> int:
    """Return the checksum; slow for more than some kilobytes."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFF_FFFF
