"""Heads that configs call tied, or not, beside what the files hold: as transformers reads them."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import localrt
from localrt.common.errors import OptionError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.safetensors.folder import NO_HEAD, TIED_OUTSIDE
from localrt.quantize.quantize import Recipe, quantize_model
from tests.conftest import write_tiny_model
from tests.models.tiny import (
    CONFIGS,
    MIXTURES,
    edited,
    load_ours,
    logits_of,
    oracle,
    relative_error,
    save_tiny,
    tokens,
)

HEAD = "lm_head.weight"
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embeddings?|word_embeddings)\.weight$")
TOLERANCE = 1e-4
# One of each way to name a head's tensors: the others are for CI.
SOME = ("deepseek-v2", "gemma4", "llama", "llava", "nemotron-h", "qwen3-moe", "qwen3-vl")
EVERY = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SOME else pytest.mark.slow)
        for name in sorted(CONFIGS | MIXTURES)
    ],
)


def change_head(folder: Path, kind: str) -> None:
    """Have the files hold a head that is "other" than the embedding, "equal" to it, or "none"."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    (embedding,) = (tensors[name] for name in tensors if EMBEDDING.search(name))
    at = next((name for name in tensors if name.endswith(HEAD) or name == "head.weight"), HEAD)
    tensors.pop(at, None)
    if kind != "none":
        tensors[at] = embedding.clone()
        if kind == "other":  # in the last row: a token that was added
            tensors[at][-1] = torch.randn_like(embedding[-1])
    save_file(tensors, path, metadata={"format": "pt"})


def theirs(folder: Path, kind: type) -> Any:
    return kind.from_pretrained(folder, dtype=torch.float32).eval()  # type: ignore[attr-defined]


@EVERY
def test_another_head(name: str, tmp_path: Path) -> None:
    """A head that differs counts, whatever the config says."""
    kind = type(save_tiny(name, tmp_path))
    change_head(tmp_path, "other")
    edited(tmp_path, tie_word_embeddings=True)
    ids = tokens(6)
    assert relative_error(logits_of(tmp_path, ids), oracle(theirs(tmp_path, kind), ids)) < TOLERANCE


@EVERY
def test_no_head(name: str, tmp_path: Path) -> None:
    """Neither in the files nor tied: opened for embeddings, with a line for those who want text."""
    config = save_tiny(name, tmp_path).config
    change_head(tmp_path, "none")
    edited(tmp_path, tie_word_embeddings=False)
    if config.get_text_config() is not config:
        edited(tmp_path, text_config={**config.text_config.to_dict(), "tie_word_embeddings": False})
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        assert checkpoint.config["headless"]
        assert NO_HEAD in checkpoint.notes
    load_ours(tmp_path)


FLAGS = (True, False, None)


@pytest.mark.parametrize("head", ["other", "equal", "none"])
@pytest.mark.parametrize("inner", FLAGS)
@pytest.mark.parametrize("outer", FLAGS)
@pytest.mark.parametrize("name", ["qwen3-vl", "mistral3"])
def test_flags_of_models_that_see(
    name: str, outer: bool | None, inner: bool | None, head: str, tmp_path: Path
) -> None:
    """The outer config's flag and the text model's, each given or left out."""
    kind = type(save_tiny(name, tmp_path))
    change_head(tmp_path, head)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text("utf-8"))
    for part, flag in ((config, outer), (config["text_config"], inner)):
        part.pop("tie_word_embeddings", None)
        if flag is not None:
            part["tie_word_embeddings"] = flag
    path.write_text(json.dumps(config))
    model, ids = theirs(tmp_path, kind), tokens(6)
    if head == "none" and model.lm_head.weight is not model.get_input_embeddings().weight:
        # Its head is a random one: ours is the embedding where that is not denied.
        with closing(open_checkpoint(tmp_path)) as checkpoint:
            asked = outer if inner is None else inner
            assert checkpoint.config.get("headless", False) is (asked is False)
        return
    assert relative_error(logits_of(tmp_path, ids), oracle(model, ids)) < TOLERANCE


def test_outer_defaults() -> None:
    """Those that tie the head where their outer config does not say."""
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    seen = (
        "gemma3",
        "gemma4",
        "idefics3",
        "internvl",
        "lfm2_vl",
        "llava",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
    )
    more = (
        "minicpmv4_6",
        "paddleocr_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    )
    tied = {kind for kind in (*seen, *more) if kinds[kind]().tie_word_embeddings}
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
