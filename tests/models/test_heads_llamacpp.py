"""Draft heads of GGUF files: llama.cpp computes the same.

What reads features and takes them in is in no header that llama.cpp installs, so the binding lacks
it, and its names in the library are C++'s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.drafts.heads.dflash import BlockDecoder
from localrt.models.decoder import FinalNorm
from localrt.quant.ops.arrays import AFTER_LAST, CARRIED, Features
from localrt.quant.ops.protocol import Batch, Span
from tests.models.make_gguf import write_tiny_gguf
from tests.models.test_heads import BLOCKS, IDS, load_block
from tests.models.tiny import CONFIGS, load_ours, relative_error, save_tiny
from tests.models.tiny_heads import (
    BLOCK,
    MASK,
    TinyAssistant,
    TinyBlock,
    TinyDFlash,
    TinyEagle3,
)

pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
pytestmark = pytest.mark.llamacpp

_MTP = 1  # LLAMA_CONTEXT_TYPE_MTP
_ENCODE, _DECODE = 0, 1
_CONTEXT, _FLOATS = ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "_Z26llama_set_embeddings_nextnP13llama_contextbb": (
        [_CONTEXT, ctypes.c_bool, ctypes.c_bool],
        None,
    ),
    "_Z26llama_get_embeddings_nextnP13llama_context": ([_CONTEXT], _FLOATS),
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb": (
        [_CONTEXT, ctypes.c_uint32, ctypes.c_bool],
        None,
    ),
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj": ([_CONTEXT, ctypes.c_uint32], _FLOATS),
}


class Context:
    """A context of llama.cpp with a cache in single precision."""

    def __init__(self, path: Path, *, kind: int = 0, other: Context | None = None) -> None:
        from localrt.engine.llamacpp.model import load_library

        self.api = api = load_library().api
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(api._lib, name, None)
            if function is None:
                pytest.skip(f"this llama.cpp has no {name}")
            function.argtypes, function.restype = arguments, result
            setattr(self, name[len("_Z26llama_") :].split("P13")[0], function)
        options = api.llama_model_default_params()
        options.n_gpu_layers, options.load_mtp = 0, kind == _MTP
        self.model = api.llama_model_load_from_file(str(path).encode(), options)
        assert self.model, path
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = 64
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = api.GGML_TYPE_F32
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.offload_kqv = params.op_offload = False
        params.ctx_type, params.ctx_other = kind, other and other.handle
        self.handle = api.llama_init_from_model(self.model, params)
        assert self.handle, path

    def process(
        self, kind: int, ids: Sequence[int] | None, given: np.ndarray | None, first: int
    ) -> None:
        """Compute rows of tokens, of what is given, or of both, from position ``first`` on."""
        api, batch = self.api, self.api.llama_batch_ext_init(self.handle)
        for row in range(len(given if ids is None else ids)):
            own = None
            if given is not None:
                data = given[row].ctypes.data_as(_FLOATS)
                own = api.llama_embd(data, 1, given.shape[1])
            if ids is None:
                index = api.llama_batch_ext_add_embd(batch, 0, own)
            else:
                index = api.llama_batch_ext_add_token(batch, 0, ids[row])
                assert own is None or api.llama_batch_ext_set_embd_token(batch, index, own)
            position = (ctypes.c_int32 * 1)(first + row)
            assert api.llama_batch_ext_set_pos(batch, index, position)
            assert api.llama_batch_ext_set_output_logits(batch, index, True)
        assert api.llama_process(self.handle, kind, batch) == 0
        api.llama_batch_ext_free(batch)

    def rows(self, data: Any, count: int, width: int) -> np.ndarray:
        return np.ctypeslib.as_array(data, shape=(count, width)).copy()

    def logits(self, count: int) -> np.ndarray:
        vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        return self.rows(self.api.llama_get_logits(self.handle), count, vocab)

    def close(self) -> None:
        self.api.llama_free(self.handle)
        self.api.llama_model_free(self.model)


@contextmanager
def opened(path: Path, **how: Any) -> Iterator[Any]:
    context = Context(path, **how)
    try:
        yield context
    finally:
        context.close()


@pytest.mark.parametrize("form", ["in the model's file", "alone", "alone, the model's norm"])
@pytest.mark.parametrize("name", BLOCKS)
def test_mtp_block(name: str, form: str, tmp_path: Path) -> None:
    block = TinyBlock(name, tmp_path)
    path = own = write_tiny_gguf(tmp_path, tmp_path / "m.gguf", name, predicting=1)
    if "alone" in form:
        how: dict[str, Any] = {"without": ("shared_head_norm.weight",) * ("norm" in form)}
        own = tmp_path / "mtp-m.gguf"
        write_tiny_gguf(tmp_path, own, name, predicting=1, only_block=True, **how)
    width = block.config.hidden_size
    with opened(path) as target:
        target.set_embeddings_nextn(target.handle, True, False)
        target.process(_DECODE, IDS, None, 0)
        hidden = target.rows(target.get_embeddings_nextn(target.handle), len(IDS), width)
        with opened(own, kind=_MTP) as head:
            head.process(_DECODE, IDS[1:], hidden[:-1], 1)
            theirs = head.logits(len(IDS) - 1)
    ours = load_ours(path)
    config, decoder = load_block(own, ours)
    features = Features(config.layers, np.empty((len(IDS), width), np.float32))
    ours.forward(Batch.extend([(ours.cache(32), IDS)]), rows=[], features=features)
    given = FinalNorm(ours)(features.rows)
    assert relative_error(given, hidden) < 1e-3
    batch = Batch.extend([(decoder.cache(32), IDS[1:])])
    assert relative_error(decoder.forward(batch, target_features=hidden[:-1]), theirs) < 1e-3


@pytest.mark.parametrize(
    "form", ["", "norm_before_fc", "norm_before_residual", "rope_freqs", "own embedding", "no d2t"]
)
def test_eagle3_head(form: str, tmp_path: Path) -> None:
    flag = form if form.startswith("norm") else ""
    config = save_tiny("llama", tmp_path / "target").config
    path = write_tiny_gguf(tmp_path / "target", tmp_path / "m.gguf", "llama")
    tiny = TinyEagle3(
        tmp_path, config.hidden_size, config.vocab_size, **({flag: True} if flag else {})
    )
    own, layers = tmp_path / "eagle3.gguf", (0, 1, 2)
    more: dict[str, Any] = {}
    if form == "rope_freqs":
        more["rope_freqs"] = np.linspace(1, 8, tiny.size // 2)
    if form == "own embedding":
        shape = (config.vocab_size, config.hidden_size)
        more["token_embd"] = np.random.default_rng(2).normal(size=shape)
    if form == "no d2t":  # its own output matrix neither: the model's
        tiny.tokens = np.arange(config.vocab_size)
        del tiny.weights["lm_head.weight"]
    tiny.save_gguf(own, layers, more=more, mapped=form != "no d2t")
    width, count = config.hidden_size, len(IDS)
    with opened(path) as target:
        for layer in layers:
            target.set_embeddings_layer_inp(target.handle, layer, True)
        target.process(_DECODE, IDS, None, 0)
        read = [target.get_embeddings_layer_inp(target.handle, layer) for layer in layers]
        given = np.concatenate([target.rows(data, count, width) for data in read], axis=1)
        with opened(own, other=target) as head:
            head.set_embeddings_nextn(head.handle, True, True)
            head.process(_ENCODE, None, given[:-1].copy(), 0)
            fused = head.rows(head.get_embeddings_nextn(head.handle), count - 1, width)
            head.process(_DECODE, IDS[1:], fused, 0)
            theirs = head.logits(count - 1)
            made = head.rows(head.get_embeddings_nextn(head.handle), count - 1, width)
    ours = load_ours(path)
    read_config, decoder = load_block(own, ours)
    assert read_config.layers == layers
    features = Features(layers, np.empty((count, 3 * width), np.float32))
    ours.forward(Batch.extend([(ours.cache(32), IDS)]), rows=[], features=features)
    assert relative_error(features.rows, given) < 1e-3
    cache, ids = decoder.cache(32), np.array(IDS[1:])
    batch = Batch(ids, np.arange(1, count), (Span(cache, count - 1),))
    last = Features((AFTER_LAST,), np.empty((count - 1, width), np.float32))
    found = decoder.forward(batch, target_features=given[:-1], features=last)
    assert relative_error(found, theirs[:, tiny.tokens]) < 1e-3
    assert np.isneginf(np.delete(theirs, tiny.tokens, axis=1)).all()
    assert relative_error(last.rows, made) < 1e-3


@pytest.mark.parametrize("name", ["gemma4", "gemma4-unified"])
def test_assistant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp reads the target's last two layers, and its converter leaves clusters out."""
    config = CONFIGS[name]()
    sizes: dict[str, Any] = config.to_dict()
    sizes["layer_types"][-2:] = "sliding_attention", "full_attention"
    sizes.pop("per_layer_config")
    sizes |= {"global_head_dim": 48, "num_global_key_value_heads": 1}
    monkeypatch.setitem(CONFIGS, name, lambda: type(config)(**sizes))
    tiny = TinyAssistant(name, tmp_path / "target", tmp_path / "own")
    path = write_tiny_gguf(tmp_path / "target", tmp_path / "m.gguf", name)
    own = write_tiny_gguf(tmp_path / "own", tmp_path / "assistant.gguf", "gemma4-assistant")
    width, held = tiny.target.config.get_text_config().hidden_size, len(IDS) - 1
    theirs, carried = [], []
    with opened(path) as target, opened(own, kind=_MTP, other=target) as head:
        for context in (target, head):
            context.set_embeddings_nextn(context.handle, True, False)
        target.process(_DECODE, IDS[:-1], None, 0)
        hidden = target.rows(target.get_embeddings_nextn(target.handle), held, width)[-1:]
        given = hidden
        for token in (IDS[-1], 9, 4):
            head.process(_DECODE, [token], given, held)
            theirs.append(head.logits(1)[0])
            given = head.rows(head.get_embeddings_nextn(head.handle), 1, width)
            carried.append(given[0])
    ours = load_ours(path)
    config, decoder = load_block(own, ours)
    features, cache = Features(config.layers, np.empty((held, width), np.float32)), ours.cache(32)
    ours.forward(Batch.extend([(cache, IDS[:-1])]), rows=[], features=features)
    given = FinalNorm(ours)(features.rows)[-1:]
    assert relative_error(given, hidden) < 1e-3
    cache.trim(held - 1)
    for token, logits, output in zip((IDS[-1], 9, 4), theirs, carried, strict=True):
        batch = Batch(np.array([token]), np.array([held]), (Span(cache, 1, np.ones((1, 1), bool)),))
        made = Features((CARRIED,), np.empty((1, width), np.float32))
        found = decoder.forward(batch, target_features=given, features=made)
        assert relative_error(found[0], logits) < 1e-3
        assert relative_error(made.rows[0], output) < 1e-3
        cache.trim(held - 1)
        given = made.rows


@pytest.mark.parametrize("kind", ["dflash", "dspark", "bonus anchor"])
def test_dflash(kind: str, tmp_path: Path) -> None:
    """DSpark's logits are those behind the likeliest tokens, which llama.cpp finds in the pass."""
    config = save_tiny("llama", tmp_path / "target").config
    path = write_tiny_gguf(tmp_path / "target", tmp_path / "m.gguf", "llama")
    more: dict[str, Any] = {"rank": 0 if kind == "dflash" else 24}
    tiny = TinyDFlash(tmp_path / "own", config.hidden_size, config.vocab_size, **more)
    own, layers = tmp_path / "dflash.gguf", (0, 1, 2)
    tiny.save_gguf(own, layers, **({"sample_from_anchor": False} if "bonus" in kind else {}))
    width, known, block = config.hidden_size, len(IDS) - 1, [IDS[-1], *[MASK] * (BLOCK - 1)]
    with opened(path) as target, opened(own, other=target) as head:
        for layer in layers:
            target.set_embeddings_layer_inp(target.handle, layer, True)
        target.process(_DECODE, IDS[:-1], None, 0)
        read = [target.get_embeddings_layer_inp(target.handle, layer) for layer in layers]
        given = np.concatenate([target.rows(data, known, width) for data in read], axis=1)
        head.process(_DECODE, None, given, 0)
        head.api.llama_set_causal_attn(head.handle, False)
        head.process(_DECODE, block, None, known)
        theirs = head.logits(BLOCK)
    ours = load_ours(path)
    read_config, decoder = load_block(own, ours)
    assert isinstance(decoder, BlockDecoder)
    assert read_config.layers == layers
    cache = decoder.cache(32)
    decoder.context.forward(Batch.extend([(cache, IDS[:-1])]), rows=[], target_features=given)
    span = Span(cache, BLOCK, np.ones((BLOCK, BLOCK), bool))
    batch = Batch(np.array(block), np.arange(known, known + BLOCK), (span,))
    found, token = decoder.forward(batch), IDS[-1]
    for row in range(read_config.first, BLOCK if decoder.pairs else 0):
        assert decoder.pairs is not None
        with decoder.ops.scope():
            found[row] = decoder.pairs.add(decoder.ops, found[row : row + 1], [token], found)[0]
        token = int(found[row].argmax())
    assert relative_error(found, theirs) < 1e-3


def test_dflash_2(tmp_path: Path) -> None:
    """llama.cpp packs a row's candidates, and their scores behind each one of the row before."""
    config = save_tiny("llama", tmp_path / "target").config
    path = write_tiny_gguf(tmp_path / "target", tmp_path / "m.gguf", "llama")
    choices, width, known = 5, config.hidden_size, len(IDS) - 1
    tiny = TinyDFlash(tmp_path / "own", width, config.vocab_size, rank=32, choices=choices)
    own = tiny.save_gguf(tmp_path / "dflash.gguf", (0, 1, 2))
    given = np.random.default_rng(3).normal(size=(known, 3 * width)).astype(np.float32)
    block = [IDS[-1], *[MASK] * (BLOCK - 1)]
    with opened(path) as target, opened(own, other=target) as head:
        head.set_embeddings_nextn(head.handle, True, False)
        head.process(_DECODE, None, given, 0)
        head.api.llama_set_causal_attn(head.handle, False)
        head.process(_DECODE, block, None, known)
        packed = head.rows(head.get_embeddings_nextn(head.handle), BLOCK, width)
    _, decoder = load_block(own, load_ours(path))
    assert isinstance(decoder, BlockDecoder)
    assert decoder.pairs is not None
    cache = decoder.cache(32)
    decoder.context.forward(Batch.extend([(cache, IDS[:-1])]), rows=[], target_features=given)
    span, last = (
        Span(cache, BLOCK, np.ones((BLOCK, BLOCK), bool)),
        np.empty((BLOCK, width), np.float32),
    )
    batch = Batch(np.array(block), np.arange(known, known + BLOCK), (span,))
    logits = decoder.forward(batch, features=Features((AFTER_LAST,), last))
    before = [IDS[-1]] * choices
    for row in range(1, BLOCK):
        tokens = packed[row, :choices].astype(int)
        scores = packed[row, choices : choices * (choices + 1)].reshape(choices, choices)
        for token, theirs in zip(before, scores, strict=True):
            with decoder.ops.scope():
                found = decoder.pairs.add(decoder.ops, logits[[row]], [int(token)], last[[row]])[0]
            assert set(np.flatnonzero(np.isfinite(found))) == set(tokens)
            assert relative_error(found[tokens], theirs) < 1e-3
        before = tokens.tolist()
