"""Peers that run models larger than memory by streaming layers: Accelerate and AirLLM.

Both read a Hugging Face folder in bf16 (``hf_folder.py``) and compute on the CPU, each the way it
ships. Imported in a child alone.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from localrt.bench.greedy import generate_greedily
from localrt.bench.transformers_engine import require, set_up_torch
from localrt.engine.types import Metrics
from localrt.errors import LocalrtError, MissingExtraError

__all__ = ["ACCELERATE_WAYS", "StreamerEngine", "load_accelerate", "load_airllm"]

ACCELERATE_WAYS = ("layers on disk", "disk_offload")


class StreamerEngine:
    """A causal model that loads its weights as it goes. ``path`` is the model under test."""

    def __init__(self, model: Any, path: Path, *, owner: object = None, **info: Any) -> None:
        self._model = model
        self._owner = owner  # whose hooks load the weights
        self._path = path
        self.info: Mapping[str, Any] = {
            "name": path.name,
            "architecture": model.config.model_type,
            "device": "cpu",
            "format": "bf16",
            "exactness": "approximate",
            **info,
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` by localrt's tokenizer, without special tokens."""
        from localrt.models.checkpoints import open_checkpoint
        from localrt.models.tokenizers import load_tokenizer

        with closing(open_checkpoint(self._path)) as checkpoint:
            return load_tokenizer(checkpoint).encode(text, add_special=False)

    def generate(self, prompt: list[int], tokens: int, on_first: Callable[[], None]) -> Metrics:
        """The plain greedy loop."""
        return generate_greedily(self._model, prompt, tokens, on_first)


def load_accelerate(
    path: Path, weights: Path, *, way: str, threads: int | None = None
) -> StreamerEngine:
    """Accelerate with every layer on disk and the rest in RAM, or with all of it on disk.

    ``way`` is one of ``ACCELERATE_WAYS``; ``disk_offload`` is Accelerate's function of that name.

    Raises:
        MissingExtraError: it is not installed.
        LocalrtError: it cannot load the model.
    """
    require("accelerate", "transformers", "torch", "accelerate")
    import accelerate

    set_up_torch(threads)
    load = _layers_on_disk if way == "layers on disk" else _all_on_disk
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = load(weights)
        except (ValueError, KeyError, OSError, RuntimeError, TypeError) as error:
            raise LocalrtError(f"accelerate cannot load {path.name}: {_cause(error)}") from error
    return StreamerEngine(model.eval(), path, version=accelerate.__version__)


def _layers_on_disk(weights: Path) -> Any:
    import torch
    import transformers

    skeleton = _empty_model(weights)
    layers = {f"model.layers.{n}": "disk" for n in range(skeleton.config.num_hidden_layers)}
    children = [name for name, _ in skeleton.model.named_children() if name != "layers"]
    rest = dict.fromkeys(["lm_head", *(f"model.{name}" for name in children)], "cpu")
    # Safetensors are read where they lie: the folder that is asked for stays empty.
    with tempfile.TemporaryDirectory(prefix="localrt-accelerate-") as folder:
        return transformers.AutoModelForCausalLM.from_pretrained(
            weights,
            dtype=torch.bfloat16,
            device_map={**rest, **layers},
            offload_folder=folder,
        )


def _all_on_disk(weights: Path) -> Any:
    import accelerate
    import torch

    model = _empty_model(weights)
    model.tie_weights()
    listed = json.loads((weights / "model.safetensors.index.json").read_text(encoding="utf-8"))
    index = {
        name: {"safetensors_file": str(weights / file), "weight_name": name, "dtype": "bfloat16"}
        for name, file in listed["weight_map"].items()
    }
    index.setdefault("lm_head.weight", index["model.embed_tokens.weight"])  # tied
    with tempfile.TemporaryDirectory(prefix="localrt-accelerate-") as folder:
        (Path(folder) / "index.json").write_text(json.dumps(index), encoding="utf-8")
        return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


def _empty_model(weights: Path) -> Any:
    import accelerate
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(weights)
    with accelerate.init_empty_weights(include_buffers=False):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def load_airllm(path: Path, weights: Path, *, threads: int | None = None) -> StreamerEngine:
    """AirLLM on the CPU, with its prefetching, as it ships.

    Raises:
        MissingExtraError: it is not installed.
        LocalrtError: it cannot load the model.
    """
    require("airllm", "transformers", "torch", "accelerate")
    try:
        import airllm
    except ImportError as error:
        raise MissingExtraError(f"airllm cannot be imported: {_cause(error)}") from error
    from importlib.metadata import version

    import torch

    set_up_torch(threads)

    class Untokenized(airllm.AirLLMBaseModel):  # type: ignore[misc]
        """The folder has no tokenizer, which AirLLM would insist on."""

        def get_tokenizer(self, hf_token: str | None = None) -> None:
            return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            streamer = Untokenized(str(weights), device="cpu", dtype=torch.bfloat16)
        except (ValueError, KeyError, OSError, RuntimeError, TypeError) as error:
            raise LocalrtError(f"airllm cannot load {path.name}: {_cause(error)}") from error
    return StreamerEngine(streamer.model, path, owner=streamer, version=version("airllm"))


def _cause(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
