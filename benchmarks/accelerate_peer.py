"""A peer that streams layers from the disk: Accelerate, in a benchmark's child process.

It reads a Hugging Face folder in bf16, which the parent makes and names on the command line.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from localrt.bench.engines import Launch
from localrt.bench.process import Requests, serve
from localrt.bench.transformers_engine import HuggingFaceEngine, loading, set_up_torch
from localrt.common.errors import LocalrtError


def main() -> None:
    """Hold an engine for one parent."""
    serve(_Streamer(Path(sys.argv[2])))


class _Streamer(Requests):
    def __init__(self, weights: Path) -> None:
        self._weights = weights

    def load(self, launch: dict[str, Any]) -> dict[str, Any]:
        """Like ``Requests.load``."""
        asked = Launch(**launch)
        self._loaded = load_accelerate(Path(asked.path), self._weights, threads=asked.threads)
        return dict(self._loaded.info)


def bf16_folder(path: Path, out: Path) -> Path:
    """The GGUF model at ``path`` as a Hugging Face folder in bf16, unpacked to ``out`` once.

    Raises:
        LocalrtError: transformers cannot read it.
    """
    if not out.is_dir():
        partial = out.with_name(f"{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with loading("transformers", path, LocalrtError):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.bfloat16
            )
            model.hf_quantizer = None  # its weights are plain by now
            del model.config.quantization_config
            model.save_pretrained(partial, max_shard_size="100MB")
        partial.rename(out)
    return out


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
