"""Trains the small mixture of experts that routing is studied on: real routing, not a good model.

    python -m benchmarks.moe.train_fixture [--out FOLDER] [--tokens N] [--device cuda]

Writes a Hugging Face folder (bfloat16, tokenizer, ``training.json`` with the loss curve, perplexity
and sources). Interrupted, it goes on where it was. ``scripts/train_fixture_moe`` also packs it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from benchmarks.common.command import ROOT, make_parser
from benchmarks.common.record import save
from benchmarks.moe.fixture_text import Ids, encode, read_texts, train_tokenizer
from localrt.files import atomic_write

BALANCE = 0.003  # weight of the load-balance loss: enough that no expert dies
ROPE_THETA = 10000.0
WINDOWS = 200  # that the loss is measured on
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "max_position_embeddings": 2048,
}


def new_model(**sizes: int) -> Any:
    """An untrained one; ``sizes`` as in ``SIZES``."""
    config = transformers.Qwen3MoeConfig(
        **sizes,
        intermediate_size=sizes["moe_intermediate_size"],
        rope_theta=ROPE_THETA,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        output_router_logits=True,
        # Its loss is as many times Switch Transformer's as experts see a token.
        router_aux_loss_coef=BALANCE / sizes["num_experts_per_tok"],
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


def save_model(model: Any, sizes: Mapping[str, int], out: Path) -> None:
    """Weights and ``config.json``, which has every size under its older, more common name too."""
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    save(out / "config.json", {**config, **sizes, "rope_theta": ROPE_THETA})


class Trainer:
    """A run and its state on disk."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        texts = read_texts()
        self.source = texts.source
        if not (tokenizer := self.out / "tokenizer.json").exists():
            train_tokenizer(texts, SIZES["vocab_size"]).save(str(tokenizer))
        loaded = Tokenizer.from_file(str(tokenizer))
        self.learnt, self.held_out = encode(loaded, texts.learnt), encode(loaded, texts.held_out)
        self.bytes_per_token = sum(len(t.encode()) for t in texts.held_out) / len(self.held_out)
        self.steps = max(1, args.tokens // (args.length * args.batch))
        self.model = new_model(**SIZES).to(args.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.05
        )
        self.run: dict[str, Any] = {"step": 0, "seconds": 0.0, "curve": []}

    def train(self) -> None:
        """All steps, with a state every few minutes."""
        state, run = self.out / "training.pt", self.run
        if state.exists():
            saved = torch.load(state, map_location=self.args.device, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            run |= saved["run"]
        began, before, kept, losses = time.monotonic(), run["seconds"], time.monotonic(), []
        for tokens in self._batches(run["step"], self.steps):
            loss, balance = self._learn(tokens)
            losses.append(loss)
            run["step"] += 1
            run["seconds"] = before + time.monotonic() - began
            last = run["step"] == self.steps
            if run["step"] % 25 == 0 or last:
                point = {"step": run["step"], "loss": sum(losses) / len(losses), "balance": balance}
                run["curve"].append({name: round(value, 4) for name, value in point.items()})
                losses.clear()
                print(f"{point} of {self.steps} steps, {run['seconds']:.0f} s", flush=True)
            if time.monotonic() - kept > 240 or last:
                kept = time.monotonic()
                parts = {"model": self.model.state_dict(), "run": run}
                with atomic_write(state) as file:
                    torch.save({**parts, "optimizer": self.optimizer.state_dict()}, file)

    def evaluate(self) -> float:
        """Mean loss (nats per token) on the texts kept apart, windows of the training length."""
        length, losses = self.args.length, []
        for start in range(0, len(self.held_out) - length - 1, length)[:WINDOWS]:
            window = self._tensor(self.held_out[None, start : start + length + 1])
            with torch.no_grad():
                losses.append(float(self.model(window, labels=window).loss))
        return sum(losses) / len(losses)

    def export(self) -> None:
        """The Hugging Face folder."""
        self.model.config.output_router_logits = False
        loss = self.evaluate()
        save_model(self.model.to(torch.bfloat16), SIZES, self.out)
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        save(self.out / "tokenizer_config.json", tokenizer)
        report = {
            "what": "a small mixture of experts for studying routing; not a useful language model",
            "source": self.source,
            "tokens": self.run["step"] * self.args.length * self.args.batch,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seconds": round(self.run["seconds"]),
            "device": str(self.args.device),
            "torch": torch.__version__,
            "held_out": {
                "tokens": min(len(self.held_out), WINDOWS * self.args.length),
                "loss": round(loss, 4),
                "perplexity": round(math.exp(loss), 2),
                "bits_per_byte": round(loss / math.log(2) / self.bytes_per_token, 3),
            },
            "curve": self.run["curve"],
        }
        save(self.out / "training.json", report)
        print(json.dumps(report["held_out"]))

    def _learn(self, tokens: torch.Tensor) -> tuple[float, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.rate * self._schedule()
        self.optimizer.zero_grad(set_to_none=True)
        output = self.model(tokens, labels=tokens)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        balance = float(output.aux_loss.detach()) / SIZES["num_experts_per_tok"]  # 1: all equal
        return float(output.loss.detach()) - BALANCE * balance, balance

    def _schedule(self) -> float:
        """Warm-up, then a cosine to a tenth."""
        step, warm = self.run["step"], min(100, self.steps // 10 + 1)
        if step < warm:
            return (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def _batches(self, first: int, last: int) -> Iterator[torch.Tensor]:
        """Windows in a shuffled order, each once before any again; the same after a resume."""
        length, batch = self.args.length, self.args.batch
        windows = (len(self.learnt) - 1) // length
        for step in range(first, last):
            rows = []
            for index in range(step * batch, (step + 1) * batch):
                epoch, place = divmod(index, windows)
                start = int(np.random.default_rng(epoch).permutation(windows)[place]) * length
                rows.append(self.learnt[start : start + length + 1])
            yield self._tensor(np.stack(rows))

    def _tensor(self, ids: Ids) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.args.device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and write what came of it."""
    parser = make_parser(__doc__, json=False)
    parser.add_argument("--out", type=Path, default=ROOT / "build/fixture-moe")
    parser.add_argument("--tokens", type=int, default=6_000_000)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(parser.parse_args(arguments))
    trainer.train()
    trainer.export()
    return 0


if __name__ == "__main__":
    sys.exit(main())
