"""Spells options in messages as the reader knows them.

Code that writes a message names options by ``option``, which puts the Python spelling in backticks.
Code that shows a message respells them by ``spelled``: ``ctx=512`` in Python, ``--ctx 512`` on the
command line, ``/set ctx 512`` in the app. A single word in backticks is an option, so messages use
backticks for nothing else. Knows no option's meaning, but has a table of other libraries' option
names and ours.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Callable, Iterable

from localrt import system

# Spells an option, given its name and its value or None.
Spelling = Callable[[str, object], str]

_OPTION = re.compile(r"`([a-z_]+)(?:=(-?[\d.]+(?:e-?\d+)?|True|False|\"[^`]*\"))?`")


def option(name: str, value: object = None) -> str:
    """Mark an option by its Python name, with its value if the message gives one."""
    return f"`{python_option(name, value)}`"


def spelled(text: str, spelling: Spelling) -> str:
    """A message with all options spelled by ``spelling``."""

    def respelled(found: re.Match[str]) -> str:
        try:
            value = None if found[2] is None else ast.literal_eval(found[2])
        except (SyntaxError, ValueError):  # no option: a message may quote any text
            return found[0]
        return spelling(found[1], value)

    return _OPTION.sub(respelled, text)


def python_option(name: str, value: object) -> str:
    """``ctx=512``, ``ram="2GB"``; without a value ``ctx``."""
    if value is None:
        return name
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    return f"{name}={text}"


def on_command_line(name: str, value: object) -> str:
    """``--ctx 512``, ``--kv-format``; an option without a flag is spelled as in Python."""
    if name in _NO_FLAGS:
        return python_option(name, value)
    flag = "--" + _FLAGS.get(name, name).replace("_", "-")
    return flag if value is None else f"{flag} {flag_value(value)}"


def flag_value(value: object) -> str:
    """A value as typed after an option's name: ``on``, ``512``, ``'two words'``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return system.quote(str(value))


def meant_by(name: str, known: Iterable[str]) -> str | None:
    """The ``known`` name that an unknown one probably means: the equivalent of another library's
    option, otherwise the closest; None if none is close.
    """
    names, ours = list(known), _ELSEWHERE.get(name.lower())
    if ours in names:
        return ours
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"did you mean ctx?"``, or an empty text, by ``meant_by``."""
    meant = meant_by(name, known)
    return f"did you mean {meant}?" if meant else ""


# Our names of options of llama.cpp and its bindings, Ollama, transformers, vLLM, OpenAI's API.
_ELSEWHERE = {
    theirs: ours
    for ours, names in {
        "ctx": "n_ctx num_ctx c ctx_size context_length context_size max_model_len max_seq_len "
        "max_context_length max_position_embeddings",
        "max_tokens": "max_new_tokens n_predict num_predict n max_length max_completion_tokens "
        "max_output_tokens",
        "gpu_memory": "n_gpu_layers num_gpu gpu_layers ngl gpu_memory_utilization max_vram",
        "ram": "max_memory cpu_offload_gb",
        "threads": "n_threads num_thread num_threads n_threads_batch",
        "kv_format": "type_k type_v cache_type_k cache_type_v kv_cache_dtype kv_cache_type",
        "format": "dtype torch_dtype quantization quantization_config load_in_4bit load_in_8bit",
        "device": "device_map main_gpu",
        "model": "model_path model_name model_id repo_id pretrained_model_name_or_path filename",
        "adapters": "lora_path lora lora_modules",
        "draft": "draft_model speculative_model speculative_config assistant_model",
        "offline": "local_files_only",
        "temperature": "temp do_sample",
        "repetition_penalty": "repeat_penalty",
        "typical_p": "typical",
        "stop": "stop_strings stop_sequences stop_words",
        "json_schema": "response_format guided_json json_mode",
        "regex": "guided_regex",
        "thinking": "enable_thinking think reasoning_effort",
        "thinking_tokens": "thinking_budget max_thinking_tokens",
        "batch": "batch_size n_batch num_batch",
        "messages": "message conversation conversations",
        "prompt": "text input instruction question content",
    }.items()
    for theirs in names.split()
}

# Flags named differently from their Python options, and options without a flag.
_FLAGS = {
    "adapters": "adapter",
    "dry_sequence_breakers": "dry_sequence_breaker",
    "drain_s": "drain",
    "long_prompt_tokens": "long_prompt",
}
_NO_FLAGS = frozenset(
    {
        *("context_tokens", "ignore_eos", "line_seconds", "logit_bias", "logprobs", "min_indent"),
        *("parallel_tool_calls", "token_ids", "tool_choice", "tree_depth"),
    }
)
