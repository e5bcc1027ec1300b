"""What a model is, read off its files, for clients that ask.

Only headers are read; a model need not be loaded for it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from localrt.errors import LocalrtError
from localrt.formatting import format_count
from localrt.hub.files import quantization_label
from localrt.models.checkpoints import open_checkpoint
from localrt.models.templates.chat_template import load_template
from localrt.serve.models import Offered
from localrt.text.thinking_syntax import find_syntax

__all__ = ["ModelFacts", "facts_of", "known_facts"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``format`` is of the files: ``"gguf"`` or ``"safetensors"``; ``ctx`` what the model was made
    for, in tokens. ``template`` is empty where the model brings none.
    """

    family: str
    format: str
    parameters: int
    quantization: str
    ctx: int | None
    width: int | None
    template: str
    capabilities: tuple[str, ...]

    def details(self) -> dict[str, Any]:
        """As lists of models have them."""
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family],
            "parameter_size": format_count(self.parameters).replace(" ", ""),
            "quantization_level": self.quantization,
        }

    def info(self, ctx: int | None) -> dict[str, Any]:
        """By the names that GGUF has for them; ``ctx`` is the context that it is served with."""
        sizes = {"context_length": ctx or self.ctx, "embedding_length": self.width}
        return {
            "general.architecture": self.family,
            "general.parameter_count": self.parameters,
            **{f"{self.family}.{name}": size for name, size in sizes.items() if size is not None},
        }


_UNKNOWN = ModelFacts("unknown", "unknown", 0, "unknown", None, None, "", ("completion",))


def known_facts(offered: Offered) -> ModelFacts:
    """What is known of a model; a file that cannot be read is known by its name only."""
    try:
        return _UNKNOWN if offered.path is None else facts_of(offered.path)
    except (LocalrtError, OSError):
        return _UNKNOWN


def facts_of(path: Path) -> ModelFacts:
    """What the files at ``path`` say of their model.

    Raises:
        LocalrtError: they cannot be read.
    """
    return _facts_of(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _facts_of(path: Path, _: int) -> ModelFacts:
    with closing(open_checkpoint(path)) as checkpoint:
        template = load_template(checkpoint)
        tensors = checkpoint.tensors.values()
        formats: Counter[str] = Counter()
        for tensor in tensors:
            formats[tensor.format.name] += tensor.nbytes
        main = formats.most_common(1)[0][0] if formats else "unknown"
        capabilities = ["completion"]
        if template is not None and template.takes_tools:
            capabilities.append("tools")
        if template is not None and find_syntax(template).tags is not None:
            capabilities.append("thinking")
        return ModelFacts(
            family=checkpoint.architecture,
            format=checkpoint.kind,
            parameters=sum(prod(tensor.shape) for tensor in tensors),
            quantization=quantization_label(path.stem) or main.upper(),
            ctx=_whole(checkpoint.config.get("max_position_embeddings")),
            width=_whole(checkpoint.config.get("hidden_size")),
            template="" if template is None else template.source,
            capabilities=tuple(capabilities),
        )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
