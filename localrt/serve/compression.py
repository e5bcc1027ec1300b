"""Bodies that come compressed, unpacked piece by piece up to a bound.

zstd needs Python 3.14 or the package ``backports.zstd``; gzip and deflate are always there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from localrt.serve.errors import ApiError, invalid

__all__ = ["Unpacker", "encodings"]

_ZLIB = 15 + 32  # a window of 32 KiB, in gzip's or zlib's wrapping
_ZSTD_WINDOW = 23  # 8 MiB, the most that every decoder has to take


class Unpacker:
    """Of one body of at most ``most`` bytes, in the ``encoding`` that a request names.

    Raises:
        ApiError: 415, the encoding is not known here.
    """

    def __init__(self, encoding: str, most: int) -> None:
        name = encoding.strip().lower()
        self._left = most
        self._name = name
        self._decoder: Any = None
        if name in ("", "identity"):
            return
        makers = encodings()
        if name not in makers:
            known = [*makers, "identity"]
            raise ApiError(
                415,
                f"the encoding {encoding[:40]!r} of the body is not known here: send "
                f"{', '.join(known[:-1])} or {known[-1]}",
                headers={"Accept-Encoding": ", ".join(makers)},
            )
        self._decoder = makers[name]()

    def push(self, data: bytes) -> bytes:
        """``data`` unpacked: one byte more than may come where there is more than that.

        Raises:
            ApiError: 400, it is nothing of this encoding.
        """
        if self._decoder is None or not data:
            return data
        try:
            found: bytes = self._decoder.decompress(data, self._left + 1)
        except Exception as error:  # zlib's, zstd's or EOFError
            raise invalid(f"the body is not {self._name}") from error
        self._left -= len(found)
        if self._decoder.unused_data:
            raise invalid(f"the body goes on behind its {self._name}")
        return found

    def end(self) -> None:
        """Nothing more comes.

        Raises:
            ApiError: 400, something is missing.
        """
        if self._decoder is not None and not self._decoder.eof:
            raise invalid(f"the body is {self._name} that ends too early")


def encodings() -> dict[str, Callable[[], Any]]:
    """What makes a decoder of each encoding that is known here."""
    found: dict[str, Callable[[], Any]] = dict.fromkeys(
        ("gzip", "deflate", "x-gzip"), lambda: zlib.decompressobj(_ZLIB)
    )
    for module in ("compression.zstd", "backports.zstd"):
        try:
            zstd = import_module(module)
        except ImportError:
            continue
        window = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW}
        found["zstd"] = partial(zstd.ZstdDecompressor, options=window)
        break
    return found
