"""Every tiny model in every form: its folder, its GGUF file, on the kernels, and streamed.

The oracles are Hugging Face transformers, llama.cpp, and the bits of ``tests/ops/logits.json``.
"""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import localrt
from localrt.common.errors import CheckpointError, OptionError
from localrt.evaluate import evaluate
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import ARCHITECTURES, ENCODERS, find_architecture, read_config
from localrt.quant.choose import missing_on_gpu
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv_formats import CacheFormat
from localrt.quant.ops.protocol import Batch
from tests.conftest import needs_kernels
from tests.models.make_gguf import FILES
from tests.models.tiny import (
    CONFIGS,
    MIXTURES,
    TinyModel,
    load_ours,
    logits_of,
    relative_error,
    save_tiny,
    tiny_model,
    tokens,
)
from tests.models.tiny_configs import DEEPSEEK_V4, GLM5_NEXT
from tests.offload.placed import Model, assert_same, conversation, pack_tiny, passing
from tests.ops.code_paths import digest, digests, fill, known
from tests.ops.test_native_matmul import ISAS

TOLERANCE = 1e-4
ROUNDED = 0.03  # weights are float32 here: what the kernels round is the cache, to bf16
LENGTH = 40  # beyond the window of the windowed configs
MODELS = CONFIGS | MIXTURES
PAGE = Path(__file__).parents[2] / "docs/models.md"
TRAINED = Path(__file__).parents[1] / "data" / "mixture"
PERPLEXITY = 5.2752  # of transformers in float32, of the weights as they were trained
_CODE = re.compile(r"`([^`]+)`")
# One for each kind of layer; the others are for CI.
SOME = ("cohere2", "deepseek-v3", "deepseek-v4", "falcon-h1", "gemma4", "glm5-next", "gpt-oss")
SOME += ("kimi-linear", "lfm2", "llama", "nemotron-h-latent", "qwen3.5", "qwen3-moe", "qwen4-exp")


def some(names: Any, chosen: tuple[str, ...] = SOME) -> Any:
    """Parameters ``name``, of which those that are not chosen are slow."""
    marked = ((name, () if name in chosen else pytest.mark.slow) for name in sorted(names))
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks) for n, marks in marked])


@some(MODELS)
def test_model(name: str) -> None:
    tiny = tiny_model(name)
    check_passes(tiny)
    if name in FILES and name != "phi3-longrope":  # which has other factors in a short context
        check_gguf(tiny)


@needs_kernels
@some(MODELS)
def test_kernels(name: str, tmp_path: Path) -> None:
    tiny = tiny_model(name)
    for kv in ("bf16", "int8"):
        check_kernels(tiny, kv)
    check_streamed(tiny, tmp_path)
    if name in known():
        check_bits(tiny, tmp_path / name, ISAS if name in SOME else ISAS[:1])


# What older converters wrote otherwise
OLDER: dict[str, tuple[str, dict[str, bool]]] = {
    "mixtral, single experts": ("mixtral", {"stacked": False}),
    **{
        f"{name}, one kv_b": (name, {"absorbed": False})
        for name in FILES
        if name.startswith(("deepseek", "glm4-moe-lite"))
    },
}
FORMS = {name: (name, {}) for name in FILES.keys() - {"gemma4-assistant", "phi3-longrope"}} | OLDER


@some(OLDER, ("deepseek-v3, one kv_b", "mixtral, single experts"))
def test_older_gguf(name: str) -> None:
    own, how = OLDER[name]
    check_gguf(tiny_model(own), **how)


@pytest.mark.llamacpp
@some(FORMS)
def test_llama_cpp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly: the GELU of Gemma is of half precision there."""
    own, how = FORMS[name]
    if own == "deepseek-v2-lite" or "stacked" in how:
        pytest.skip("V2 Lite is known by its 27 layers; experts have to be stacked")
    path, ids = tiny_model(own).gguf(**how), tokens(LENGTH, seed=8)
    most = 0.01 if FILES[own] == "deepseek2" else 2e-3 if own.startswith("gemma") else 1e-3
    assert relative_error(logits_of(path, ids), llama_cpp_logits(path, ids, monkeypatch)) < most


@pytest.mark.parametrize("count", [40, 60])
@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_longrope(form: str, count: int) -> None:
    """Up to the original context of 48 the short factors hold, beyond it the long ones."""
    tiny, ids = tiny_model("phi3-longrope"), tokens(count)
    path = tiny.gguf() if form == "gguf" else tiny.folder
    assert relative_error(logits_of(path, ids), tiny.logits(ids)) < TOLERANCE


@needs_kernels
@pytest.mark.parametrize(
    ("name", "kv"),
    [("llama", "bf16"), pytest.param("deepseek-v2-dense", "int8", marks=pytest.mark.slow)],
)
def test_long_context(kv: CacheFormat, name: str) -> None:
    """The same for any threads and chunks beyond a block of keys, where the cache is split."""
    ids, results = tokens(700), []
    for threads, chunk in ((1, 700), (2, 700), (2, 64), (1, 257)):
        ops = NativeOps(threads=threads, kv_format=kv)
        decoder = load_ours(tiny_model(name).folder, ops, context=LENGTH)
        cache = decoder.cache(701)
        for start in range(0, 700, chunk):
            decoder.forward(Batch.extend([(cache, ids[start : start + chunk])]), rows=[])
        results.append(decoder.forward(Batch.extend([(cache, [5])])))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def specs_of(name: str) -> Any:
    """What the layers of a tiny model remember."""
    with closing(open_checkpoint(tiny_model(name).folder)) as checkpoint:
        return read_config(checkpoint).memory


def test_shared_keys_and_values_take_no_memory() -> None:
    specs, ops = specs_of("gemma4"), NativeOps()  # whose last three layers of six share
    sizes = [ops.kv_nbytes(specs[:count], 256) for count in (2, 3, 6)]
    assert sizes[0] < sizes[1] == sizes[2]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("cohere2", "they do not compute attention and an MLP in parallel"),
        ("deepseek-v4", "they do not keep several residual streams"),
        ("ling", "they do not compute decays that have a floor"),
    ],
)
def test_gpu_without_what_a_model_needs(name: str, missing: str) -> None:
    assert missing_on_gpu(specs_of(name)) == missing


def test_router_of_nan(tmp_path: Path) -> None:
    save_tiny("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.gate.weight"][3, 5] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    ours = load_ours(tmp_path)
    cache = ours.cache(LENGTH)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp: .*not numbers"):
        ours.forward(Batch.extend([(cache, tokens(4))]))
    assert cache.length == 0


def test_a_trained_mixture_in_four_bits() -> None:
    text = (TRAINED / "held_out.txt").read_text("utf-8")
    with localrt.load(TRAINED) as model:
        assert evaluate(model, text, ctx=256).perplexity == pytest.approx(PERPLEXITY, rel=0.01)


def test_no_architecture_is_left_out() -> None:
    for name in ARCHITECTURES:
        find_architecture(name)
    made = {tiny_model(name).config.architectures[0] for name in MODELS}
    assert {ARCHITECTURES[name] for name in made} == set(ARCHITECTURES.values())


def extended(decoder: Decoder, *sequences: list[int]) -> np.ndarray:
    """The logits of whole sequences, in one pass."""
    return decoder.forward(Batch.extend([(decoder.cache(LENGTH), ids) for ids in sequences]))


def check_passes(tiny: TinyModel) -> None:
    """In one pass, in a batch, and one by one behind a trim: what transformers computes."""
    ours, ids = load_ours(tiny.folder, context=LENGTH), tokens(LENGTH)
    logits = extended(ours, ids)
    assert logits.dtype == np.float32
    assert relative_error(logits, tiny.logits(ids)) < TOLERANCE

    sequences = [tokens(n, seed=n) for n in (3, 12, 19)]
    caches = [ours.cache(LENGTH) for _ in sequences]
    halves = [(c, ids[: len(ids) // 2]) for c, ids in zip(caches, sequences, strict=True)]
    rests = [(c, ids[len(ids) // 2 :]) for c, ids in zip(caches, sequences, strict=True)]
    ours.forward(Batch.extend(halves))
    expected = np.concatenate([tiny.logits(ids)[len(ids) // 2 :] for ids in sequences])
    assert relative_error(ours.forward(Batch.extend(rests)), expected) < TOLERANCE

    cache = ours.cache(LENGTH)
    ours.forward(Batch.extend([(cache, ids[:1])]), rows=[])
    ours.forward(Batch.extend([(cache, ids[1:10])]), rows=[])
    ours.forward(Batch.extend([(cache, tokens(8, seed=3))]), rows=[])
    held = cache.trim(10)  # recurrent layers go back further
    ours.forward(Batch.extend([(cache, ids[held:-5])]), rows=[])
    parts = [ours.forward(Batch.extend([(cache, [token])]), rows=[0]) for token in ids[-5:]]
    assert cache.length == LENGTH
    assert relative_error(np.concatenate(parts), tiny.logits(ids)[-5:]) < TOLERANCE


def check_gguf(tiny: TinyModel, **how: Any) -> None:
    ids = tokens(LENGTH)
    assert relative_error(logits_of(tiny.gguf(**how), ids), tiny.logits(ids)) < TOLERANCE


def check_kernels(tiny: TinyModel, kv: CacheFormat) -> None:
    """Near transformers; and one by one, bit for bit."""
    ours = load_ours(tiny.folder, NativeOps(threads=2, kv_format=kv), context=LENGTH)
    if tiny.name in DEEPSEEK_V4 | GLM5_NEXT and kv != "bf16":
        with pytest.raises(OptionError, match="int8 is not for chosen or compressed tokens"):
            ours.cache(LENGTH)
        return
    # A rounded key may change a choice, which changes that row, and those that see it a little.
    errors = []
    for seed in range(9 if ours.config.sparse else 1):
        ids = tokens(LENGTH, seed)
        whole, expected = extended(ours, ids), tiny.logits(ids)
        rows = np.abs(whole - expected).max(1) / np.abs(expected).max()
        errors.append(np.quantile(rows, 0.8) if ours.config.sparse else rows.max())
    assert np.median(errors) < ROUNDED * (3 if kv == "int8" and not ours.config.sparse else 1)
    cache = ours.cache(LENGTH)
    steps = [ours.forward(Batch.extend([(cache, [token])])) for token in ids]
    np.testing.assert_array_equal(np.concatenate(steps), whole)


def check_streamed(tiny: TinyModel, folder: Path) -> None:
    """Attention, MLPs, most experts and head from the SSD: bit for bit as in memory."""
    with closing(Model(pack_tiny(tiny.name, folder))) as model:
        # The others of the experts are what their cache has room for.
        streamed = [n for n in passing(model.store) if not n.endswith(("expert.0", "expert.1"))]
        with model.placed(streamed) as placed:
            assert_same(conversation(placed), model.expected)


def check_bits(tiny: TinyModel, folder: Path, isas: list[str]) -> None:
    """Those that ``logits.json`` has, whatever the machine; ``code_paths table`` writes it."""
    fill(shutil.copytree(tiny.folder, folder))
    wanted = known()[tiny.name]
    best, *others = isas
    assert dict(digests(folder, best)) == wanted
    for isa in others:
        assert digest(folder, isa, "int8") == wanted["int8"], isa


def page_rows() -> dict[str, list[set[str]]]:
    """The page's table: names in each column after the models' own, by the architecture."""
    found: dict[str, list[set[str]]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and (name := _CODE.fullmatch(cells[0])):
            found[name[1]] = [set(_CODE.findall(cell)) for cell in cells[2:]]
    return found


def test_the_page_says_what_is_compared() -> None:
    """Of each architecture: names in ``config.json`` and in GGUF, and those that only open."""
    folders = {tiny_model(name).config.architectures[0] for name in MODELS}
    files, rows = set(FILES.values()), page_rows()
    assert set(rows) == set(ARCHITECTURES.values())
    for module, found in rows.items():
        names = {name for name, own in ARCHITECTURES.items() if own == module}
        assert found == [names & folders, names & files, names - folders - files], module


def test_the_page_names_encoders() -> None:
    """A row of their table names each; ``test_encoders.py`` compares all of them."""
    from tests.models.tiny_encoders import ENCODERS as TINY
    from tests.models.tiny_encoders import RANKERS

    made = {type(make()).__name__ for make in (*TINY.values(), *RANKERS.values())}
    found, compared = {}, set[str]()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and (name := _CODE.fullmatch(cells[0])) and "Model`" in cells[2]:
            folders, files = (set(_CODE.findall(cell)) for cell in cells[2:])
            compared |= folders
            found |= dict.fromkeys(folders | files, name[1])
    assert compared == made
    assert found == ENCODERS


def llama_cpp_logits(path: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """What llama.cpp computes with a cache in single precision."""
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    from localrt.engine.llamacpp.engine import LlamaCppEngine
    from localrt.engine.llamacpp.model import LlamaCppModel

    model = LlamaCppModel.load(path, threads=1)
    defaults = model.api.llama_context_default_params

    def precise() -> Any:
        params = defaults()
        params.type_k = params.type_v = model.api.GGML_TYPE_F32
        params.flash_attn_type = model.api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return params

    monkeypatch.setattr(model.api, "llama_context_default_params", precise)
    engine = LlamaCppEngine(model)
    try:
        return np.concatenate(list(engine.logits(ids)))
    finally:
        engine.close()
