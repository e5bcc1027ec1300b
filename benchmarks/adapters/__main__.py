"""What LoRA adapters cost: decoding with one, chats with one each, and adding one.

    python -m benchmarks.adapters MODEL [--rank 16] [--chats 8] [--json FILE]

Random adapters of all linear modules. With and without them by turns, on the same sessions' ends;
every result is the median of the runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import localrt
from benchmarks.adapters.tables import adapters_table
from benchmarks.common.command import cited_command, find_model, make_parser
from benchmarks.common.record import Record, save, setting
from benchmarks.common.timing import by_turns, median_ratio
from localrt.engine.protocol import Engine, EngineSession
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from tests.inside import core_of, engine_of

PROMPT, STEPS = 64, 32  # tokens before what is measured, and of it
LONG = 512  # tokens of a prompt that is measured


def write_adapter(folder: Path, checkpoint: Checkpoint, rank: int, seed: int) -> Path:
    """A random adapter of every linear module, as PEFT saves it."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, info in checkpoint.tensors.items():
        if len(info.shape) == 2 and name.endswith("_proj.weight"):
            rows, columns = info.shape
            stem = "base_model.model." + name.removesuffix(".weight")
            a = rng.standard_normal((rank, columns), np.float32) / columns**0.5
            tensors[f"{stem}.lora_A.weight"] = a
            tensors[f"{stem}.lora_B.weight"] = rng.standard_normal((rows, rank), np.float32) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def decoding(engine: Engine, sessions: Sequence[EngineSession]) -> Callable[[], None]:
    """``STEPS`` passes that append a token to each of the sessions, which then go back."""

    def run() -> None:
        for _ in range(STEPS):
            engine.extend_batch([(s, [11]) for s in sessions], wanted=range(len(sessions)))
        for session in sessions:
            session.trim(PROMPT)

    return run


def measured(engine: Engine, mixes: Sequence[Any], runs: int) -> Record:
    """Sessions without adapters, and as many with ``mixes``."""
    with ExitStack() as opened:
        groups: dict[str, list[EngineSession]] = {"plain": [], "adapted": []}
        for kind, group in groups.items():
            for mix in mixes:
                session = opened.enter_context(closing(engine.session(PROMPT + STEPS)))
                session.use(mix if kind == "adapted" else ())
                session.extend(list(range(5, 5 + PROMPT)))
                group.append(session)
        calls = {kind: decoding(engine, group) for kind, group in groups.items()}
        samples = by_turns(calls, runs)
    rates = {kind: STEPS * len(mixes) / statistics.median(s) for kind, s in samples.items()}
    return {
        "chats": len(mixes),
        "plain_tok_s": rates["plain"],
        "adapted_tok_s": rates["adapted"],
        "cost": median_ratio(samples["adapted"], samples["plain"]) - 1,
    }


def prompts(engine: Engine, mix: Any, runs: int) -> Record:
    """A prompt of ``LONG`` tokens, without adapters and with ``mix``."""
    with ExitStack() as opened:
        calls = {}
        for kind, own in (("plain", ()), ("adapted", mix)):
            session = opened.enter_context(closing(engine.session(LONG)))
            session.use(own)

            def read(session: EngineSession = session) -> None:
                session.extend(list(range(5, 5 + LONG)))
                session.trim(0)

            calls[kind] = read
        samples = by_turns(calls, runs)
    rates = {f"{kind}_tok_s": LONG / statistics.median(s) for kind, s in samples.items()}
    return {"prompt": LONG, **rates, "cost": median_ratio(samples["adapted"], samples["plain"]) - 1}


def run(args: argparse.Namespace, command: str) -> Record:
    """All results of one model."""
    path = find_model(args.model)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_checkpoint(path)) as checkpoint,
        localrt.load(path, ctx=1024, draft="off") as model,
    ):
        paths = [
            write_adapter(Path(folder, f"a{seed}"), checkpoint, args.rank, seed)
            for seed in range(args.chats)
        ]
        added = []
        for index, adapter in enumerate(paths):
            started = time.perf_counter()
            model.add_adapter(f"a{index}", adapter)
            added.append(time.perf_counter() - started)
        engine, adapters = engine_of(model), core_of(model).adapters
        mixes = [adapters.mix(name) for name in model.adapters]
        one, several = (measured(engine, some, args.runs) for some in (mixes[:1], mixes))
        return {
            **setting(command),
            "model": path.name,
            "rank": args.rank,
            "bytes": adapters.nbytes // args.chats,
            "add_s": statistics.median(added[1:] or added),
            "results": [one, several, prompts(engine, mixes[0], args.runs)],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, print."""
    parser = make_parser(__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args(arguments)
    record = run(args, cited_command("adapters", arguments))
    save(args.json, record)
    print(adapters_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
