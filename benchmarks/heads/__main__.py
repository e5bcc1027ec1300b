"""Trains a draft head in EAGLE-3's published form on text that its target writes.

    python -m benchmarks.heads MODEL.gguf DIR [--held prompts.jsonl ...] [--sequences 2560]
        [--steps 1000] [--kinds chat ...] [--only text|train]

Everything is kept in DIR, and the same command continues it: the text with its features (9 KB a
token of a model with 1,536 hidden numbers), weights and optimizer, and the exported head in
DIR/eagle3. Prompts of --held are not learnt from; the head is scored on them. Both halves may run
at the same time: the training takes up what has been written. More --steps continue a training that
had ended.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.heads.head import HeadModel, Target, export, split
from benchmarks.heads.prompts import (
    KINDS,
    beginnings,
    held_names,
    held_out,
    held_rows,
    prompts_in_turn,
)
from benchmarks.heads.text import SequenceFile, write_text
from benchmarks.heads.training import Trainer
from benchmarks.heads.trees import simulate
from localrt.common.errors import LocalrtError
from localrt.engine.native.engine import NativeEngine
from localrt.loading.load import load_model
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import open_checkpoint
from localrt.models.tokenizers import Tokenizer, load_tokenizer

LENGTH = 384
_TOGETHER = 64
_SAVE_S = 240.0
_TREES = (8, 64)
_SIMULATED = 80  # tokens of each text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what is missing of the text, then train."""
    options = _parse(arguments)
    try:
        options.dir.mkdir(parents=True, exist_ok=True)
        if options.only != "train":
            _write(options)
        if options.only != "text":
            _train(options)
    except (LocalrtError, OSError) as error:
        print(f"heads: {error}", file=sys.stderr)
        return 1
    return 0


def _write(options: argparse.Namespace) -> None:
    loaded = load_model(options.model, LoadOptions(engine="native", ctx=LENGTH))
    with closing(loaded.engine) as engine:
        assert isinstance(engine, NativeEngine), "it was asked for"
        layers = (*options.layers, -1)
        held = held_out(loaded, held_rows(options.held)[:: options.held_step])
        for name, begun, count in (
            ("held", prompts_in_turn(held), len(held)),
            ("text", beginnings(loaded, 0, options.kinds), options.sequences),
        ):
            sequences = SequenceFile(options.dir / f"{name}.bin", LENGTH, 3 * engine.hidden_size)
            write_text(engine, begun, sequences, count, layers, loaded.eos_ids, _TOGETHER, _report)


def _train(options: argparse.Namespace) -> None:
    """Take the steps that are missing; export and score the head from time to time."""
    if options.threads:
        torch.set_num_threads(options.threads)
    with closing(open_checkpoint(options.model)) as checkpoint:
        tokenizer, decoder = load_tokenizer(checkpoint), checkpoint.config
        size, layers = 3 * int(decoder["hidden_size"]), int(decoder["num_hidden_layers"])
        text = SequenceFile(options.dir / "text.bin", LENGTH, size)
        ids = _vocabulary(text.read()["tokens"], int(decoder["vocab_size"]), options.vocab)
        target = Target.read(checkpoint, torch.from_numpy(ids))
    held = SequenceFile(options.dir / "held.bin", LENGTH, size).read() if options.held else None
    model = HeadModel(target, _scales(text.read()["features"][:8]), options.width)
    trainer = Trainer(model, total=options.steps, batch=options.batch, rate=options.rate)
    descent = trainer.descent
    state = options.dir / "training.pt"
    if state.exists():
        trainer.load(state)
    chats = sum("turns" in row for row in held_rows(options.held)[:: options.held_step])
    allowed = _Allowed(tokenizer, held_names(held_rows(options.held)))
    saved, stopped = time.monotonic(), threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    while descent.step < descent.total and not stopped.is_set():
        records, began = text.read(), time.monotonic()
        chosen = trainer.choose(allowed.among(records))
        loss, agreed = trainer.train(records[chosen])
        took = f"{time.monotonic() - began:.1f} s, {len(records)} sequences"
        _report(
            f"step {descent.step} of {descent.total}: loss {loss:.3f}, {_percent(agreed)}, {took}"
        )
        ends = descent.step == descent.total or stopped.is_set()
        if time.monotonic() - saved > options.save or ends:
            trainer.save(state)
            export(model, (*options.layers, layers), options.dir / "eagle3")
            if held is not None and not stopped.is_set():
                _score(trainer, held, chats, 4 if descent.step < descent.total else 1)
            saved = time.monotonic()


def _score(trainer: Trainer, held: npt.NDArray[np.void], chats: int, step: int) -> None:
    """Report how well the head guesses every ``step``-th held-out text; the last ``chats`` of them
    are conversations.
    """
    code = len(held) - chats
    for name, rows in (("code", held[:code:step]), ("chat", held[code::step])):
        if not len(rows):
            continue
        parts = [_percent(trainer.score(rows))]
        for budget in _TREES:
            saved = [simulate(trainer.model, row, budget, _SIMULATED) for row in rows[::2]]
            passes = sum(each.passes for each in saved)
            per_pass = sum(each.tokens for each in saved) / passes
            steps = sum(each.steps for each in saved) / passes
            parts.append(f"{budget} nodes {per_pass:.2f} tokens a pass in {steps:.1f} steps")
        _report(f"held-out {name} at step {trainer.descent.step}: {'; '.join(parts)}")


def _percent(shares: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.1f}" for share in shares) + " %"


class _Allowed:
    """Which sequences hold no definition that is held out: the target may know some by heart."""

    def __init__(self, tokenizer: Tokenizer, names: Sequence[str]) -> None:
        self._tokenizer, self._names = tokenizer, names
        self._numbers: list[int] = []
        self._checked = 0

    def among(self, records: npt.NDArray[np.void]) -> list[int]:
        for number in range(self._checked, len(records)):
            words = self._tokenizer.decode(records["tokens"][number].tolist())
            if not any(name in words for name in self._names):
                self._numbers.append(number)
        self._checked = len(records)
        return self._numbers


def _vocabulary(tokens: npt.NDArray[np.int32], size: int, most: int) -> npt.NDArray[np.int64]:
    """The tokens that the head guesses: the text's most frequent ones, then those of low ids, which
    byte-pair encoding merged first. Output rows are the target's, so that others may be chosen
    whenever a training goes on.
    """
    counts = np.bincount(tokens.reshape(-1), minlength=size)
    return np.sort(np.argsort(-counts, kind="stable")[:most])


def _scales(bits: npt.NDArray[np.uint16]) -> torch.Tensor:
    """The size of each layer's features (B, T, 3D), but for a text's first tokens', which are
    thousands of times as large.
    """
    features = torch.from_numpy(np.array(bits[:, 8:]).view(np.int16)).view(torch.bfloat16)
    rms = split(features.float(), 3).square().mean(-1).sqrt()
    scales: torch.Tensor = rms.flatten(0, 1).median(0).values
    return scales


def _report(line: str) -> None:
    print(line, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--held", type=Path, nargs="*", default=[], help="JSONL files of prompts")
    parser.add_argument("--held-step", type=int, default=3, help="score on each n-th of them")
    parser.add_argument("--layers", type=int, nargs=2, default=[8, 18], help="low and mid")
    parser.add_argument("--sequences", type=int, default=2560, help=f"of {LENGTH} tokens")
    parser.add_argument("--kinds", nargs="+", choices=sorted({*KINDS}), default=KINDS)
    parser.add_argument("--only", choices=["text", "train"])
    parser.add_argument("--vocab", type=int, default=16384, help="tokens that the head guesses")
    parser.add_argument("--width", type=int, default=4608, help="of the head's MLP")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, help="of the training")
    parser.add_argument("--save", type=float, default=_SAVE_S, help="seconds between exports")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
