"""What configs and tensors of text models say: wrong ones are refused in one line that says what,

and heads that configs call tied, or not, are read as transformers reads them.
"""

from __future__ import annotations

import json
import re
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import localrt
from localrt.common.errors import CheckpointError, OptionError, UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.safetensors.folder import NO_HEAD, TIED_OUTSIDE
from localrt.planning.models import shape_from_config
from localrt.quantize.quantize import Recipe, quantize_model
from tests.conftest import write_tiny_model
from tests.models.test_model import some
from tests.models.tiny import (
    CONFIGS,
    MIXTURES,
    auto_class,
    edited,
    load_ours,
    logits_of,
    oracle,
    relative_error,
    save_tiny,
    tokens,
)
from tests.mutations import changed, is_line, refusal


@pytest.mark.parametrize(
    ("name", "place", "value", "told"),
    [
        ("llama", "hidden_size", 32, "wrong shape"),
        ("llama", "num_hidden_layers", 4, "missing"),
        ("llama", "num_key_value_heads", 3, "multiple"),
        ("llama", "hidden_act", "relu6", "relu6"),
        ("llama", "rms_norm_eps", "tiny", "rms_norm_eps"),
        ("laguna", "num_attention_heads_per_layer", [6, 6], "2 entries for 3 layers"),
        ("llama4", "num_experts_per_tok", 2, "must be 1 .*is 2"),
        ("qwen3-moe", "num_experts_per_tok", 9, r"9 experts .*\(top-k\) cannot be chosen of 8"),
        ("qwen3-moe", "num_experts", 9, r"mlp\.gate\.weight \(8, 64\); .* asks for \(9, 64\)"),
        ("hunyuan-moe", "moe_topk", [3, 3, 2], "moe_topk must be the same for all layers"),
        ("gpt-oss", "num_local_experts", 6, "holds 8 experts, the config says 6"),
        ("deepseek-v3", "n_group", 3, "equal groups"),
        ("phi3-longrope", ("rope_parameters", "long_factor"), {}, "needs 6 numbers"),
        ("llama-yarn", ("rope_parameters", "rope_theta"), 1.0, "above 1"),
        ("falcon-h1", "ssm_multipliers", [1.0, 0.0], "ssm_multipliers must be 5 positive numb"),
        ("deepseek-v4", "first_k_dense_replace", 1, None),  # all layers have experts
        (
            "glm5-next",
            ("text_config", "indexer_types"),
            ["shared"] * 4,
            "no layer before layer 1 has an indexer",
        ),
        ("qwen2.5-vl", ("text_config", "rope_parameters", "mrope_section"), [9, -2, 1], "add up"),
        (
            "llama",
            "architectures",
            ["T5ForConditionalGeneration"],
            r"T5ForCond.*gemma3, .*llama, .*phi3",
        ),
    ],
)
def test_bad_configs(name: str, place: Any, value: Any, told: str | None, tmp_path: Path) -> None:
    config = vars(save_tiny(name, tmp_path).config)
    config = changed(config, [(place if isinstance(place, tuple) else (place,), value)])
    if told is None:
        load_config(tmp_path, config)
        return
    with pytest.raises((CheckpointError, UnsupportedModelError), match=told) as caught:
        load_config(tmp_path, config)
    assert "\n" not in str(caught.value)


def load_config(folder: Path, config: Any) -> None:
    """Load ``folder`` with this config."""
    (folder / "config.json").write_text(json.dumps(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        load_ours(folder)


@pytest.mark.parametrize("value", [10**400, [], None])
def test_odd_model_type(value: Any, tmp_path: Path) -> None:
    given = {**vars(save_tiny("llama", tmp_path).config), "model_type": value}
    assert is_line(refusal(lambda: load_config(tmp_path, given)))
    assert is_line(refusal(lambda: shape_from_config(given, name="fuzzed")))


def test_llm_config(tmp_path: Path) -> None:
    config = vars(save_tiny("nemotron-h-omni", tmp_path).config)
    config |= {"llm_config": config.pop("text_config"), "architectures": ["NemotronH_Nano_VL_V2"]}
    load_config(tmp_path, config)


HEAD = "lm_head.weight"
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embeddings?|word_embeddings)\.weight$")
TOLERANCE = 1e-4


def change_head(folder: Path, kind: str) -> None:
    """Have the files hold a head that is "other" than the embedding, "equal" to it, or "none"."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    (embedding,) = (tensors[name] for name in tensors if EMBEDDING.search(name))
    at = next((name for name in tensors if name.endswith(HEAD) or name == "head.weight"), HEAD)
    tensors.pop(at, None)
    if kind != "none":
        tensors[at] = embedding.copy()
        if kind == "other":  # in the last row: a token that was added
            tensors[at][-1] = np.random.default_rng(0).standard_normal(embedding.shape[1])
    save_file(tensors, path, metadata={"format": "pt"})


def theirs(folder: Path) -> Any:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    return auto_class(config).from_pretrained(folder, dtype=torch.float32).eval()


# One of each way to name a head's tensors.
@some(CONFIGS | MIXTURES, ("deepseek-v2", "llama", "nemotron-h", "qwen3-vl"))
def test_another_head_and_none(name: str, tmp_path: Path) -> None:
    """A head that differs counts, whatever the config says. One that is neither in the files nor
    tied: opened for embeddings, with a line for those who want text.
    """
    config, ids = save_tiny(name, tmp_path).config, tokens(6)
    change_head(tmp_path, "other")
    edited(tmp_path, tie_word_embeddings=True)
    assert relative_error(logits_of(tmp_path, ids), oracle(theirs(tmp_path), ids)) < TOLERANCE
    change_head(tmp_path, "none")
    edited(tmp_path, tie_word_embeddings=False)
    if text := getattr(config, "text_config", None):
        edited(tmp_path, text_config={**text, "tie_word_embeddings": False})
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        assert checkpoint.config["headless"]
        assert NO_HEAD in checkpoint.notes
    load_ours(tmp_path)


FLAGS = (True, False, None)


@pytest.mark.parametrize("head", ["other", "equal", "none"])
@pytest.mark.parametrize("inner", FLAGS)
@pytest.mark.parametrize("outer", FLAGS)
@some(("qwen3-vl", "mistral3"), ("mistral3",))
def test_flags_of_models_that_see(
    name: str, outer: bool | None, inner: bool | None, head: str, tmp_path: Path
) -> None:
    """The outer config's flag and the text model's, each given or left out."""
    save_tiny(name, tmp_path)
    change_head(tmp_path, head)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    for part, flag in ((config, outer), (config["text_config"], inner)):
        part.pop("tie_word_embeddings", None)
        if flag is not None:
            part["tie_word_embeddings"] = flag
    path.write_text(json.dumps(config))
    model, ids = theirs(tmp_path), tokens(6)
    if head == "none" and model.lm_head.weight is not model.get_input_embeddings().weight:
        # Its head is a random one: ours is the embedding where that is not denied.
        with closing(open_checkpoint(tmp_path)) as checkpoint:
            asked = outer if inner is None else inner
            assert checkpoint.config.get("headless", False) is (asked is False)
        return
    assert relative_error(logits_of(tmp_path, ids), oracle(model, ids)) < TOLERANCE


def test_outer_defaults() -> None:
    """Those that tie the head where their outer config does not say."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    seen = "gemma3 gemma4 idefics3 internvl lfm2_vl llava mistral3 qwen2_5_vl qwen2_vl minicpmv4_6"
    more = "paddleocr_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm"
    tied = {kind for kind in f"{seen} {more}".split() if CONFIG_MAPPING[kind]().tie_word_embeddings}
    assert tied == TIED_OUTSIDE


def test_text_without_a_head(tmp_path: Path) -> None:
    """Vectors need none; text gets the line that says what to change."""
    change_head(write_tiny_model(tmp_path), "none")
    with closing(open_checkpoint(tmp_path)) as source:
        recipe = Recipe("int4-g32", method="rtn")
        store = quantize_model(source, tmp_path / "store", recipe, threads=1).path
    for path in (tmp_path, store):
        with localrt.load(path) as model:
            assert len(model.embed(["a b"])[0]) == 64
            with pytest.raises(OptionError, match="tie_word_embeddings"):
                model.generate("a")
    edited(tmp_path, tie_word_embeddings=True)
    with localrt.load(str(tmp_path)) as model:
        assert model.generate("a", max_tokens=2).token_ids
