"""Whole tiny models, whose logits have the same bits on every machine: see ``logits.json``.

The table has a digest for each model and KV format. Weights and tokens come from a generator whose
numbers no version of a library changes; a tensor's from its name.

python -m tests.ops.code_paths save FOLDER     # writes the models, with transformers
python -m tests.ops.code_paths compare FOLDER [INSTRUCTION SET ...]  # with the kernels alone
python -m tests.ops.code_paths table FOLDER    # writes the table, with this machine's results
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from localrt.common.errors import OptionError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv_formats import KV_FORMATS, CacheFormat
from localrt.quant.ops.protocol import Batch
from tests.ops.test_native_matmul import ISAS

LENGTH = 300  # more than a block of the KV cache, whose results are merged
TABLE = Path(__file__).with_name("logits.json")
Digests = dict[str, dict[str, str]]


def save(folder: Path) -> None:
    """A folder for every architecture."""
    from tests.models.tiny import CONFIGS, save_tiny

    for name in CONFIGS:
        save_tiny(name, folder / name)
        fill(folder / name)


def fill(folder: Path) -> None:
    """Give a model's tensors values that do not depend on torch's version."""
    from safetensors.numpy import load_file, save_file

    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, values in tensors.items():
            assert values.dtype == np.float32, f"{name} is {values.dtype}"
            even = _numbers(zlib.crc32(name.encode()), values.size, 1 << 24) - 2.0**23
            scale, offset = (0.5, 0.5) if values.ndim == 1 else (0.25, 0.0)
            values[...] = (even * (scale / 2**23) + offset).reshape(values.shape)
        save_file(tensors, path, metadata={"format": "pt"})


def _numbers(seed: int, count: int, below: int) -> np.ndarray:
    """Whole numbers from 0, of which numpy promises the bits."""
    return np.random.PCG64(seed).random_raw(count) % np.uint64(below)


def logits(folder: Path, isa: str, kv: CacheFormat) -> np.ndarray:
    """Of a prompt, of tokens one by one behind it, and of a few together."""
    with closing(open_checkpoint(folder)) as checkpoint:
        config = read_config(checkpoint, context=LENGTH)
        decoder = load_decoder(checkpoint, NativeOps(threads=2, isa=isa, kv_format=kv), config)
    ids = (3 + _numbers(3, LENGTH, config.vocab_size - 3)).tolist()
    cache = decoder.cache(LENGTH)
    parts = [ids[:280], *([token] for token in ids[280:283]), ids[283:]]
    with closing(decoder):
        return np.concatenate([decoder.forward(Batch.extend([(cache, part)])) for part in parts])


def digest(folder: Path, isa: str, kv: CacheFormat) -> str:
    """What stands for the bits of a model's logits."""
    return hashlib.sha256(logits(folder, isa, kv).astype("<f4").tobytes()).hexdigest()[:12]


def known() -> Digests:
    """The table."""
    found: Digests = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def digests(folder: Path, isa: str) -> Iterator[tuple[CacheFormat, str]]:
    """Of a model, in the KV formats that it has: latent rows are not kept in four bits."""
    for kv in KV_FORMATS:
        try:
            yield kv, digest(folder, isa, kv)
        except OptionError:
            continue


def compare(folder: Path, isas: list[str]) -> int:
    """How many results of instruction sets are not the table's."""
    table, count, failed = known(), 0, 0
    for path in sorted(folder.iterdir()):
        for isa in isas:
            for kv, found in digests(path, isa):
                count += 1
                if found != table.get(path.name, {}).get(kv):
                    print(f"{path.name}, KV in {kv}: {isa} differs", flush=True)
                    failed += 1
    print(f"{', '.join(isas)}: {count - failed} of {count} results are the table's")
    return failed


def write_table(folder: Path) -> None:
    """Write the table with the results of this machine's best instruction set."""
    rows = {path.name: dict(digests(path, ISAS[0])) for path in sorted(folder.iterdir())}
    lines = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    do, where, isas = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if do == "compare":
        sys.exit(compare(where, isas or ISAS) > 0)
    {"save": save, "table": write_table}[do](where)
