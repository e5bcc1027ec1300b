"""Rows of a table of hashed n-grams from a cold disk: how long a token's take, and a prompt's.

    python -m benchmarks.offload.ngrams [--size 16GB] [--tokens N] [--rate TOK/S] [--file FILE]

A file of random bytes stands for the published FP8 table (Qwen3.8-Flash-Next: 320 million rows of
160 bytes, 16 a token), with as many rows as fit in ``--size``. The rows are those of random tokens,
read directly, the page cache dropped before. Nothing is computed meanwhile, so that all of the
reading is waited for: in a model it is asked for before the first layer. The share is of a token's
time at ``--rate``. It exits 1 above 2 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import Record, save, setting
from benchmarks.offload.tables import ngrams_table
from localrt.formatting import parse_size
from localrt.models.ngrams import NgramHash, NgramSpec, ngrams_of
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.scattered_rows import RowRange, ScatteredRows

_ROW = 160
_VOCAB, _SEPARATOR = 248_320, 248_046
_WRITE = 64 << 20
_MOST_SHARE = 0.02
_PROMPT = 512  # tokens that a pass of a prompt has


class _CountingFiles(StoreFiles):
    """Counts the bytes that it reads; several threads do."""

    def __init__(self, file: Path) -> None:
        super().__init__(file.parent, [file.name], direct=True)
        self.sizes: list[int] = []

    def read_into(self, name: str, offset: int, out: np.ndarray, least: int | None = None) -> None:
        """See ``StoreFiles``."""
        super().read_into(name, offset, out, least)
        self.sizes.append(len(out))

    @property
    def still_direct(self) -> bool:
        """No read went through the page cache."""
        return all(direct for _, direct in self._descriptors.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table unless it is there, and read from it."""
    parser = make_parser(__doc__, results="ngrams")
    parser.add_argument("--size", type=parse_size, default=16_000_000_000, help="of the table")
    parser.add_argument("--tokens", type=int, default=400, help="tokens decoded")
    parser.add_argument(
        "--rate", type=float, default=22.5, help="tokens per second to compare with"
    )
    parser.add_argument("--file", type=Path, help="the table, kept (default: a temporary file)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.file and args.file.parent) as folder:
        row = _measure(args, args.file or Path(folder) / "ngrams.bin")
    record = {**setting(cited_command("offload.ngrams", arguments)), "rows": [row]}
    save(args.json, record)
    print(ngrams_table(record))
    return 0 if row["share"] <= _MOST_SHARE else 1


def _measure(args: argparse.Namespace, file: Path) -> Record:
    hashed = _hash(args.size // _ROW)
    _fill(file, hashed.rows * _ROW)
    random = np.random.default_rng(0)
    text = random.integers(_VOCAB - 300, size=args.tokens + 2 * _PROMPT)
    process = psutil.Process()
    with (
        closing(_CountingFiles(file)) as files,
        closing(ScatteredRows(files, [RowRange(file.name, 0, hashed.rows)], _ROW)) as table,
    ):
        before, busy = process.memory_info().rss, time.process_time()
        seconds = [_time(hashed, table, text[: n + 1], 1) for n in range(args.tokens)]
        busy = time.process_time() - busy
        token_reads, token_bytes = len(files.sizes), sum(files.sizes)
        prompts = [_time(hashed, table, text[: -_PROMPT * n or None], _PROMPT) for n in (0, 1)]
        return {
            "name": "ngrams",
            "table_bytes": hashed.rows * _ROW,
            "rows": hashed.rows,
            "rows_per_token": hashed.spec.rows_per_token,
            "direct": files.still_direct,
            "reads_per_token": token_reads / args.tokens,
            "read_bytes_per_token": token_bytes / args.tokens,
            "token_s": statistics.median(seconds),
            "token_p99_s": float(np.quantile(seconds, 0.99)),
            "token_cpu_s": busy / args.tokens,
            "prompt_tokens": _PROMPT,
            "prompt_s": min(prompts),
            "rate": args.rate,
            "share": statistics.median(seconds) * args.rate,
            "memory_growth_bytes": max(0, process.memory_info().rss - before),
        }


def _hash(rows: int) -> NgramHash:
    """With almost so many rows: heads are the published ones, their sizes scaled."""
    spec = NgramSpec(vocab=_VOCAB, separator=_SEPARATOR)
    return NgramHash(
        NgramSpec(vocab=_VOCAB, separator=_SEPARATOR, rows_from=rows // spec.rows_per_token)
    )


def _time(hashed: NgramHash, table: ScatteredRows, text: np.ndarray, count: int) -> float:
    """Seconds from a pass's last ``count`` tokens to their rows."""
    started = time.perf_counter()
    before, tokens = text[:-count], text[-count:]
    ids = hashed.rows_of(ngrams_of(hashed.spec, tokens, before[-hashed.spec.orders :]))
    table.ask(ids.reshape(-1)).take()
    return time.perf_counter() - started


def _fill(file: Path, nbytes: int) -> None:
    """Random bytes, unless the file has so many; none of them stays in the page cache."""
    if not file.exists() or file.stat().st_size != nbytes:
        random = np.random.default_rng(1)
        with file.open("wb") as out:
            for start in range(0, nbytes, _WRITE):
                out.write(random.bytes(min(_WRITE, nbytes - start)))
                out.flush()
                os.fdatasync(out.fileno())
                os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with file.open("rb") as data:
        os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
