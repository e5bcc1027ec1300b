"""Every architecture's float32 logits equal Hugging Face transformers' on tiny random models."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from localrt.common.errors import CancelledError, UnsupportedModelError
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.decoder import Decoder, FinalNorm
from localrt.models.raw_config import with_default_values
from localrt.models.registry import ARCHITECTURES, read_config
from localrt.quant.choose import missing_on_gpu
from localrt.quant.ops.arrays import AFTER_LAST, Features
from localrt.quant.ops.protocol import Batch, Span
from localrt.quant.reference.ops import TorchOps
from tests.models.make_gguf import write_tiny_gguf
from tests.models.tiny import (
    CONFIGS,
    MIXTURES,
    load_ours,
    logits_of,
    oracle,
    relative_error,
    save_tiny,
    tokens,
)

TOLERANCE = 1e-4
LENGTH = 20  # beyond the window of the windowed configs


@pytest.fixture(scope="module", params=sorted(CONFIGS | MIXTURES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(our decoder, transformers' model)."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_tiny(request.param, folder)
    return load_ours(folder, context=LENGTH), theirs


def test_prefill_in_one_pass(pair: Any) -> None:
    ours, theirs = pair
    ids = tokens(LENGTH)
    logits = ours.forward(Batch.extend([(ours.cache(LENGTH), ids)]))
    assert logits.dtype == np.float32
    assert relative_error(logits, oracle(theirs, ids)) < TOLERANCE


def test_batch(pair: Any) -> None:
    ours, theirs = pair
    sequences = [tokens(n, seed=n) for n in (3, 12, 19)]
    caches = [ours.cache(LENGTH) for _ in sequences]
    halves = [(c, ids[: len(ids) // 2]) for c, ids in zip(caches, sequences, strict=True)]
    rests = [(c, ids[len(ids) // 2 :]) for c, ids in zip(caches, sequences, strict=True)]
    ours.forward(Batch.extend(halves))
    logits = ours.forward(Batch.extend(rests))
    expected = np.concatenate([oracle(theirs, ids)[len(ids) // 2 :] for ids in sequences])
    assert relative_error(logits, expected) < TOLERANCE


def test_tokens_after_a_trim(pair: Any) -> None:
    ours, theirs = pair
    ids = tokens(LENGTH, seed=2)
    cache = ours.cache(LENGTH)
    ours.forward(Batch.extend([(cache, ids[:1])]), rows=[])
    ours.forward(Batch.extend([(cache, ids[1:10])]), rows=[])
    ours.forward(Batch.extend([(cache, tokens(8, seed=3))]), rows=[])
    held = cache.trim(10)  # recurrent layers go back further
    ours.forward(Batch.extend([(cache, ids[held : LENGTH - 5])]), rows=[])
    parts = [ours.forward(Batch.extend([(cache, [token])]), rows=[0]) for token in ids[-5:]]
    assert cache.length == LENGTH
    assert relative_error(np.concatenate(parts), oracle(theirs, ids)[-5:]) < TOLERANCE


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return load_ours(folder)


@pytest.mark.parametrize("name", ["llama", "cohere2"])
def test_final_norm(name: str, tmp_path: Path) -> None:
    """Of rows on the host, as embeddings need it."""
    theirs, ids = save_tiny(name, tmp_path), tokens(LENGTH)
    model = load_ours(tmp_path)
    rows = np.empty((LENGTH, model.config.hidden_size), np.float32)
    batch = Batch.extend([(model.cache(LENGTH), ids)])
    model.forward(batch, rows=[], features=Features((AFTER_LAST,), rows))
    with torch.no_grad():
        expected = theirs.model(torch.tensor([ids])).last_hidden_state[0].numpy()
    assert relative_error(FinalNorm(model)(rows), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("cohere2", "they do not compute attention and an MLP in parallel"),
        ("deepseek-v4", "they do not keep several residual streams"),
        ("ling", "they do not compute decays that have a floor"),
        ("ling-softplus", "they do not gate the heads of latent attention"),
    ],
)
def test_gpu_without_what_a_model_needs(name: str, missing: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        memory = read_config(checkpoint).memory
    assert missing_on_gpu(memory) == missing


def test_published_keys_of_step(tmp_path: Path) -> None:
    """Lists also have an entry for a prediction block."""
    save_tiny("step", tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        saved = read_config(checkpoint)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text("utf-8"))
    text = whole["text_config"]
    for key, name in (
        ("num_key_value_heads", "num_attention_groups"),
        ("n_routed_experts", "moe_num_experts"),
        ("num_experts_per_tok", "moe_top_k"),
    ):
        text[name] = text.pop(key)
    ropes = text.pop("rope_parameters")
    own = [ropes[kind] for kind in text["layer_types"]]
    text["rope_theta"] = [rope["rope_theta"] for rope in own] + [1e4]
    text["partial_rotary_factors"] = [rope.get("partial_rotary_factor", 1.0) for rope in own] + [1]
    shared = ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in ropes["full_attention"].items() if key not in shared}
    sparse = [n for n, kind in enumerate(text.pop("mlp_layer_types")) if kind == "sparse"]
    text["attention_other_setting"] = {
        "num_attention_heads": text.pop("num_sliding_attention_heads")
    }
    text |= {
        "rope_scaling": scaling,
        "moe_layers_enum": ",".join(map(str, sparse)),
        "num_nextn_predict_layers": 1,
        "layer_types": [*text["layer_types"], "sliding_attention"],
        "swiglu_limits": [*text["swiglu_limits"], 0.0],
        "swiglu_limits_shared": [*text["swiglu_limits_shared"], 0.0],
    }
    path.write_text(json.dumps(whole))
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        assert read_config(checkpoint) == saved


@pytest.mark.parametrize("name", ["llama", "cohere2", "deepseek-v3-dense"])
def test_tree(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    model = load_ours(tmp_path)
    prompt = tokens(12)
    # Node 0 continues the prompt; 1 and 2 are its children; 3 is the child of 2.
    nodes, parents = [5, 6, 7, 8], [-1, 0, 0, 2]
    mask = np.eye(4, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    depth = mask.sum(1) - 1
    cache = model.cache(64)
    model.forward(Batch.extend([(cache, prompt)]), rows=[])
    batch = Batch(np.array(nodes), len(prompt) + depth, (Span(cache, 4, mask),))
    logits = model.forward(batch)
    for path in ([0], [0, 1], [0, 2], [0, 2, 3]):
        alone = model.cache(64)
        branch = prompt + [nodes[i] for i in path]
        expected = model.forward(Batch.extend([(alone, branch)]), rows=[len(branch) - 1])
        assert relative_error(logits[path[-1]], expected[0]) < TOLERANCE


def test_cancel(llama: Decoder) -> None:
    cache = llama.cache(64)
    ids = tokens(20)
    llama.forward(Batch.extend([(cache, ids[:10])]), rows=[])
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise CancelledError("stop")

    with pytest.raises(CancelledError):
        llama.forward(Batch.extend([(cache, ids[10:])]), check=check)
    assert cache.length == 10
    again = llama.forward(Batch.extend([(cache, ids[10:])]))
    whole = llama.forward(Batch.extend([(llama.cache(64), ids)]))
    assert relative_error(again, whole[10:]) < TOLERANCE


def test_cache_growth(llama: Decoder) -> None:
    cache = llama.cache(1000)
    assert cache.nbytes == 0
    llama.forward(Batch.extend([(cache, tokens(3))]), rows=[])
    small = cache.nbytes
    llama.forward(Batch.extend([(cache, tokens(300))]), rows=[])
    assert cache.nbytes > small
    with pytest.raises(ValueError, match="capacity"):
        llama.forward(Batch.extend([(cache, tokens(900))]), rows=[])


@pytest.mark.parametrize("count", [40, 60])
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_longrope(form: str, count: int, tmp_path: Path) -> None:
    """Up to the original context of 48 the short factors hold, beyond it the long ones."""
    theirs, path, ids = save_tiny("phi3-longrope", tmp_path), tmp_path, tokens(count)
    if form == "gguf":
        path = write_tiny_gguf(tmp_path, tmp_path / "m.gguf", "phi3-longrope")
    assert relative_error(logits_of(path, ids), oracle(theirs, ids)) < TOLERANCE


def test_shared_keys_and_values_take_no_memory(tmp_path: Path) -> None:
    save_tiny("gemma4", tmp_path)  # whose last three layers of six read those of others
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        specs = read_config(checkpoint).attention
    ops = TorchOps(compute_format="f32")
    assert (
        ops.kv_nbytes(specs, 256) == ops.kv_nbytes(specs[:3], 256) > ops.kv_nbytes(specs[:2], 256)
    )


def test_unknown_architecture(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text("utf-8").replace("LlamaForCausalLM", "T5ForConditionalGeneration")
    )
    with (
        closing(open_checkpoint(tmp_path)) as checkpoint,
        pytest.raises(UnsupportedModelError, match=r"T5ForCond.*gemma3, .*llama, .*phi3"),
    ):
        read_config(checkpoint)


def test_gemma3_defaults() -> None:
    """As the published multimodal ones do: their text_config names five keys."""
    raw = SimpleNamespace(
        architecture="Gemma3ForConditionalGeneration",
        kind="safetensors",
        path=Path("gemma"),
        tensors={},
        config=with_default_values(
            {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240},
            "Gemma3ForConditionalGeneration",
        ),
    )
    config = read_config(cast(Checkpoint, raw))
    assert config.vocab_size == 262_208
    assert config.attention[0].heads == 8
    assert [spec.window for spec in config.attention[:6]] == [4096] * 5 + [None]


@pytest.mark.parametrize(("kind", "kv_heads"), [("mistral", 8), ("llama", 32), ("llava", 32)])
def test_llava_defaults(kind: str, kv_heads: int) -> None:
    raw = SimpleNamespace(
        architecture="LlavaForConditionalGeneration",
        kind="safetensors",
        path=Path("llava"),
        tensors={},
        config=with_default_values(
            {"model_type": kind, "hidden_size": 5120, "head_dim": 128, "vocab_size": 131072},
            "LlavaForConditionalGeneration",
        ),
    )
    config = read_config(cast(Checkpoint, raw))
    assert (config.attention[0].heads, config.attention[0].kv_heads) == (32, kv_heads)
    raw.config["model_type"] = "qwen2"
    with pytest.raises(UnsupportedModelError, match=r"'qwen2' is not supported .known: llama, m"):
        read_config(cast(Checkpoint, raw))


def test_registry() -> None:
    from localrt.models.registry import find_architecture

    for name in ARCHITECTURES:
        find_architecture(name)
