"""Whole tiny models on every instruction set: each must give the bits of the portable path.

python -m tests.ops.code_paths save FOLDER     # with transformers
python -m tests.ops.code_paths compare FOLDER  # without: also on an emulated processor
"""

from __future__ import annotations

import sys
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

LENGTH = 40


def save(folder: Path) -> None:
    """A folder for every architecture."""
    from tests.models.tiny import CONFIGS, save_tiny

    for name in CONFIGS:
        save_tiny(name, folder / name)


def logits(folder: Path, isa: str, kv: CacheFormat) -> np.ndarray:
    """Of a prompt, and of tokens one by one behind it."""
    with closing(open_checkpoint(folder)) as checkpoint:
        config = read_config(checkpoint, context=LENGTH)
        decoder = load_decoder(checkpoint, NativeOps(threads=2, isa=isa, kv_format=kv), config)
    ids = np.random.default_rng(3).integers(3, config.vocab_size, LENGTH).tolist()
    cache = decoder.cache(LENGTH)
    parts = [ids[:20], *([token] for token in ids[20:23]), ids[23:]]
    return np.concatenate([decoder.forward(Batch.extend([(cache, part)])) for part in parts])


def compare(folder: Path) -> int:
    """How many models differ from the portable path on an instruction set of this machine."""
    failed = 0
    for path in sorted(folder.iterdir()):
        for kv in KV_FORMATS:
            try:
                wanted = logits(path, "portable", kv)
            except OptionError:  # latent rows are not kept in four bits
                continue
            for isa in ISAS:
                found = logits(path, isa, kv)
                if not np.array_equal(found, wanted):
                    off = np.abs(found - wanted).max() / np.abs(wanted).max()
                    print(f"{path.name}, KV in {kv}: {isa} differs by {off:.1e}", flush=True)
                    failed += 1
    print(f"{', '.join(ISAS)}: {failed} results differ from the portable path's")
    return failed


if __name__ == "__main__":
    do, where = sys.argv[1], Path(sys.argv[2])
    sys.exit(save(where) if do == "save" else compare(where) > 0)
