"""Tiny random models of every architecture, made by Hugging Face transformers, our oracle.

Each is made once, and kept in ``build/tiny`` with its GGUF files and transformers' logits: a
process that finds there what it asks for imports neither transformers nor torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.ops.protocol import Batch, Ops, Span
from tests.models import tiny_configs
from tests.models.tiny_configs import CONFIGS, MIXTURES, SIZES

_TESTS = Path(__file__).parents[1]
_KEPT = _TESTS.parent / "build" / "tiny"
_MODELS = (Path(__file__), Path(tiny_configs.__file__))
_FILES = tuple(
    _TESTS / name
    for name in ("models/make_gguf.py", "models/gguf_keys.py", "checkpoints/make_gguf.py")
)
_LISTED = ("layer_types", "mlp_layer_types", "num_attention_heads_per_layer", "layer_rope_theta")
_DAY = 86400.0


class TinyModel:
    """A random model of the tiny config ``name``, in float32: its files, and what it computes."""

    def __init__(self, name: str, seed: int, layers: int | None, vocab: int | None) -> None:
        self.name, self.seed, self.layers, self.vocab = name, seed, layers, vocab
        self._make = CONFIGS[name] if name in CONFIGS else MIXTURES[name]
        label = f"{name}-{seed}-{layers}-{vocab}"
        if self._make.__module__ != tiny_configs.__name__:  # a test's own
            label += f"-{_digest(self._config().to_json_string(use_diff=False))}"
        self._folder = _kept_models() / label

    @property
    def folder(self) -> Path:
        """The Hugging Face folder, which must not be written to: see ``save_tiny``."""
        return _kept(self._folder / "model", lambda path: self.module.save_pretrained(path))

    def gguf(self, **how: Any) -> Path:
        """The model as a GGUF file, as ``write_tiny_gguf`` makes it."""

        def write(path: Path) -> None:
            from tests.models.make_gguf import write_tiny_gguf

            write_tiny_gguf(self.folder, path, self.name, **how)

        return _kept(
            self._folder / f"{_digest(_of_files(), repr(sorted(how.items())))}.gguf", write
        )

    def logits(self, ids: list[int]) -> np.ndarray:
        """Those of transformers' model, (tokens, vocab)."""
        path = self._folder / f"{_digest(repr(ids))}.npy"
        return np.load(_kept(path, lambda path: np.save(path, oracle(self.module, ids))))

    @cached_property
    def module(self) -> Any:
        """Transformers' model."""
        return random_model(self._config(), self.seed)

    @property
    def config(self) -> SimpleNamespace:
        """What ``config.json`` says."""
        return SimpleNamespace(**json.loads((self.folder / "config.json").read_text("utf-8")))

    def _config(self) -> Any:
        config = self._make()
        if self.vocab is not None:
            config.get_text_config().vocab_size = self.vocab
        if self.layers is not None:
            keep_layers(config.get_text_config(), self.layers)
        return config


def tiny_model(
    name: str, seed: int = 0, *, layers: int | None = None, vocab: int | None = None
) -> TinyModel:
    """A random model with its first ``layers``, and another number of tokens if ``vocab`` is."""
    return TinyModel(name, seed, layers, vocab)


def save_tiny(name: str, folder: Path, seed: int = 0, **sizes: int | None) -> TinyModel:
    """``tiny_model``, with a copy of its folder that may be changed."""
    model = tiny_model(name, seed, **sizes)
    shutil.copytree(model.folder, folder, dirs_exist_ok=True)
    return model


def kept(label: str, write: Callable[[Path], object], *sources: Path) -> Path:
    """A file or folder that ``write`` makes once for all processes, while ``sources`` say so."""
    key = _digest(*(path.read_text("utf-8") for path in sources))
    return _kept(_kept_models() / f"{label}-{key}", write)


def _kept(path: Path, make: Callable[[Path], object]) -> Path:
    """``path``, which ``make`` writes unless a process has: whole, or not at all."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as beside:
            make(own := Path(beside) / path.name)
            try:
                own.replace(path)
            except OSError:  # a folder that another process has just made
                if not path.exists():
                    raise
    return path


@cache
def _kept_models() -> Path:
    """The folder of models that these sources make; those of older ones go after a day."""
    made_by = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    folder = _KEPT / _digest(*made_by, *(path.read_text("utf-8") for path in _MODELS))
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in _KEPT.iterdir():
        if time.time() - other.stat().st_mtime > _DAY:
            shutil.rmtree(other, ignore_errors=True)
    return folder


@cache
def _of_files() -> str:
    return _digest(version("gguf"), *(path.read_text("utf-8") for path in _FILES))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def keep_layers(text: Any, layers: int) -> None:
    """Leave a text model's first ``layers`` in its config."""
    text.num_hidden_layers = layers
    for listed in _LISTED:
        if getattr(text, listed, None) is not None:
            setattr(text, listed, getattr(text, listed)[:layers])


def auto_class(config: Any) -> Any:
    """Transformers' class that makes the model of a config."""
    import transformers

    auto = transformers.AutoModelForCausalLM
    text = config.get_text_config() is config and type(config) in auto._model_mapping
    return auto if text else transformers.AutoModelForImageTextToText


def random_model(config: Any, seed: int = 0) -> Any:
    """Transformers' model of a config, in float32."""
    import torch

    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = auto_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Random norms and biases too, so that none can be forgotten unseen.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
            if parameter.ndim == 1:
                parameter.add_(0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
            if name.endswith("tid2eid"):
                order = torch.rand(len(buffer), config.n_routed_experts).argsort(1)
                buffer.copy_(order[:, : buffer.shape[1]])
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model.float().eval()


def load_ours(folder: Path, ops: Ops | None = None, *, context: int | None = None) -> Decoder:
    """The same folder through localrt, computing in float32 where nothing else is said."""
    if ops is None:
        from localrt.quant.reference.ops import TorchOps

        ops = TorchOps(compute_format="f32", device="cpu")
    with closing(open_checkpoint(folder)) as checkpoint:
        config = read_config(checkpoint, context=context)
        return load_decoder(checkpoint, ops, config)


def oracle(model: Any, ids: list[int]) -> np.ndarray:
    """The logits of transformers' model."""
    import torch

    if model.config.model_type == "llama4":  # whose class fails without pictures
        model = model.language_model
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return np.asarray(logits.float().numpy())


def logits_of(path: Path, ids: list[int]) -> np.ndarray:
    """The logits of the model at ``path`` in one pass, computed in float32."""
    ours = load_ours(path, context=len(ids))
    return ours.forward(Batch.extend([(ours.cache(len(ids)), ids)]))


def edited(folder: Path, **changes: Any) -> Path:
    """``folder`` with changes to its config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}))
    return folder


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, SIZES["vocab_size"], count)]


def check_tree(decoder: Decoder, whole: np.ndarray) -> None:
    """A tree's path, and what follows it, have the bits of ``whole``, the logits of ``tokens``."""
    ids, held, cache = tokens(len(whole)), 41, decoder.cache(256)
    decoder.forward(Batch.extend([(cache, ids[:held])]))
    branch = [ids[held], 9, ids[held + 1], 11, ids[held + 2], ids[held + 3]]
    parents, path = [-1, -1, 0, 1, 2, 4], [0, 2, 4, 5]
    mask = np.eye(6, dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    places = held + mask.sum(1).astype(np.int64) - 1
    logits = decoder.forward(Batch(np.array(branch), places, (Span(cache, 6, mask),)))
    np.testing.assert_array_equal(logits[path], whole[held : held + 4])
    cache.select(held, path)
    behind = decoder.forward(Batch.extend([(cache, ids[held + 4 :])]))
    np.testing.assert_array_equal(behind, whole[held + 4 :])


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
