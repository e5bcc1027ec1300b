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

from tests.conftest import needs_kernels, write_byte_tokenizer
from tests.real_models import real_model

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
    if not job["measure"]:  # measuring takes seconds
        from localrt.offload.reading.disk_speed import DiskProfile
        from localrt.offload.reading.files import ReadMode
        from localrt.planning.machine import typical_machine
        known = DiskProfile(ReadMode(direct=True, threads=2, block=1 << 20), 1e9, 0.0)
        localrt.planning.measure.machine_profile = lambda *_, **__: (known,
        typical_machine())

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
        measure: bool = False,
        cycles: int = 0,
        **load: Any,
    ) -> dict[str, Any]:
        """Load and answer greedily in a child."""
        job = {
            "model": str(self.model),
            "prompts": prompts if prompts is not None else [list(range(5, 25))],
            "tokens": tokens,
            "measure": measure,
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
    hidden, inner, layers, vocab = 512, 1024, 8, 2000
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", hidden // 4, hidden),
            ("self_attn.v_proj", hidden // 4, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[prefix + name] = (rows, columns)
    tensors = {
        f"{name}.weight": (rng.standard_normal(shape, np.float32) * 0.05).astype(np.float16)
        for name, shape in shapes.items()
    }
    norms = [f"model.layers.{n}.{which}" for n in range(layers) for which in
             ("input_layernorm", "post_attention_layernorm")]  # fmt: skip
    for name in (*norms, "model.norm"):
        tensors[f"{name}.weight"] = np.ones(hidden, np.float16)
    write_byte_tokenizer(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(write_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("home"))


def assert_streamed(answer: dict[str, Any]) -> None:
    assert answer["read"] > 0
    assert 0 < answer["efficiency"] <= 1
    assert 0 < answer["predicted"] <= answer["ceiling"]


def test_small_budget(place: Place) -> None:
    """The least is what the refusal of a smaller one names."""
    whole = place.run(ctx=512)
    assert whole["answers"][0]["read"] is None
    least = place.least(ctx=512)
    for ram in (least + 1, least + 12):  # a process is not the same to the kilobyte each time
        small = place.run(ram=f"{ram}MB", ctx=512)
        (answer,) = small["answers"]
        assert answer["tokens"] == whole["answers"][0]["tokens"]
        assert_streamed(answer)
        # How long loading took says nothing of the disk.
        assert answer["predicted"] == pytest.approx(small["planned"], rel=0.1)
        assert small["peak"] <= ram * 1_000_000
    assert "pack" not in small["steps"], "the packed form is kept"
    assert "load" in small["steps"]
    (store,) = (place.home / "data" / "localrt" / "stores").glob("*/manifest.json")
    assert store.parent.name.startswith(place.model.name)


def test_growing_context(place: Place) -> None:
    """The keys and values of 2,048 tokens are 8 MB; at first most of that holds weights."""
    prompts = [[token % 1900 + 3 for token in range(0, 7 * count, 7)] for count in (40, 1900)]
    ram = place.least(ctx=2048) + 3
    small = place.run(prompts, ram=f"{ram}MB", ctx=2048, tokens=4)
    whole = place.run(prompts, ctx=2048, tokens=4)
    for ours, theirs in zip(small["answers"], whole["answers"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert_streamed(ours)
    assert small["peak"] <= ram * 1_000_000


def test_context_follows_budget(place: Place) -> None:
    least = place.least(ctx=512)
    small = place.run(ram=f"{least + 4}MB")
    assert 512 <= small["ctx"] < 8192
    assert any("to fit in memory" in note for note in small["notes"])


@pytest.mark.slow
def test_damaged_copy_is_mended(place: Place) -> None:
    """Whether loading finds it or a pass does, within the budget; the next run finds none."""
    ram = f"{place.least(ctx=512) + 4}MB"
    whole = place.run(ram=ram, ctx=512)
    stores = place.home / "data" / "localrt" / "stores"
    files = {path: path.read_bytes() for path in stores.glob("*/layer-*.safetensors")}
    for path, data in files.items():  # some of it stays in memory, some does not
        broken = bytearray(data)
        broken[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
        path.write_bytes(broken)
    small = place.run(ram=ram, ctx=512)
    assert "error" not in small, small["text"]
    assert "pack" not in small["steps"]
    assert small["answers"][0]["tokens"] == whole["answers"][0]["tokens"]
    assert all(path.read_bytes() == data for path, data in files.items())


@pytest.mark.slow
def test_load_again_and_again(place: Place) -> None:
    ram = place.least(ctx=512) + 10
    held = place.run(cycles=12, ctx=512, ram=f"{ram}MB")["held"]
    (files, threads, rss), *_ = held[4:]
    assert held[-1][:2] == [files, threads]
    assert held[-1][2] <= rss + (4 << 20)
    assert all(memory <= ram * 1_000_000 for _, _, memory in held)


@pytest.mark.slow
@pytest.mark.real
def test_real_model(tmp_path: Path) -> None:
    """Once with everything measured."""
    place = Place(real_model("smollm2"), tmp_path)
    prompts = [[1, 4093, 198, 1780, 3575, 1187, 346, 11542, 30, 2], list(range(100, 500))]
    whole = place.run(prompts, ctx=1024, tokens=16)
    least = place.least(ctx=1024)
    ram = least + 60  # room for the process that measures
    small = place.run(prompts, ctx=1024, tokens=16, ram=f"{ram}MB", measure=True)
    for ours, theirs in zip(small["answers"], whole["answers"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert_streamed(ours)
    assert small["peak"] <= ram * 1_000_000
    assert {"load", "pack"} <= set(small["steps"])
    assert (tmp_path / "cache" / "disks.json").is_file()
