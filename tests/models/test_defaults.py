"""Every key that a config may leave out has the default of transformers' class of that family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from huggingface_hub.errors import StrictDataclassError

from localrt.common.errors import LocalrtError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.safetensors.folder import flatten_config
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import read_manifest
from localrt.models.checkpoints.text_model import decoder_tensor, is_multimodal
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import with_default_values
from localrt.models.registry import read_config
from localrt.models.weight_files import MANIFEST_NAME
from localrt.offload.store.pack import pack_store
from tests.models.tiny import CONFIGS as DENSE
from tests.models.tiny import (
    MIXTURES,
    SIZES,
    auto_class,
    edited,
    logits_of,
    oracle,
    random_model,
    save_tiny,
    tokens,
)

_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32}
OTHERS: dict[str, Any] = {  # types whose models have the class of another type
    **{
        kind: partial(hf.AutoConfig.for_model, kind, **SIZES, head_dim=16)
        for kind in ("internlm3", "iquestcoder")
    },
    "sarvam_mla": partial(
        hf.AutoConfig.for_model,
        "sarvam_mla",
        **{**SIZES, **_LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 32},
    ),
}
CONFIGS = DENSE | MIXTURES | OTHERS


@dataclass
class Described:
    """A checkpoint of which only the config and the tensors' names are known."""

    config: dict[str, Any]
    tensors: dict[str, Any]
    path: Path = Path("tiny")
    kind: str = "safetensors"
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])


def tensor_names(config: Any, published: dict[str, Any]) -> dict[str, Any]:
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    published["architectures"] = [type(model).__name__]
    names = (
        decoder_tensor(name, published, multimodal=is_multimodal(published))
        for name in model.state_dict()
    )
    return {name: SimpleNamespace() for name in names if name is not None}


def read(published: dict[str, Any], tensors: dict[str, Any]) -> DecoderConfig | str:
    """The config, or the error."""
    flat = flatten_config(json.loads(json.dumps(published)), Path("config.json"))
    if flat.get("tie_word_embeddings") is None:
        flat["tie_word_embeddings"] = "lm_head.weight" not in tensors
    flat = with_default_values(flat, published["architectures"][0])
    try:
        return read_config(Described(flat, tensors))  # type: ignore[arg-type]
    except LocalrtError as error:
        return str(error)


def without(published: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config without each of its keys, and of those of its text model."""
    for place in (None, "text_config"):
        part = published if place is None else published.get(place)
        for key in part or ():
            if key in ("architectures", "model_type", "text_config", "tie_word_embeddings"):
                continue
            less = {name: value for name, value in part.items() if name != key}
            yield key, less if place is None else {**published, place: less}
            for inner in part[key] if key == "rope_parameters" and part[key] else ():
                own = {name: value for name, value in part[key].items() if name != inner}
                less = {**part, key: own}
                yield f"{key}.{inner}", less if place is None else {**published, place: less}


def families() -> dict[str, str]:
    """One tiny config for each type of text model that is known, by that type."""
    found: dict[str, str] = {}
    for name, make in CONFIGS.items():
        found.setdefault(make().get_text_config().model_type, name)
    return {family: MORE.get(family, name) for family, name in found.items()}


MORE = {  # whose first tiny config has fewer keys
    "llama": "llama-yarn",
    "qwen2": "qwen2-window",
    "olmo3": "olmo3-yarn",
    "exaone4": "exaone4-window",
    "phi3": "phi3-longrope",
    "nemotron_h": "nemotron-h-groups",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
    "gemma4_text": "gemma4-moe",
    "granitemoehybrid": "granite-hybrid-moe",
}
FAMILIES = families()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_left_out(family: str) -> None:
    config = CONFIGS[FAMILIES[family]]()
    published = config.to_dict()
    tensors = tensor_names(config, published)
    tried = 0
    for key, less in without(published):
        try:
            filled = type(config).from_dict(json.loads(json.dumps(less))).to_dict()
        except (KeyError, ValueError, StrictDataclassError):  # what is left does not fit
            continue
        filled["architectures"] = published["architectures"]
        assert read(less, tensors) == read(filled, tensors), key
        tried += 1
    assert tried > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_share_that_is_left_out(family: str) -> None:
    """What a class's config does not fill in, its code does: the model's own frequencies count."""
    config = CONFIGS[FAMILIES[family]]()
    published = config.to_dict()
    if "indexer_head_dim" in published:  # what rotates has to fit it
        published["indexer_head_dim"] = published["head_dim"]
    text = published.get("text_config", published)
    (text.get("rope_parameters") or {}).pop("mrope_section", None)
    tensors = tensor_names(config, published)
    left_out = [less for key, less in without(published) if key.endswith("partial_rotary_factor")]
    for less in left_out:
        try:
            theirs = type(config).from_dict(json.loads(json.dumps(less)))
            theirs.vocab_size = 8
            model = random_model(theirs)
        except (KeyError, ValueError, StrictDataclassError):  # what is left does not fit
            continue
        found = {
            buffer.numel() for name, buffer in model.named_buffers() if name.endswith("inv_freq")
        }
        ours = read(less, tensors)
        assert not isinstance(ours, str), ours
        sizes = {len(spec.rope.inv_freq) for spec in ours.attending if spec.rope is not None}
        assert sizes <= found, less


SIZES_ALONE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("moe_intermediate_size", "pad_token_id"),
)
PAIRED = ("ernie4_5", "ernie4_5_moe", "glm4", "cohere2", "cohere2_moe", "llama4_text")
"""Whose rows of queries and keys are reordered by heads."""


def check_sizes_alone(family: str, folder: Path, **more: Any) -> None:
    """Compare logits of a model whose file has a few sizes, and ``more``, with transformers'."""
    config = CONFIGS[FAMILIES[family]]()
    published, usual = config.to_dict(), type(config.get_text_config())().to_dict()
    text = published.get("text_config", published)
    own = {key: text[key] for key in SIZES_ALONE if key in text} | more
    listed = own.get("layer_types") or own.get("mlp_layer_types")
    own["num_hidden_layers"] = len(listed or range(4))
    heads, size = usual["num_attention_heads"], usual.get("head_dim")
    if "num_attention_heads" not in own and size in (None, usual["hidden_size"] // heads):
        own["hidden_size"] = 8 * heads
    if text is not published:
        parts = ("model_type", "vision_config", "sam_config", "encoder_config")
        own = {"text_config": own} | {key: published[key] for key in parts if key in published}
    model = random_model(type(config).from_dict(json.loads(json.dumps(own))))
    model.save_pretrained(folder)
    file, ids = folder / "config.json", tokens(24)
    own["architectures"] = json.loads(file.read_text("utf-8"))["architectures"]
    file.write_text(json.dumps(own))
    ours, theirs = logits_of(folder, ids), oracle(model, ids)
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("family", "more"),
    [
        *((family, {}) for family in PAIRED),
        ("ernie4_5", {"num_key_value_heads": None}),
        ("cohere2", {"num_key_value_heads": None}),
    ],
)
def test_heads_of_keys(family: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Where queries have another number of heads than by default; null means as many."""
    sizes = {"num_attention_heads": 24, "head_dim": 16, "hidden_size": 192}
    check_sizes_alone(family, tmp_path, **sizes, **more)


def test_store_without_a_key(tmp_path: Path) -> None:
    """As stores of older versions are."""
    save_tiny("ernie", tmp_path / "model")
    with closing(open_checkpoint(edited(tmp_path / "model", rms_norm_eps=1e-5))) as folder:
        pack_store(folder, tmp_path / "store")
        whole = read_config(folder)
    manifest = read_manifest(tmp_path / "store" / MANIFEST_NAME)
    config = {key: value for key, value in manifest.config.items() if key != "rms_norm_eps"}
    manifest = replace(manifest, config=config)
    with closing(StoreCheckpoint(tmp_path / "store", manifest=manifest)) as store:
        assert read_config(store) == whole


@pytest.mark.parametrize(
    ("kind", "architecture", "own", "found"),
    [
        (  # as published multimodal ones do: their text_config names five keys
            "gemma3",
            "Gemma3ForConditionalGeneration",
            {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240},
            (262_208, 8, 4),
        ),
        *(
            (
                kind,
                "LlavaForConditionalGeneration",
                {"model_type": kind, "hidden_size": 5120, "head_dim": 128, "vocab_size": 131072},
                (131072, 32, kv_heads),
            )
            for kind, kv_heads in (("mistral", 8), ("llama", 32), ("llava", 32))
        ),
    ],
)
def test_few_keys(
    kind: str, architecture: str, own: dict[str, Any], found: tuple[int, ...]
) -> None:
    values = {"architectures": [architecture], **with_default_values(own, architecture)}
    config = read_config(Described(values, {}))  # type: ignore[arg-type]
    spec = config.attention[0]
    assert (config.vocab_size, spec.heads, spec.kv_heads) == found
    if kind == "gemma3":
        assert [spec.window for spec in config.attention[:6]] == [4096] * 5 + [None]
        return
    values["model_type"] = "qwen2"
    with pytest.raises(LocalrtError, match=r"'qwen2' is not supported .known: llama, m"):
        read_config(Described(values, {}))  # type: ignore[arg-type]
