"""Load options: what is loaded and how, one value from ``localrt.load`` to the engine.

Also the choice of a context length, for every way of loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from localrt.common.errors import OptionError
from localrt.common.option_names import option
from localrt.engine.options import read_options
from localrt.models.tokenizers.pretokenizers import KNOWN_PRE_TYPES
from localrt.offload.account import longest_context
from localrt.quant.ops.kv_formats import parse_kv_format

ENGINES = ("auto", "native", "llamacpp")
FORMATS = (None, "bf16", "f32")
_MOST_THREADS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options of ``localrt.load``, sizes in bytes: checked here, and read where they count.

    ``model``, ``revision``, ``adapters`` and ``draft`` say what is loaded; where a model's path is
    at hand, they may be left out.

    ``pass_rows``: the rows of a usual pass, for which weights are placed; more than one if draft
    tokens are verified. With a ``gpu_memory`` of 0 the CPU computes everything.
    ``shrinkable``: a model that fits whole can later give up memory and stream its weights.
    ``gentle``: its passes give way to other programs.
    """

    model: str = ""
    revision: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    draft: str = "auto"
    engine: str = "auto"
    format: str | None = None
    device: str = "auto"
    gpu_memory: int | None = None
    ram: int | None = None
    ctx: int | None = None
    kv_format: str | None = None
    activations: str | None = None
    chat_template: Path | None = None
    pre_tokenizer: str | None = None
    threads: int | None = None
    pass_rows: int = 1
    shrinkable: bool = False
    gentle: bool = False

    def __post_init__(self) -> None:
        read_options({"draft": self.draft})  # raises
        if self.engine not in ENGINES:
            raise OptionError(
                f"{option('engine')} must be one of {', '.join(ENGINES)}, is {self.engine!r}"
            )
        if self.format not in FORMATS:
            raise OptionError(
                f"{option('format')} must be bf16 or f32 in this version (or unset), "
                f"is {self.format!r}"
            )
        parse_kv_format(self.kv_format)  # raises
        if self.pre_tokenizer not in (*KNOWN_PRE_TYPES, None):
            raise OptionError(
                f"{option('pre_tokenizer')} must be one of {', '.join(KNOWN_PRE_TYPES)}, is "
                f"{self.pre_tokenizer!r:.60}"
            )
        if self.activations not in ("int8", "bf16", None):
            raise OptionError(
                f"{option('activations')} must be int8 or bf16 (or unset), is {self.activations!r}"
            )
        if self.device not in ("auto", "cpu", "cuda") and not str(self.device).startswith("cuda:"):
            raise OptionError(
                f"{option('device')} must be auto, cpu or cuda, is {self.device!r}"
                + (
                    " (`localrt plan MODEL --gpu` forecasts a GPU that is not here)"
                    if str(self.device).startswith("virtual:")
                    else ""
                )
            )
        for name in ("ctx", "threads"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise OptionError(f"{option(name)} must be an integer, is {value!r}")
            if value is not None and value < 1:
                raise OptionError(f"{option(name)} must be at least 1, is {value}")
        if self.threads is not None and self.threads > _MOST_THREADS:
            raise OptionError(
                f"{option('threads')} must be at most {_MOST_THREADS}, is {self.threads}"
            )
        for name in ("shrinkable", "gentle"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionError(f"{option(name)} must be true or false, is {value!r:.80}")


def pick_context(
    ctx: int | None, trained: int, fits: Callable[[int], bool], notes: list[str]
) -> int:
    """Return ``ctx``, or if None the longest context up to ``trained`` that fits. Adds a line to
    ``notes`` if the result is shorter or longer than ``trained``.
    """
    if ctx is None:
        ctx = longest_context(trained, fits)
        if ctx < trained:
            notes.append(
                f"the context is {ctx} tokens, not the model's {trained}, to fit in memory"
            )
    elif ctx > trained:
        notes.append(
            f"the context of {ctx} tokens is longer than the {trained} that the model was trained "
            "for: answers may degrade"
        )
    return ctx
