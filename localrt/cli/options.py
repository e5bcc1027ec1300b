"""The flags that commands share: which model, how to load it, and how to sample.

Names are the Python options' names with dashes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from localrt.engine.options import read_options
from localrt.errors import OptionError
from localrt.hub import DEMO_NAME
from localrt.settings import ENDPOINT_KEY

__all__ = [
    "BARE_MODEL_HELP",
    "HUB_FLAGS",
    "Flag",
    "adapters_by_name",
    "add_constraint_arguments",
    "add_endpoint_arguments",
    "add_flags",
    "add_hub_arguments",
    "add_load_arguments",
    "add_model_argument",
    "add_sampling_arguments",
    "constraint_options",
    "flag_values",
    "load_options",
    "sampling_options",
]

# Name, type, what stands for the value in help texts, and the help text. The type is what converts
# the text, ``bool`` for a switch, ``list`` for a text that may be repeated, or a tuple of choices.
Flag: TypeAlias = tuple[str, Any, str | None, str]

BARE_MODEL_HELP = "smollm2, org/name of the hub, a folder or a .gguf file"

HUB_FLAGS: tuple[Flag, ...] = (
    ("--revision", str, None, "branch, tag or commit of a hub model"),
    ("--offline", bool, None, "never use the network"),
)
_ENDPOINT: tuple[Flag, ...] = (
    (
        "--endpoint",
        str,
        "URL",
        "use a model of this server (localrt serve, vLLM, or any with OpenAI's protocol); "
        "MODEL is its name there (default: the first one that the server lists)",
    ),
    (
        "--api-key",
        str,
        "KEY",
        f"key for the server; better set it in ${ENDPOINT_KEY}; '' sends none",
    ),
)
_KV_HELP = "format of the KV cache: int8 takes half the memory, int4 a third (CPU kernels)"
_ACTIVATIONS_HELP = (
    "what the kernels of a GPU multiply with: int8 is faster (default), bf16 exacter"
)
_TEMPLATE_HELP = "file with the Jinja2 chat template to use in place of the model's"
_ADAPTER_HELP = "LoRA adapter, a folder, .gguf file or hub id; may be repeated, the first is used"
_ENGINE_HELP = "auto uses llamacpp for models that native cannot run"
_LOADING: tuple[Flag, ...] = (
    ("--adapter", list, "[NAME=]PATH", _ADAPTER_HELP),
    ("--engine", ("auto", "native", "llamacpp"), None, _ENGINE_HELP),
    ("--format", ("bf16", "f32"), None, "unpack weights to this format"),
    ("--device", str, None, "cpu, cuda, virtual:CARD or auto (default)"),
    ("--gpu-memory", str, "SIZE", "most GPU memory to use, like 8GB"),
    ("--ram", str, "SIZE", "most RAM to use, like 4GB"),
    ("--ctx", int, "TOKENS", "context length"),
    ("--kv-format", ("bf16", "int8", "int4"), None, _KV_HELP),
    ("--activations", ("int8", "bf16"), None, _ACTIVATIONS_HELP),
    ("--chat-template", str, "FILE", _TEMPLATE_HELP),
    ("--threads", int, "N", "CPU threads"),
    *HUB_FLAGS,
)
_DRAFT_HELP = (
    "what guesses the next tokens: a smaller model (best of the same vocabulary), a trained head, "
    "or repeated text (ngram); auto is the default"
)
_THINKING_HELP = "whether the model thinks before it answers, or how much"
_BREAKERS_HELP = (
    "DRY: text that a repetition does not reach across; may be repeated; none: nothing "
    "(a line end, colon, quote and asterisk)"
)
_OVERFLOW_HELP = "what to do when a conversation is longer than the context"
_SAMPLING: tuple[Flag, ...] = (
    ("--max-tokens", int, "N", "longest answer, in tokens"),
    ("--temperature", float, "T", "0 always takes the likeliest token"),
    ("--top-k", int, "K", "only the K likeliest tokens"),
    ("--top-p", float, "P", "only the likeliest tokens, up to probability P"),
    ("--min-p", float, "P", "no token below P times the likeliest one"),
    ("--typical-p", float, "P", "locally typical sampling"),
    ("--repetition-penalty", float, "X", "above 1: fewer repeated tokens"),
    ("--frequency-penalty", float, "X", "tokens get less likely each time they occur"),
    ("--presence-penalty", float, "X", "tokens get less likely once they occurred"),
    ("--dry-multiplier", float, "X", "above 0: avoid repeated passages (DRY); 0.8 is usual"),
    ("--dry-base", float, "X", "DRY: how much more each further repeated token counts (1.75)"),
    ("--dry-allowed-length", int, "N", "DRY: so many repeated tokens are free (2)"),
    ("--dry-penalty-last-n", int, "N", "DRY: look at the last N tokens only (-1: at all)"),
    ("--dry-sequence-breakers", list, "TEXT", _BREAKERS_HELP),
    ("--xtc-probability", float, "P", "how often to leave out the likeliest tokens (XTC)"),
    ("--xtc-threshold", float, "P", "XTC: leave out those from P on, but the last of them (0.1)"),
    ("--seed", int, "N", "the same seed gives the same text"),
    ("--stop", list, "TEXT", "end the answer at this text; may be repeated"),
    ("--draft", str, "MODEL|DIR|head|ngram|auto|off", _DRAFT_HELP),
    ("--tree-budget", int, "K", "guesses per pass (default: tuned)"),
    ("--overflow", ("error", "drop_oldest"), None, _OVERFLOW_HELP),
    ("--thinking", ("on", "off", "low", "medium", "high"), None, _THINKING_HELP),
    ("--thinking-tokens", int, "N", "end the thinking after so many tokens; 0 is off"),
)
_CONSTRAINTS: tuple[Flag, ...] = (
    ("--json-schema", str, "FILE|TEXT", "JSON that follows this schema (true: any JSON)"),
    ("--regex", str, "R", "text that matches this whole regular expression"),
)


def add_flags(parser: argparse._ActionsContainer, flags: Iterable[Flag], **defaults: Any) -> None:
    """Declare ``flags``; without a default one that is not given is None, a switch False."""
    for name, kind, metavar, text in flags:
        how: dict[str, Any] = {"type": kind, "metavar": metavar}
        if kind is bool:
            how = {"action": "store_true"}
        elif kind is list:
            how = {"action": "append", "metavar": metavar}
        elif isinstance(kind, tuple):
            how = {"choices": kind, "metavar": metavar}
        default = defaults.get(_option(name), False if kind is bool else None)
        parser.add_argument(name, help=text, default=default, **how)


def flag_values(args: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """What was given for ``flags``, by option."""
    options = [_option(name) for name, *_ in flags]
    return {option: getattr(args, option) for option in options}


def _option(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def add_model_argument(parser: argparse.ArgumentParser, *, default: str | None = DEMO_NAME) -> None:
    """MODEL, by default the demo model."""
    text = f"hub id, folder or .gguf file (default: {DEMO_NAME})"
    parser.add_argument("model", nargs="?", default=default, metavar="MODEL", help=text)


def add_hub_arguments(parser: argparse._ActionsContainer) -> None:
    """Flags of a model of the hub."""
    add_flags(parser, HUB_FLAGS, offline=None)


def add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for a model behind a server with OpenAI's protocol."""
    add_flags(parser.add_argument_group("server"), _ENDPOINT)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``localrt.load``."""
    group = parser.add_argument_group("model")
    add_flags(group, _LOADING, engine="auto", device="auto", offline=None)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of a generation; those left out follow the model's own defaults."""
    add_flags(parser.add_argument_group("generation"), _SAMPLING)


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that constrain the form of the answer."""
    needs = "needs pip install 'localrt[structured]'"
    group = parser.add_argument_group("form of the answer", needs)
    add_flags(group.add_mutually_exclusive_group(), _CONSTRAINTS)


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for ``localrt.load``."""
    options = flag_values(args, _LOADING)
    given = options.pop("adapter")
    if given:
        options["adapters"] = adapters_by_name(given)
    draft = getattr(args, "draft", None)
    return options | ({"draft": draft} if draft else {})


def adapters_by_name(given: Iterable[str]) -> dict[str, str]:
    """``--adapter [NAME=]PATH``: without a name, the last part of the path is one.

    Raises:
        OptionError: a name twice, or no path.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals:
            path, name = text, Path(text.rstrip("/")).name.removesuffix(".gguf")
        if not name or not path:
            raise OptionError(f"--adapter {text!r:.80}: give PATH or NAME=PATH")
        if name in found:
            raise OptionError(f"two adapters are called {name!r}: give NAME=PATH")
        found[name] = path
    return found


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Generation options that were given."""
    given = flag_values(args, _SAMPLING)
    options = {name: value for name, value in given.items() if value is not None}
    if options.get("dry_sequence_breakers") == ["none"]:
        options["dry_sequence_breakers"] = []
    adapters = adapters_by_name(getattr(args, "adapter", None) or ())
    return options | ({"adapter": next(iter(adapters))} if adapters else {})


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
