"""Records as TFRecord files hold them: length, its checksum, content, its checksum; little-endian.

TensorBoard has this too, and with it a part of TensorFlow, whose import takes longer than making a
plan.
"""

from __future__ import annotations

import struct


def record(content: bytes) -> bytes:
    """The bytes of one record."""
    length = struct.pack("<Q", len(content))
    return b"".join((length, _checksum(length), content, _checksum(content)))


def _checksum(content: bytes) -> bytes:
    """CRC-32C (Castagnoli), rotated and shifted, since a CRC of what has CRCs in it is weak."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _of_byte(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = tuple(map(_of_byte, range(256)))
