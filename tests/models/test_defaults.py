"""Every key that a config may leave out has the default of transformers' class of that family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from tests.models.test_model import some
from tests.models.tiny import CONFIGS as DENSE
from tests.models.tiny import MIXTURES, SIZES, auto_class, edited, save_tiny
from tests.models.tiny_configs import hf

_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32}
_SARVAM = {**SIZES, **_LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 32}
OTHERS: dict[str, Any] = {  # types whose models have the class of another type
    "internlm3": lambda: hf.AutoConfig.for_model("internlm3", **SIZES, head_dim=16),
    "iquestcoder": lambda: hf.AutoConfig.for_model("iquestcoder", **SIZES, head_dim=16),
    "sarvam_mla": lambda: hf.AutoConfig.for_model("sarvam_mla", **_SARVAM),
}
CONFIGS = DENSE | MIXTURES | OTHERS
_TYPES = """
    llama-yarn mistral qwen2-window qwen3 gemma3 gemma2 gemma4-moe gemma4-unified phi3-longrope
    smollm3 deepseek-v2 deepseek-v3 ministral3 olmo2 olmo3-yarn exaone4-window seed-oss granite
    granite-swa hunyuan ernie qwen3-vl qwen2.5-vl paddleocr-vl glm4 glm4v glm-ocr muse-glimmer
    glm4-moe glm4v-moe glm4-moe-lite glm-dsa ernie-moe cohere2 cohere2-moe-dense-first
    minimax-m2 hunyuan-moe exaone-moe solar-open step hy-v3 apertus afmoe laguna mistral4 llama4
    qwen3.5 lfm2 granite-hybrid-moe falcon-h1 nemotron-h-moe lfm3 olmo-hybrid ling
    kimi-linear mixtral qwen2-moe qwen3-moe olmoe granite-moe granite-moe-shared gpt-oss
    granite-moe-swa mellum qwen3-vl-moe lfm2-moe qwen3-next qwen4-exp qwen3.5-moe deepseek-v4
    glm5-next internlm3 iquestcoder sarvam_mla
"""
TYPES = _TYPES.split()
"""Tiny configs, for each type of text model that with most keys."""


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
    import torch

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


def test_every_type_has_its_config() -> None:
    every, own = (
        {CONFIGS[name]().get_text_config().model_type for name in names}
        for names in (CONFIGS, TYPES)
    )
    assert every == own
    assert len(TYPES) == len(own)


@some(TYPES, ("deepseek-v3", "gemma4-moe", "llama-yarn", "phi3-longrope"))
def test_a_key_that_is_left_out(name: str) -> None:
    from huggingface_hub.errors import StrictDataclassError

    config = CONFIGS[name]()
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
