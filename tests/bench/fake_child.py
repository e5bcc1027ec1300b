"""A benchmark child without a model: its engine's behaviour is written in the launch's path."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from localrt.bench import process
from localrt.bench.process import Launch
from localrt.common.errors import MissingExtraError, UnsupportedModelError
from localrt.engine.types import Metrics
from tests.bench.fake_nvml import take

SPEED = {"native": 2.0, "llamacpp": 1.0}


class FakeEngine:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._calls = 0
        self._settings = dict(launch.settings or {})
        self.info: Mapping[str, Any] = {
            "format": "q8",
            "weight_bytes": 1000,
            "parameters": 1600,
            "pid": os.getpid(),
            "launch": asdict(launch),
            "device": "cuda:0" if self._on_gpu() else "cpu",
        }

    def _on_gpu(self) -> bool:
        named = self._settings.get("device", "auto" if "gpu_memory" in self._settings else "cpu")
        return bool(named != "cpu")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def generate(self, prompt: list[int], tokens: int, on_first: Callable[[], None]) -> Metrics:
        behaviour = os.path.basename(self._launch.path)  # noqa: PTH119
        if behaviour == "slow":
            time.sleep(60)
        if behaviour == "dies" and self._launch.engine == "native":
            print("the engine caught fire", file=sys.stderr)
            os._exit(3)
        print("chatter that must not reach the protocol")
        on_first()
        if self._on_gpu():
            share = 0.8 if self._launch.engine == "native" else 1.1
            take(int(share * self._settings.get("gpu_memory", 10**9)))
        self._calls += 1
        # Plain weights are twice as fast here; and the runs get slower, so that medians matter.
        speed = SPEED[self._launch.engine] * (1 if self._settings.get("repack") else 2)
        return Metrics(
            prompt_tokens=len(prompt),
            completion_tokens=tokens,
            ttft_s=self._calls / speed,
            tpot_s=0.1 / speed,
            prefill_tok_s=100 * speed / self._calls,
            decode_tok_s=10 * speed,
            peak_ram_bytes=1_000_000 * self._calls,
            exactness="approximate",
            predicted_tok_s=21.0 if "ram" in self._settings else None,
            expert_hit_rate=self._settings.get("gpu_memory", 0) / 10**10 or None,
        )

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        assert len({tuple(prompt[:9]) for prompt in prompts}) == len(prompts), "no shared starts"
        metrics = self.generate(prompts[0], tokens, lambda: None).to_dict()
        return metrics | {"decode_tok_s": len(prompts) * metrics["decode_tok_s"]}

    def free(self) -> None:
        pass

    def busy_shares(self, prompt: list[int]) -> dict[str, float]:
        return {"gpu": 0.25, "link": 0.9}


def load(launch: Launch) -> FakeEngine:
    if launch.path.endswith("missing") and launch.engine != "native":
        raise MissingExtraError(f"{launch.engine} is not installed")
    if launch.path.endswith("unsupported"):
        raise UnsupportedModelError("this model is a teapot")
    return FakeEngine(launch)


if __name__ == "__main__":
    process.LoadedEngine = load  # type: ignore[assignment,misc]
    process.main()
