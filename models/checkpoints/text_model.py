"""Finds the tensors of a published model's decoder and their names without prefixes, and recognizes
files that hold only a draft head, or no language model at all.

Multimodal models keep the decoder below a prefix, next to vision and audio encoders. Multi-token
prediction (MTP) blocks have a prefix, or are numbered as layers after the last one: each is a model
of one layer, here ``model.layers.0``. Other tensors are never read. Knows names, no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from localrt.common.errors import UnsupportedModelError
from localrt.common.option_names import option

_PREFIXES = (
    # prefixes of a multimodal model's decoder, and their replacements; the first match is used
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.blocks.", "model.layers."),  # Kimi K2.5's, as transformers saves it
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
)
_BARE = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.", "dense_")

EAGLE3 = (
    "eagle3",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
"""Architecture names of EAGLE-3 heads in GGUF files and in ``config.json``."""

ASSISTANTS = (
    "gemma4-assistant",
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
)
"""Architecture names of Gemma 4's assistants."""

DFLASH = (
    *("dflash", "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "DSparkSpeculator"),
    *("Qwen3DSparkModel", "Lfm2DSparkDraftModel", "LingDSparkModel"),
)
"""Architecture names of DFlash and DSpark drafts."""

HEADS = dict.fromkeys(EAGLE3, "an EAGLE-3 head")
HEADS |= dict.fromkeys(ASSISTANTS, "an assistant") | dict.fromkeys(DFLASH, "a DFlash draft")
"""Architectures that only draft for a model, and their descriptions."""

_NOT_MODELS = {
    # by GGUF's general.type or general.architecture
    "adapter": "an adapter: open the model that it was made for, and give this with "
    + option("adapters"),
    **dict.fromkeys(
        ("mmproj", "clip"),
        "an encoder of pictures or sounds (mmproj): put it beside its model, and open that",
    ),
    "imatrix": "an importance matrix, for quantizing in other programs: open the model itself",
    "controlvector": "a control vector, which localrt does not apply: open the model itself",
    **dict.fromkeys(
        (
            *("aura", "cosmos", "flux", "hidream", "hyvid", "ltxv", "lumina2", "qwen_image"),
            *("sd1", "sd3", "sdxl", "wan", "wavtokenizer-dec", "whisper"),
        ),
        "a model for pictures, videos or speech: localrt runs language models",
    ),
}

TEXT_KEYS = ("llm_config", "text_config")
"""Keys of a multimodal config's text model, whose values take precedence."""

_MODALITIES = (*TEXT_KEYS, "vision_config", "audio_config")
_BACKBONE = re.compile(r"^(model\.)?backbone\.")  # Nemotron-H
_PREDICTION = re.compile(r"(model\.)?mtp[._]")
_MOST_PREDICTION_LAYERS = 64
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")

_BLOCK = re.compile(r"blk\.(\d{1,9})\.(nextn\.)?")
_BESIDE_LAYER = {
    # tensors of a prediction block outside its layer, in files that number it as a layer, and in
    # GGUF
    "enorm": "model.pre_fc_norm_embedding",
    "hnorm": "model.pre_fc_norm_hidden",
    "eh_proj": "model.fc",
    "shared_head.norm": "model.norm",
    "shared_head_norm": "model.norm",
    "shared_head.head": "lm_head",
    "shared_head_head": "lm_head",
    "embed_tokens": "model.embed_tokens",
}
_GGUF_ENCODERS = ("v.", "a.", "mm.")


class DraftHeadError(UnsupportedModelError):
    """A draft head was opened as a model."""

    def __init__(self, path: Path, architecture: str) -> None:
        what = HEADS.get(architecture, "only the MTP block")
        super().__init__(
            f"{path} holds {what} of a model, which drafts for it: run that model, with "
            f"{option('draft', path.name)}"
        )


def require_model(path: Path | str, *kinds: str | None) -> None:
    """Raise ``UnsupportedModelError`` if one of the ``kinds`` that a file names is no model."""
    for kind in kinds:
        if kind in _NOT_MODELS:
            raise UnsupportedModelError(f"{path} is {_NOT_MODELS[kind]}")


def is_multimodal(config: Mapping[str, object]) -> bool:
    """Whether a (published) config describes more than a decoder."""
    return any(isinstance(config.get(key), dict) for key in _MODALITIES)


def decoder_tensor(name: str, config: Mapping[str, object], *, multimodal: bool) -> str | None:
    """The decoder's name for a tensor of a Hugging Face folder; None outside the decoder."""
    if multimodal:
        plain = _without_prefix(name)
        if plain == name and not name.startswith(_BARE):
            return None
        name = plain
    if _PREDICTION.match(name):
        return None
    name = _BACKBONE.sub("model.", name)
    layer = _LAYER.match(name)
    return None if layer and int(layer[1]) in _prediction_layers(config) else name


def _without_prefix(name: str) -> str:
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def prediction_tensor(name: str, config: Mapping[str, object]) -> str | None:
    """The name of a tensor of a Hugging Face folder's first prediction block; None for others.

    ``model.embed_tokens`` and ``lm_head`` are the block's own, if it has them.
    """
    name = _without_prefix(name)
    if own := _PREDICTION.match(name):
        rest = name[own.end() :]
        return rest if rest.startswith("lm_head.") else f"model.{rest}"
    layer = _LAYER.match(name)
    first = _prediction_layers(config)[:1]
    return _of_block(name[layer.end() :]) if layer and int(layer[1]) in first else None


def gguf_prediction_tensor(name: str) -> str | None:
    """The same for a tensor of a GGUF block that is not part of the block's layer."""
    match = _BLOCK.match(name)
    return _of_block(name[match.end() :]) if match and match[2] else None


def _of_block(rest: str) -> str:
    stem, _, kind = rest.rpartition(".")
    beside = _BESIDE_LAYER.get(stem)
    return f"{beside}.{kind}" if beside else f"model.layers.0.{rest}"


def prediction_config(config: Mapping[str, object]) -> dict[str, object]:
    """The config of a model's prediction block: a decoder of one layer with full attention, and
    with experts if the model has them.
    """
    layers = config.get("num_hidden_layers")
    own = {
        key: value
        for key, value in config.items()
        if not (isinstance(value, list) and type(layers) is int and len(value) >= layers > 1)
        and key != "index_topk_pattern"
    }
    return {
        **own,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
        "mlp_only_layers": [],
        "first_k_dense_replace": 0,
        "decoder_sparse_step": 1,
    }


def _prediction_layers(config: Mapping[str, object]) -> range:
    """The layer numbers of prediction blocks, which follow the last layer."""
    layers = config.get("num_hidden_layers")
    extra = config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))
    if type(layers) is not int or type(extra) is not int:
        return range(0)
    return range(layers, layers + min(extra, _MOST_PREDICTION_LAYERS))


def prediction_blocks(blocks: int, predicting: int, names: Iterable[str]) -> frozenset[int]:
    """Which of a GGUF file's ``blocks`` are prediction blocks, not layers of the decoder.

    ``predicting`` is the file's number of them. Some files state it but have none; others do not
    count them in ``blocks``.
    """
    own: set[int] = set()
    found: set[int] = set()
    for match in filter(None, map(_BLOCK.match, names)):
        (found if match[2] else own).add(int(match[1]))
    last = blocks - 1
    while len(found) < min(predicting, _MOST_PREDICTION_LAYERS) and last > 0 and last not in own:
        found.add(last)
        last -= 1
    return frozenset(found)


def gguf_block(name: str) -> int | None:
    """The number of the block that a GGUF tensor belongs to."""
    match = _BLOCK.match(name)
    return int(match[1]) if match else None


def as_first_block(name: str) -> str:
    """The name that a GGUF tensor would have in the first block."""
    return re.sub(r"^blk\.\d+\.", "blk.0.", name)


def is_beside_decoder(name: str) -> bool:
    """Whether a GGUF tensor belongs to a vision or audio encoder."""
    return name.startswith(_GGUF_ENCODERS)
