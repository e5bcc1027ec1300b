"""Peers that stream layers from the disk: Accelerate and AirLLM, in a benchmark's child process.

Both read a Hugging Face folder in bf16 (``hf_folder.py``), each the way it ships. The parent names
the folder on the child's command line.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from localrt.bench.engines import Launch
from localrt.bench.process import Requests, serve
from localrt.bench.transformers_engine import (
    HuggingFaceEngine,
    first_line,
    loading,
    set_up_torch,
)
from localrt.common.errors import LocalrtError, MissingExtraError


def main() -> None:
    """Hold an engine for one parent."""
    serve(_Streamer(Path(sys.argv[2])))


class _Streamer(Requests):
    def __init__(self, weights: Path) -> None:
        self._weights = weights

    def load(self, launch: dict[str, Any]) -> dict[str, Any]:
        """Like ``Requests.load``."""
        asked = Launch(**launch)
        load = {"accelerate": load_accelerate, "airllm": load_airllm}[asked.engine]
        self._loaded = load(Path(asked.path), self._weights, threads=asked.threads)
        return dict(self._loaded.info)


def load_accelerate(path: Path, weights: Path, *, threads: int | None = None) -> HuggingFaceEngine:
    """Accelerate with every layer on disk and the rest in RAM.

    Its own ``disk_offload``, which leaves the rest on disk too, is slower in prefill and decode.

    Raises:
        LocalrtError: it cannot load the model.
    """
    import accelerate

    set_up_torch(threads)
    with loading("accelerate", path, LocalrtError):
        config = transformers.AutoConfig.from_pretrained(weights)
        with accelerate.init_empty_weights(include_buffers=False):
            skeleton = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        layers = {f"model.layers.{n}": "disk" for n in range(config.num_hidden_layers)}
        children = [name for name, _ in skeleton.model.named_children() if name != "layers"]
        rest = dict.fromkeys(["lm_head", *(f"model.{name}" for name in children)], "cpu")
        # Safetensors are read where they lie: the folder that is asked for stays empty.
        with tempfile.TemporaryDirectory(prefix="localrt-accelerate-") as folder:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                weights,
                dtype=torch.bfloat16,
                device_map={**rest, **layers},
                offload_folder=folder,
            )
    return HuggingFaceEngine(
        model.eval(), path, format="bf16, layers on disk", version=accelerate.__version__
    )


def load_airllm(path: Path, weights: Path, *, threads: int | None = None) -> HuggingFaceEngine:
    """AirLLM on the CPU, with its prefetching, as it ships.

    Raises:
        MissingExtraError: it is not installed.
        LocalrtError: it cannot load the model.
    """
    try:
        import airllm
    except ImportError as error:
        raise MissingExtraError(f"airllm cannot be imported: {first_line(error)}") from error

    set_up_torch(threads)

    class Untokenized(airllm.AirLLMBaseModel):  # type: ignore[misc]
        """The folder has no tokenizer, which AirLLM would insist on."""

        def get_tokenizer(self, hf_token: str | None = None) -> None:
            return None

    with loading("airllm", path, LocalrtError):
        streamer = Untokenized(str(weights), device="cpu", dtype=torch.bfloat16)
    return HuggingFaceEngine(streamer.model, path, owner=streamer, version=version("airllm"))
