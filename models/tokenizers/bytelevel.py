"""GPT-2's alphabet: a printable character for each byte, so that a vocabulary is spelled as text.

Bytes that print keep their Latin-1 character; the others take the characters from U+0100 on. Knows
bytes and characters only, no vocabulary.
"""

from __future__ import annotations

__all__ = ["BYTE_TO_CHAR", "CHAR_TO_BYTE", "piece_bytes"]

_PRINTABLE = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

BYTE_TO_CHAR: tuple[str, ...] = tuple(
    chr(byte) if byte in _PRINTABLE else chr(0x100 + _OTHERS.index(byte)) for byte in range(256)
)
CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


def piece_bytes(piece: str) -> bytes:
    """The bytes that a vocabulary entry spells; one outside the alphabet stands for itself."""
    try:
        return bytes([CHAR_TO_BYTE[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "surrogateescape")
