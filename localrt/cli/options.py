"""The flags that commands share: which model, how to load it, and how to sample.

Names are the Python options' names with dashes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from localrt.engine.options import read_options
from localrt.errors import OptionError
from localrt.settings import ENDPOINT_KEY

__all__ = [
    "DEMO_MODEL",
    "add_constraint_arguments",
    "add_endpoint_arguments",
    "add_hub_arguments",
    "add_load_arguments",
    "add_model_argument",
    "add_sampling_arguments",
    "constraint_options",
    "load_options",
    "sampling_options",
]

DEMO_MODEL = "smollm2"

_SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "stop"),
    *("draft", "tree_budget", "overflow"),
)
_LOADING = (
    *("engine", "format", "device", "gpu_memory", "ram", "ctx", "kv_format", "threads"),
    *("revision", "offline"),
)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL, by default the demo model."""
    parser.add_argument(
        "model",
        nargs="?",
        default=DEMO_MODEL,
        metavar="MODEL",
        help=f"hub id, folder or .gguf file (default: {DEMO_MODEL})",
    )


def add_hub_arguments(parser: argparse._ActionsContainer) -> None:
    """Flags of a model of the hub."""
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument(
        "--offline", action="store_true", default=None, help="never use the network"
    )


def add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for a model behind a server with OpenAI's protocol."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--endpoint",
        metavar="URL",
        help="use a model of this server (localrt serve, vLLM, or any with OpenAI's protocol); "
        "MODEL is its name there (default: the first one that the server lists)",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key for the server; better set it in ${ENDPOINT_KEY}; '' sends none",
    )


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``localrt.load``."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--engine",
        choices=("auto", "native", "llamacpp"),
        default="auto",
        help="auto uses llamacpp for models that native cannot run",
    )
    group.add_argument("--format", choices=("bf16", "f32"), help="unpack weights to this format")
    group.add_argument("--device", default="auto", help="cpu, cuda, virtual:CARD or auto (default)")
    group.add_argument("--gpu-memory", metavar="SIZE", help="most GPU memory to use, like 8GB")
    group.add_argument("--ram", metavar="SIZE", help="most RAM to use, like 4GB")
    group.add_argument("--ctx", type=int, metavar="TOKENS", help="context length")
    group.add_argument(
        "--kv-format",
        choices=("bf16", "int8", "int4"),
        help="format of the KV cache: int8 takes half the memory, int4 a third (CPU kernels)",
    )
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    add_hub_arguments(group)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a generation; those left out follow the model's own defaults."""
    group = parser.add_argument_group("generation")
    group.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, in tokens")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="0 always takes the likeliest token"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="only the likeliest tokens, up to probability P"
    )
    group.add_argument(
        "--min-p", type=float, metavar="P", help="no token below P times the likeliest one"
    )
    group.add_argument("--typical-p", type=float, metavar="P", help="locally typical sampling")
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="above 1: fewer repeated tokens"
    )
    group.add_argument(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="tokens get less likely each time they occur",
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="tokens get less likely once they occurred",
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer at this text; may be repeated",
    )
    group.add_argument(
        "--draft",
        metavar="MODEL|DIR|head|ngram|auto|off",
        help="what guesses the next tokens: a smaller model with the same vocabulary, a trained "
        "head, or repeated text (ngram); auto is the default",
    )
    group.add_argument(
        "--tree-budget", type=int, metavar="K", help="guesses per pass (default: tuned)"
    )
    group.add_argument(
        "--overflow",
        choices=("error", "drop_oldest"),
        help="what to do when a conversation is longer than the context",
    )


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that constrain the form of the answer."""
    group = parser.add_argument_group(
        "form of the answer", "needs pip install 'localrt[structured]'"
    )
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--json-schema", metavar="FILE|TEXT", help="JSON that follows this schema (true: any JSON)"
    )
    either.add_argument(
        "--regex", metavar="R", help="text that matches this whole regular expression"
    )


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for ``localrt.load``."""
    names = (*_LOADING, *(["draft"] if getattr(args, "draft", None) else []))
    return {name: getattr(args, name) for name in names}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Generation options that were given."""
    return {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}


def constraint_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options that bind the answer, as they were given; a schema's file is read.

    Raises:
        OptionError: the file cannot be read, or what it holds is no schema.
    """
    options: dict[str, Any] = {}
    schema = getattr(args, "json_schema", None)
    if schema is not None:
        text = schema.strip()
        options["json_schema"] = text if text == "true" or text[:1] == "{" else _file_text(schema)
    if getattr(args, "regex", None) is not None:
        options["regex"] = args.regex
    read_options(options)
    return options


def _file_text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise OptionError(f"the schema file {path[:80]!r} cannot be read: {reason}") from error
