"""Files of pictures as people have them, and what each is to localrt."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

__all__ = ["READ", "REFUSED"]

_GRADIENT = Image.fromarray(
    np.mgrid[0:30, 0:40, 0:3][:2].sum(axis=0).astype(np.uint8) * np.uint8(3)
)


def _file(kind: str, image: Image.Image = _GRADIENT, **options: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def _animated(kind: str, size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """With a second, black picture."""
    more = [Image.new("RGB", size)]
    return _file(kind, save_all=True, append_images=more, **options)


def _png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), *chunks]
    checked = ((kind, data, zlib.crc32(kind + data)) for kind, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)
        for kind, data, crc in checked
    )


_TURNED = Image.Exif()
_TURNED[0x0112] = 6
_PALETTE = _GRADIENT.quantize(8)
_CAMERA = _animated("MPO", (8, 6))  # a small picture for the camera's display

READ: dict[str, tuple[bytes, str, tuple[int, int]]] = {
    "jpeg": (_file("JPEG"), "image/jpeg", (40, 30)),
    "camera": (_CAMERA, "image/jpeg", (40, 30)),
    "turned camera": (_animated("MPO", (8, 6), exif=_TURNED), "image/jpeg", (30, 40)),
    "camera without its second picture": (_CAMERA[:-200], "image/jpeg", (40, 30)),
    "CMYK": (_file("JPEG", _GRADIENT.convert("CMYK")), "image/jpeg", (40, 30)),
    "bad EXIF": (_file("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"), "image/jpeg", (40, 30)),
    "16 bits": (
        _file("PNG", Image.fromarray(np.full((30, 40), 65535 // 2, np.uint16))),
        "image/png",
        (40, 30),
    ),
    "transparent palette": (_file("PNG", _PALETTE, transparency=0), "image/png", (40, 30)),
    "animated PNG": (_animated("PNG"), "image/png", (40, 30)),
    "animated WebP": (_animated("WEBP"), "image/webp", (40, 30)),
    "animated GIF": (_animated("GIF"), "image/gif", (40, 30)),
}
"""Each file with its media type, and its upright size."""

_NO_PICTURE = "not a PNG, JPEG, WebP or GIF picture"
REFUSED: dict[str, tuple[bytes, str]] = {
    **{kind: (_file(kind), _NO_PICTURE) for kind in ("BMP", "TIFF", "PPM", "ICO")},
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), _NO_PICTURE),
    "AVIF": (b"\0\0\0\x18ftypavif\0\0\0\0mif1avif" + bytes(99), _NO_PICTURE),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', _NO_PICTURE),
    "nothing": (b"", _NO_PICTURE),
    "camera cut in its header": (_CAMERA[:300], _NO_PICTURE),
    "bomb of text": (_png(4, 4, (b"zTXt", b"a\0\0" + zlib.compress(bytes(80 << 20)))), _NO_PICTURE),
    "bomb": (_png(60_000, 60_000, (b"IDAT", b"")), "too many pixels"),
    "more than models take": (_png(9000, 9000, (b"IDAT", b"")), "the most is 64 million"),
    "no pixels": (_png(0, 0, (b"IDAT", b"")), _NO_PICTURE),
    "bad pixels": (_png(4, 4, (b"IDAT", b"junk"), (b"IEND", b"")), "damaged"),
    "cut": (_file("PNG", Image.effect_noise((60, 60), 50))[:600], "damaged"),
}
"""Each file with words of its refusal. Pixels are first looked at by who shows them."""
