"""``localrt.load`` of a model larger than its budget, each time in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import localrt
from tests.conftest import needs_kernels, write_byte_tokenizer

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]

ROOT = Path(__file__).parent.parent.parent
CHILD = """
    import json, psutil, sys, time
    import localrt, localrt.planning.measure
    from localrt.offload.memory import peak_rss

    job = json.loads(sys.argv[1])
    # Measuring takes seconds.
    from localrt.offload.reading.disk_speed import DiskProfile
    from localrt.offload.reading.files import ReadMode
    from localrt.planning.machine import typical_machine
    known = DiskProfile(ReadMode(direct=True, threads=2, block=1 << 20), 1e9, 0.0)
    localrt.planning.measure.machine_profile = lambda *_, **__: (known, typical_machine())

    def threads(here):  # one that was joined is counted until the system has let go of it
        counts = []
        for _ in range(20):
            time.sleep(0.01)
            counts.append(here.num_threads())
        return min(counts)

    steps, answers, held = [], [], []
    try:
        for _ in range(job["cycles"]):
            with localrt.load(job["model"], threads=2, **job["load"]) as model:
                model.generate(token_ids=[5, 6, 7], max_tokens=2)
            here = psutil.Process()
            held.append((here.num_fds(), threads(here), here.memory_info().rss))
        with localrt.load(job["model"], progress=steps.append, threads=2, **job["load"]) as model:
            for prompt in job["prompts"]:
                answer = model.generate(
                    token_ids=prompt, temperature=0.0, max_tokens=job["tokens"], ignore_eos=True
                )
                m = answer.metrics
                answers.append({
                    "tokens": answer.token_ids,
                    "reason": answer.finish_reason,
                    "read": m.ssd_read_bytes,
                    "efficiency": m.pipeline_efficiency,
                    "predicted": m.predicted_tok_s,
                    "ceiling": m.ceiling_tok_s,
                })
            plan = model._core.engine.plan
            result = {"planned": plan and plan.tok_s, "answers": answers}
            result |= {"ctx": model.info.ctx, "notes": model.info.notes}
    except localrt.LocalrtError as error:
        result = {"error": type(error).__name__, "text": str(error)}
    result["peak"], result["held"] = peak_rss(), held
    result["steps"] = sorted({step.stage for step in steps})
    print(json.dumps(result))
"""


@dataclass(frozen=True)
class Place:
    """A model, and folders for what is kept of it."""

    model: Path
    home: Path
    known: dict[int, int] = field(default_factory=dict)

    def run(
        self,
        prompts: list[list[int]] | None = None,
        *,
        tokens: int = 8,
        cycles: int = 0,
        **load: Any,
    ) -> dict[str, Any]:
        """Load and answer greedily in a child."""
        job = {
            "model": str(self.model),
            "prompts": prompts if prompts is not None else [list(range(5, 25))],
            "tokens": tokens,
            "cycles": cycles,
            "load": load,
        }
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.home / "data"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "LOCALRT_CACHE": str(self.home / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CHILD), json.dumps(job)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=240,
            check=True,
        )
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def least(self, *, ctx: int) -> int:
        """The smallest budget that the refusal of a tiny one names, in megabytes."""
        if ctx in self.known:
            return self.known[ctx]
        refused = self.run(ram="60MB", ctx=ctx)
        assert refused["error"] == "MemoryBudgetError"
        assert "\n" not in refused["text"]
        found = re.search(r'give it at least (\d+) MB of RAM \(ram="\1MB"\)', refused["text"])
        assert found is not None, refused["text"]
        self.known[ctx] = int(found[1])
        return self.known[ctx]


def write_model(folder: Path) -> Path:
    """A random Llama of 42 MB in float16, with a byte tokenizer."""
    shape = {"vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1024}
    shape |= {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2}
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("model.embed_tokens", "lm_head"), (2000, 512)
    )
    for layer in range(8):
        prefix = f"model.layers.{layer}."
        rows = {"q": 512, "k": 128, "v": 128, "o": 512}
        shapes |= {f"{prefix}self_attn.{name}_proj": (n, 512) for name, n in rows.items()}
        shapes |= {f"{prefix}mlp.{name}_proj": (1024, 512) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj"] = (512, 1024)
        for name in ("input", "post_attention"):
            shapes[f"{prefix}{name}_layernorm"] = (512,)
    shapes["model.norm"] = (512,)
    tensors = {
        f"{name}.weight": np.ones(size, np.float16)
        if len(size) == 1
        else (rng.standard_normal(size, np.float32) * 0.05).astype(np.float16)
        for name, size in shapes.items()
    }
    write_byte_tokenizer(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}
    config |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(write_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("home"))


def assert_streamed(answer: dict[str, Any]) -> None:
    assert answer["read"] > 0
    assert 0 < answer["efficiency"] <= 1
    assert 0 < answer["predicted"] <= answer["ceiling"]


def whole(place: Place, prompts: list[list[int]], *, ctx: int, tokens: int) -> list[Any]:
    """The answers with everything in memory, here."""
    with localrt.load(place.model, threads=2, ctx=ctx) as model:
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
        return [model.generate(token_ids=prompt, **options) for prompt in prompts]


def test_small_budget(place: Place) -> None:
    """The least is what the refusal of a smaller one names."""
    (expected,) = whole(place, [list(range(5, 25))], ctx=512, tokens=8)
    assert expected.metrics.ssd_read_bytes is None
    ram = place.least(ctx=512) + 2  # a process is not the same to the kilobyte each time
    small = place.run(ram=f"{ram}MB", ctx=512)
    (answer,) = small["answers"]
    assert answer["tokens"] == list(expected.token_ids)
    assert_streamed(answer)
    # How long loading took says nothing of the disk.
    assert answer["predicted"] == pytest.approx(small["planned"], rel=0.1)
    assert small["peak"] <= ram * 1_000_000
    assert {"load", "pack"} <= set(small["steps"])
    (store,) = (place.home / "data" / "localrt" / "stores").glob("*/manifest.json")
    assert store.parent.name.startswith(place.model.name)


@pytest.mark.slow
def test_context_follows_budget(place: Place) -> None:
    """A smaller one for a smaller budget; the packed form is kept."""
    place.run(ram=f"{place.least(ctx=512) + 4}MB", ctx=512)
    small = place.run(ram=f"{place.least(ctx=512) + 4}MB")
    assert 512 <= small["ctx"] < 8192
    assert any("to fit in memory" in note for note in small["notes"])
    assert "pack" not in small["steps"]
    assert "load" in small["steps"]


@pytest.mark.slow
def test_damaged_copy_is_mended(place: Place) -> None:
    """Whether loading finds it or a pass does, within the budget; the next run finds none."""
    ram = f"{place.least(ctx=512) + 4}MB"
    sound = place.run(ram=ram, ctx=512)
    stores = place.home / "data" / "localrt" / "stores"
    files = {path: path.read_bytes() for path in stores.glob("*/layer-*.safetensors")}
    for path, data in files.items():  # some of it stays in memory, some does not
        broken = bytearray(data)
        broken[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
        path.write_bytes(broken)
    small = place.run(ram=ram, ctx=512)
    assert "error" not in small, small["text"]
    assert "pack" not in small["steps"]
    assert small["answers"][0]["tokens"] == sound["answers"][0]["tokens"]
    assert all(path.read_bytes() == data for path, data in files.items())
