"""Trains a small model of Qwen3.5's dense architecture with its MTP block, on a CPU.

    python -m benchmarks.hybrid DIR [--steps 1500] [--seed 1]

Everything is kept in DIR, and the same command continues it: the model so far as it is published,
weights and optimizer in training.pt, and in held.jsonl beginnings of functions that were held out.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.heads.prompts import functions_in
from benchmarks.hybrid.model import HybridModel, config_of
from benchmarks.hybrid.text import VOCABULARY, read_tokens, source_files
from benchmarks.hybrid.training import Trainer, export

_SAVE_S = 120.0
_REPORT = 10  # steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the steps that are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    folder = options.dir
    folder.mkdir(parents=True, exist_ok=True)
    tokens = torch.from_numpy(read_tokens(folder))
    held = [json.dumps({"prompt": text}) for text in functions_in(source_files(held=True))]
    (folder / "held.jsonl").write_text("\n".join([*held, ""]))
    config = config_of(vocab=VOCABULARY)
    model = HybridModel(config, seed=options.seed, dtype=torch.bfloat16, compiled=True)
    trainer = Trainer(model, tokens, total=options.steps, seed=options.seed)
    descent, state = trainer.descent, folder / "training.pt"
    if state.exists():
        descent.load(state)
    saved, stopped = time.monotonic(), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    while descent.step < descent.total and not stopped.is_set():
        loss, agreed = trainer.train()
        if descent.step % _REPORT == 0:
            shares = " ".join(f"{share:.0%}" for share in agreed)
            took = f"{time.process_time():.0f} s of CPU time"
            print(f"step {descent.step}: loss {loss:.3f}; MTP {shares}; {took}", flush=True)
        if time.monotonic() - saved > _SAVE_S or descent.step == descent.total or stopped.is_set():
            descent.save(state)
            export(model, folder)
            saved = time.monotonic()
    return 0


if __name__ == "__main__":
    sys.exit(main())
