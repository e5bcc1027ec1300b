"""What a program gets with names of other libraries, and when it pickles a model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import localrt
from localrt.common.errors import OptionError


@pytest.mark.parametrize(
    ("call", "options", "meant"),
    [
        (localrt.load, {"rma": "2GB"}, "ram"),
        (localrt.load, {"n_ctx": 4096}, "ctx"),
        (localrt.load, {"num_ctx": 4096}, "ctx"),
        (localrt.load, {"max_model_len": 4096}, "ctx"),
        (localrt.load, {"n_gpu_layers": -1}, "gpu_memory"),
        (localrt.load, {"n_threads": 4}, "threads"),
        (localrt.load, {"torch_dtype": "auto"}, "format"),
        (localrt.load, {"device_map": "auto"}, "device"),
        (localrt.load, {"cache_type_k": "q8_0"}, "kv_format"),
        (localrt.load, {"model_path": "m.gguf"}, "model"),
        (localrt.plan, {"model": "smollm2", "n_ctx": 4096}, "ctx"),
        (localrt.preview, {"model": "smollm2", "gpu_memroy": "8GB"}, "gpu_memory"),
    ],
)
def test_unknown_arguments(call: Callable[..., Any], options: dict[str, Any], meant: str) -> None:
    with pytest.raises(OptionError, match=f"did you mean {meant}\\?"):
        call(**options)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_new_tokens", "max_tokens"),
        ("n_predict", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("temp", "temperature"),
        ("repeat_penalty", "repetition_penalty"),
        ("stop_strings", "stop"),
        ("response_format", "json_schema"),
        ("n_ctx", "ctx"),
        ("num_ctx", "ctx"),
        ("n_gpu_layers", "gpu_memory"),
    ],
)
def test_unknown_options(tiny: localrt.Model, name: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"did you mean {meant}\\?"):
        tiny.generate("hi", **{name: 1})


def test_unknown_argument_lists_known() -> None:
    with pytest.raises(OptionError, match="load has no argument 'zzz': known: model, adapters"):
        localrt.load(zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling(tiny: localrt.Model, way: Callable[[object], object]) -> None:
    for each in (tiny, tiny.chat()):
        with pytest.raises(TypeError, match="cannot be pickled or copied: each process opens its"):
            way(each)
