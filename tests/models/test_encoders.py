"""Encoders of texts against transformers: states, vectors, scores, files, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import localrt
from localrt.common.errors import OptionError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_encoder_config
from localrt.quantize.quantize import Recipe, quantize_model
from tests.inside import engine_of
from tests.models.test_model import some
from tests.models.tiny_encoders import (
    ENCODERS,
    RANKERS,
    add_dense,
    encoder_gguf,
    save_encoder,
    states,
    unigram,
    vocabulary_keys,
    word_pieces,
)
from tests.offload.placed import needs_kernels

_RANDOM = np.random.default_rng(0)
GGUF = ["bert", "roberta", "xlm-roberta", "nomic-bert", "modernbert", "jina-v3", "embeddinggemma"]
"""Encoders that have GGUF files."""
TEXTS = [[int(t) for t in _RANDOM.integers(5, 211, size)] for size in (3, 1, 61, 17, 86, 2)]


def found_states(path: Path, texts: list[list[int]], **options: Any) -> list[np.ndarray]:
    with localrt.load(path, **{"format": "f32", **options}) as model:
        found: dict[int, np.ndarray] = dict(engine_of(model).hidden_states(texts))
    return [found[index] for index in range(len(texts))]


def wider(make: Callable[[], Any]) -> Any:
    """The model with rows of whole blocks of 32."""
    config = make().config
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 96, 16
    config.hidden_size_per_layer_input = 32
    return type(make())(config)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@some(ENCODERS, ("bert", "embeddinggemma", "embeddinggemma2", "modernbert", "xlm-roberta"))
def test_states_as_transformers(name: str, tmp_path: Path) -> None:
    reference = save_encoder(ENCODERS[name], tmp_path)
    for ids, found in zip(TEXTS, found_states(tmp_path, TEXTS), strict=True):
        assert error(found, states(reference, ids)) < 1e-5


@needs_kernels
@some(("bert", "modernbert-odd", "embeddinggemma2-odd"), ("modernbert-odd",))
def test_kernels(name: str, tmp_path: Path) -> None:
    """The compiled kernels may attend in bf16; a text's bits do not depend on the others."""
    reference = save_encoder(ENCODERS[name], tmp_path)
    together = found_states(tmp_path, TEXTS, format=None)
    for ids, found in zip(TEXTS, together, strict=True):
        assert error(found, states(reference, ids)) < 0.02
        assert (found_states(tmp_path, [ids], format=None)[0] == found).all()


@some(GGUF, ("embeddinggemma", "modernbert"))
def test_gguf_files(name: str, tmp_path: Path) -> None:
    reference = save_encoder(ENCODERS[name], tmp_path)
    path = encoder_gguf(tmp_path, tmp_path / "tiny.gguf")
    for ids, found in zip(TEXTS, found_states(path, TEXTS), strict=True):
        assert error(found, states(reference, ids)) < 1e-5


@needs_kernels
def test_matrices_behind_the_pooling(tmp_path: Path) -> None:
    """EmbeddingGemma's, in folders, GGUF files and stores."""
    folder = tmp_path / "model"
    reference = save_encoder(lambda: wider(ENCODERS["embeddinggemma"]), folder)
    own = word_pieces(folder)
    matrices = add_dense(folder, 64, 128, 32)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    wanted = np.stack([states(reference, ids).mean(0) for ids in TEXTS])
    for matrix in matrices:
        wanted = wanted @ matrix.T
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    keys = {**vocabulary_keys(own), "bert.pooling_type": 1}
    file = encoder_gguf(folder, tmp_path / "tiny.gguf", **keys)
    store = quantize_model(folder, tmp_path / "store", Recipe("int8-g32"), threads=1).path
    for path in (folder, file, store):
        with localrt.load(path, format=None if path == store else "f32") as model:
            assert model.info.pooling == "mean"
            if path == store:
                assert ((model.embed(TEXTS) * wanted).sum(1) > 0.996).all()
            else:
                assert np.abs(model.embed(TEXTS) - wanted).max() < 1e-5
    config = folder / "3_Dense/config.json"
    config.write_text(json.dumps({"activation_function": "torch.nn.modules.activation.Tanh"}))
    with pytest.raises(localrt.LocalrtError, match=r"3_Dense: activation '.*Tanh' is not"):
        localrt.load(folder)


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_vectors_of_texts(name: str, tmp_path: Path) -> None:
    """From strings: special tokens, pooling and normalization, in folders and GGUF files."""
    reference = save_encoder(ENCODERS[name], tmp_path)
    own = (word_pieces if name == "bert" else unigram)(tmp_path)
    pooling = tmp_path / "1_Pooling"
    pooling.mkdir()
    (pooling / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    keys = {**vocabulary_keys(own), "bert.pooling_type": 2}
    file = encoder_gguf(tmp_path, tmp_path / "tiny.gguf", **keys)
    texts = ["The quick brown fox.", "naïve café, 你好世界!", "x"]
    rows = [states(reference, own(text).input_ids) for text in texts]
    for path in (tmp_path, file):
        with localrt.load(path, format="f32") as model:
            assert model.info.pooling == "cls"
            assert not model.info.writes
            for how, joined in (
                ("auto", [r[0] for r in rows]),
                ("mean", [r.mean(0) for r in rows]),
            ):
                wanted = np.stack([one / np.linalg.norm(one) for one in joined])
                assert np.abs(model.embed(texts, pooling=how) - wanted).max() < 1e-5


@some(RANKERS, ("bert", "xlm-roberta"))
def test_scores_as_transformers(name: str, tmp_path: Path) -> None:
    reference = save_encoder(RANKERS[name], tmp_path)
    own = (unigram if "roberta" in name else word_pieces)(tmp_path)
    query, documents = "the quick fox", ["brown", "naïve café " * 5, "x"]
    wanted = []
    for document in documents:
        types = getattr(reference.config, "type_vocab_size", 1) > 1
        inputs = own(query, document, return_tensors="pt", return_token_type_ids=types)
        with torch.no_grad():
            wanted.append(float(torch.sigmoid(reference(**inputs).logits[0, 0])))
    paths = [tmp_path]
    if name in ("roberta", "xlm-roberta", "modernbert"):  # GGUF files of the others have no pooler
        keys = {**vocabulary_keys(own), "bert.pooling_type": 4}
        paths.append(encoder_gguf(tmp_path, tmp_path / "tiny.gguf", **keys))
    for path in paths:
        with localrt.load(path, format="f32") as model:
            assert model.info.pooling == "rank"
            assert np.allclose(model.rank(query, documents), wanted, atol=1e-5)
            assert model.rank(query, []) == []
            with pytest.raises(OptionError, match="embeds none"):
                model.embed(["a"])
            with pytest.raises(localrt.ContextOverflowError, match="with document 1"):
                model.rank(query, ["x", "brown " * 100])


@needs_kernels
@pytest.mark.parametrize(
    ("name", "least"),
    [("bert", 0.998), pytest.param("embeddinggemma2", 0.99, marks=pytest.mark.slow)],
)
def test_quantized(name: str, least: float, tmp_path: Path) -> None:
    """A store: near the source, pooled as it, small tables as published."""

    def wide() -> Any:
        return wider(ENCODERS[name])

    folder = tmp_path / "model"
    save_encoder(wide, folder)
    own = word_pieces(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    report = quantize_model(folder, tmp_path / "store", Recipe("int8-g32"), threads=1)
    assert report.fallbacks == {}
    assert report.head_format == "int8-g32"
    with localrt.load(folder, format="f32") as model:
        wanted = model.embed(TEXTS)
    for format in (None, "f32"):
        with localrt.load(report.path, format=format) as model:
            assert model.info.pooling == "cls"
            assert model.tokenize("café") == own("café").input_ids
            assert ((model.embed(TEXTS) * wanted).sum(1) > least).all()
    recipe = Recipe("int4-g32", method="gptq", calibration=list(range(5, 200)))
    with pytest.raises(OptionError, match="only rounded"):
        quantize_model(folder, tmp_path / "other", recipe, threads=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ctx": 91}, "more than the model's 90 positions"),
        ({"device": "cuda"}, "on the CPU"),
        ({"ram": "10MB"}, "of RAM are left"),
        ({"gentle": True, "ctx": 40}, ""),
    ],
)
def test_loading(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_encoder(ENCODERS["bert"], tmp_path)
    if message:
        with pytest.raises(localrt.LocalrtError, match=message):
            localrt.load(tmp_path, **options)
        return
    with localrt.load(tmp_path, **options) as model:
        assert model.embed([[5, 6]]).shape == (1, 48)
        with pytest.raises(localrt.ContextOverflowError, match="41 tokens"):
            model.embed([[5] * 41])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 50, "multiple of 4 heads"),
        ("vocab_size", 3, "wrong shape"),
        ("num_hidden_layers", 3, r"layers\.2\..* is missing"),
        ("modernbert.layer_types", ["full_attention"], "1 entries for 5 layers"),
        ("modernbert.local_attention", 1, "at least 2"),
        ("nomic-bert.rotary_emb_interleaved", True, "rotary_emb_interleaved is not supported"),
        ("embeddinggemma2.embedding_dim", 31, "wrong shape"),
    ],
)
def test_configs_that_make_no_sense(key: str, value: object, message: str, tmp_path: Path) -> None:
    family, _, key = key.rpartition(".")
    save_encoder(ENCODERS[family or "xlm-roberta"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(localrt.LocalrtError, match=message) as raised:
        localrt.load(tmp_path)
    assert "\n" not in str(raised.value)


@some([*GGUF, "embeddinggemma2"], ("bert", "embeddinggemma2"))
def test_keys_left_out(name: str, tmp_path: Path) -> None:
    """They have the defaults of transformers' classes."""
    from huggingface_hub.errors import StrictDataclassError

    reference = save_encoder(ENCODERS[name], tmp_path)
    published = json.loads((tmp_path / "config.json").read_text("utf-8"))
    for key in published.keys() - {"architectures", "model_type"}:
        less = {name: value for name, value in published.items() if name != key}
        try:
            filled = type(reference.config).from_dict(dict(less)).to_dict()
        except StrictDataclassError:  # what is left does not fit
            continue
        filled["architectures"] = published["architectures"]
        assert read(less, tmp_path) == read(filled, tmp_path), key


def read(config: dict[str, Any], folder: Path) -> Any:
    """What the config is read as, or the error."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        return read_encoder_config(open_checkpoint(folder))
    except localrt.LocalrtError as error:
        return str(error)


def test_the_first_published_configs(tmp_path: Path) -> None:
    """Keys of other programs that Nomic's and ModernBERT's configs have."""
    save_encoder(ENCODERS["nomic-bert"], tmp_path)
    first = {"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 211}
    ours = {**first, "num_attention_heads": 6, "rope_parameters": {"rope_theta": 700.0}}
    ours |= {"num_hidden_layers": 11, "layer_norm_eps": 1e-3, "hidden_act": "gelu"}
    first |= {"n_embd": 768, "n_head": 6, "n_layer": 11, "n_inner": 3072, "rotary_emb_base": 700}
    first |= {"activation_function": "gelu", "layer_norm_epsilon": 1e-3, "type_vocab_size": 2}
    first |= {"n_positions": 8192, "max_trained_positions": 2048}  # transformers, too, says 2048
    assert read(first, tmp_path) == read(ours, tmp_path)

    reference = save_encoder(ENCODERS["modernbert"], tmp_path)
    first = json.loads((tmp_path / "config.json").read_text("utf-8"))
    del first["layer_types"], first["rope_parameters"]
    first |= {"global_rope_theta": 5e4, "local_rope_theta": 300.0, "global_attn_every_n_layers": 2}
    filled = type(reference.config).from_dict(dict(first)).to_dict()
    found = read(first, tmp_path)
    assert found == read({**filled, "architectures": first["architectures"]}, tmp_path)
    assert [layer.window for layer in found.layers] == [0, 4, 0, 4, 0]
