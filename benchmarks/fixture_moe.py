"""Trains the small mixture of experts that routing is studied on: real routing, not a good model.

    .venv/bin/python benchmarks/fixture_moe.py [--out FOLDER] [--tokens N] [--device cuda]

Writes a Hugging Face folder (bfloat16, tokenizer, ``training.json`` with the loss curve, perplexity
and sources). Interrupted, it goes on where it was. ``scripts/train_fixture_moe`` also packs it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.fixture_model import FixtureConfig, FixtureModel  # noqa: E402
from benchmarks.fixture_text import Ids, encode, read_texts, train_tokenizer  # noqa: E402

BALANCE = 0.003  # weight of the load-balance loss: enough that no expert dies
STATE = "training.pt"


class Trainer:
    """A run and its state on disk."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.device = torch.device(args.device)
        self.length, self.batch = args.length, args.batch
        self.config = FixtureConfig()
        texts = read_texts(args.text)
        self.source = texts.source
        tokenizer = self._tokenizer(lambda: train_tokenizer(texts, self.config.vocab_size))
        self.learnt, self.held_out = (
            encode(tokenizer, texts.learnt),
            encode(tokenizer, texts.held_out),
        )
        self.bytes_per_token = sum(len(t.encode()) for t in texts.held_out) / len(self.held_out)
        self.steps = max(1, args.tokens // (self.length * self.batch))
        torch.manual_seed(0)
        self.model = FixtureModel(self.config).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.05
        )
        self.rate = args.rate
        self.step = 0
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []

    def run(self) -> None:
        """All steps, with a state every few minutes."""
        self._resume()
        started = saved = time.monotonic()
        before = self.seconds
        mean, count = 0.0, 0
        for tokens in self._batches(self.step, self.steps):
            loss, balance = self._learn(tokens)
            mean, count = mean + loss, count + 1
            self.step += 1
            self.seconds = before + time.monotonic() - started
            if self.step % 25 == 0 or self.step == self.steps:
                point = {"step": self.step, "loss": mean / count, "balance": balance}
                self.curve.append({k: round(v, 4) for k, v in point.items()})
                mean, count = 0.0, 0
                rate = self.step * self.length * self.batch / self.seconds
                left = (self.steps - self.step) * self.length * self.batch / rate
                print(
                    f"step {self.step}/{self.steps}  loss {point['loss']:.3f}  balance "
                    f"{balance:.2f}  {rate:.0f} tok/s  {left / 60:.0f} min left",
                    flush=True,
                )
            if time.monotonic() - saved > 240:
                self._save()
                saved = time.monotonic()
        self._save()
        self.export()

    def evaluate(self, limit: int = 200) -> float:
        """Mean loss (nats per token) on the texts kept apart, windows of the training length."""
        total, count = 0.0, 0
        with torch.no_grad():
            for start in range(0, len(self.held_out) - self.length - 1, self.length):
                window = self._tensor(self.held_out[None, start : start + self.length + 1])
                logits = self.model(window[:, :-1]).logits
                total += float(F.cross_entropy(logits[0].float(), window[0, 1:]))
                count += 1
                if count == limit:
                    break
        return total / count

    def export(self) -> None:
        """The Hugging Face folder."""
        loss = self.evaluate()
        tensors = {
            name: value.detach().to("cpu", torch.bfloat16).contiguous().clone()
            for name, value in self.model.published().items()
        }
        save_file(tensors, self.out / "model.safetensors", metadata={"format": "pt"})
        (self.out / "config.json").write_text(json.dumps(self.config.published(), indent=1) + "\n")
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (self.out / "tokenizer_config.json").write_text(json.dumps(tokenizer) + "\n")
        report: dict[str, Any] = {
            "what": "a small mixture of experts for studying routing; not a useful language model",
            "source": self.source,
            "tokens": self.step * self.length * self.batch,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seconds": round(self.seconds),
            "device": str(self.device),
            "torch": torch.__version__,
            "held_out": {
                "tokens": min(len(self.held_out), 200 * self.length),
                "loss": round(loss, 4),
                "perplexity": round(math.exp(loss), 2),
                "bits_per_byte": round(loss / math.log(2) / self.bytes_per_token, 3),
            },
            "curve": self.curve,
        }
        (self.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
        held = report["held_out"]
        print(f"held out: perplexity {held['perplexity']}, {held['bits_per_byte']} bits per byte")

    def _learn(self, tokens: Tensor) -> tuple[float, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * self._schedule()
        self.optimizer.zero_grad(set_to_none=True)
        output = self.model(tokens[:, :-1])
        logits = output.logits.reshape(-1, self.config.vocab_size).float()
        loss = F.cross_entropy(logits, tokens[:, 1:].reshape(-1))
        (loss + BALANCE * output.balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach()), float(output.balance.detach())

    def _schedule(self) -> float:
        """Warm-up, then a cosine to a tenth."""
        warm = min(100, self.steps // 10 + 1)
        if self.step < warm:
            return (self.step + 1) / warm
        done = (self.step - warm) / max(1, self.steps - warm)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def _batches(self, first: int, last: int) -> Iterator[Tensor]:
        """Windows in a shuffled order, each once before any again; the same after a resume."""
        windows = (len(self.learnt) - 1) // self.length
        for step in range(first, last):
            rows = []
            for index in range(step * self.batch, (step + 1) * self.batch):
                epoch, place = divmod(index, windows)
                order = np.random.default_rng(epoch).permutation(windows)
                start = int(order[place]) * self.length
                rows.append(self.learnt[start : start + self.length + 1])
            yield self._tensor(np.stack(rows))

    def _tensor(self, ids: Ids) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)

    def _tokenizer(self, train: Any) -> Tokenizer:
        path = self.out / "tokenizer.json"
        if path.exists():
            return Tokenizer.from_file(str(path))
        tokenizer = train()
        tokenizer.save(str(path))
        return tokenizer

    def _save(self) -> None:
        """Aside, then renamed."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "run": {"step": self.step, "seconds": self.seconds, "curve": self.curve},
        }
        aside = self.out / f"{STATE}.part"
        torch.save(state, aside)
        aside.replace(self.out / STATE)

    def _resume(self) -> None:
        path = self.out / STATE
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        run = state["run"]
        self.step, self.seconds, self.curve = run["step"], run["seconds"], run["curve"]


def main() -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/fixture-moe")
    parser.add_argument("--text", type=Path, help="a folder with more texts")
    parser.add_argument("--tokens", type=int, default=6_000_000)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    Trainer(args).run()


if __name__ == "__main__":
    main()
