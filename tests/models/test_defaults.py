"""Every key that a config may leave out has the default of transformers' class of that family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from localrt.common.errors import LocalrtError
from localrt.models.checkpoints.safetensors.folder import flatten_config
from localrt.models.checkpoints.text_model import decoder_tensor, is_multimodal
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import with_default_values
from localrt.models.registry import read_config
from tests.models.tiny import CONFIGS as DENSE
from tests.models.tiny import MIXTURES, auto_class, random_model

CONFIGS = DENSE | MIXTURES


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


@pytest.mark.parametrize(
    ("family", "keys", "values"),
    [
        ("llama", {}, {"rms_norm_eps": 1e-6, "rope_theta": 1e4}),
        ("exaone4", {}, {"sliding_window": 4096}),
        ("exaone4", {"sliding_window": None}, {"sliding_window": None}),
        ("qwen3_moe", {"num_local_experts": 8}, {"num_experts": None, "num_local_experts": 8}),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": None}),
    ],
)
def test_default_values(family: str, keys: dict[str, Any], values: dict[str, Any]) -> None:
    found = with_default_values({"model_type": family, **keys}, "")
    assert {key: found.get(key) for key in values} == values


def test_unknown_type() -> None:
    found = with_default_values({"model_type": "qwen2_5_vl"}, "Qwen2_5_VLForConditionalGeneration")
    assert found["rms_norm_eps"] == 1e-5
