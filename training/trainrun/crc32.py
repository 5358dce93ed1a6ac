"""The CRC-32 of bytes whose pieces' checksums are known."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable

_POLYNOMIAL = 0xEDB88320  # of zlib and S3, with the lowest power in the highest bit


def crc32(data: bytes | memoryview) -> int:
    return zlib.crc32(data)


def joined(pieces: Iterable[tuple[int, int]]) -> int:
    """The checksum of pieces one after the other, each given by its checksum and its bytes.

    Appending n bytes multiplies a remainder by x^8n modulo the polynomial, and the checksum of what is appended is added
    (that is, XORed) to it. Multiplying takes 32 steps, and x^8n log2(n) multiplications.
    """
    whole = 0
    for checksum, size in pieces:
        whole = _product(whole, _power_of_x(8 * size)) ^ checksum
    return whole


def encoded(checksum: int) -> str:
    """As S3 writes it: base64 of the four bytes, highest first."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


def _product(a: int, b: int) -> int:
    result = 0
    for bit in range(31, -1, -1):  # coefficients of a from x^0 on
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)  # times x
    return result


def _power_of_x(exponent: int) -> int:
    result, square = 1 << 31, 1 << 30  # x^0 and x^1
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result
