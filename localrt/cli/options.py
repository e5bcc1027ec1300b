"""The flags that commands share: which model, how to load it, and how to sample.

Names are the Python options' names with dashes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from localrt.chat_format.gbnf import gbnf_to_lark
from localrt.cli.help import advanced
from localrt.common.errors import OptionError
from localrt.common.files import read_text
from localrt.common.settings import ENDPOINT_KEY
from localrt.engine.options import read_options
from localrt.engine.sampling import Sampling
from localrt.hub import DEMO_NAME
from localrt.quant.ops.kv_formats import KV_FORMATS

# Name, type, metavar and help text. The type is a function that converts the text, ``bool`` for a
# switch, ``list`` for a text that may be repeated, or a tuple of choices.
Flag: TypeAlias = tuple[str, Any, str | None, str]

BARE_MODEL_HELP = "a name like llama3.2:3b, org/name of the hub, a folder or a .gguf file"
EMBEDDING_HELP = "embedding model to search long files with, beside words (default: words alone)"

HUB_FLAGS: tuple[Flag, ...] = (
    ("--revision", str, "NAME", "branch, tag or commit of a hub model (default: main)"),
    ("--offline", bool, None, "never use the network"),
)
_ENDPOINT_HELP = (
    "use a model of this server (localrt serve, vLLM, or any with OpenAI's protocol); MODEL is its "
    "name there, by default the first that the server lists (default: none)"
)
_ENDPOINT: tuple[Flag, ...] = (
    ("--endpoint", str, "URL", _ENDPOINT_HELP),
    ("--api-key", str, "KEY", f"key for the server (default: ${ENDPOINT_KEY}); '' sends none"),
    ("--no-server", bool, None, "load MODEL here, even if a running localrt serve has it"),
)

RAM_HELP = "most RAM to use, like 4GB (default: what is free, less some for other programs)"
GPU_MEMORY_HELP = "most GPU memory to use, like 8GB (default: what is free)"
DEVICE_HELP = "where to compute: cpu or cuda (default: auto, a GPU where there is one)"
KV_HELP = (
    "format of keys and values: int8 takes half the memory, int4 a third (CPU kernels) "
    "(default: bf16)"
)
FORMAT_HELP = "unpack weights to this format (default: as in the file)"
_THREADS_HELP = "CPU threads (default: one for each performance core)"
_ENGINE_HELP = "what runs the model; auto takes llamacpp where native cannot (default: auto)"
_GENTLE_HELP = "compute only while no other program wants the cores (default: off)"
_ADAPTER_HELP = (
    "LoRA adapter, a folder, .gguf file or hub id; may be repeated, the first is used "
    "(default: none)"
)
_ACTIVATIONS_HELP = (
    "what the GPU multiplies with: int8 is faster, bf16 more accurate (default: int8)"
)
_TEMPLATE_HELP = "file with a Jinja2 chat template (default: the model's own)"
_PRE_HELP = "how a GGUF file's tokenizer cuts text into words (default: as the file says)"
_LOADING: tuple[Flag, ...] = (
    ("--ram", str, "SIZE", RAM_HELP),
    ("--gpu-memory", str, "SIZE", GPU_MEMORY_HELP),
    ("--ctx", int, "TOKENS", "longest conversation (default: the model's, or what memory holds)"),
    ("--device", str, None, DEVICE_HELP),
    ("--gentle", bool, None, _GENTLE_HELP),
    ("--adapter", list, "[NAME=]PATH", _ADAPTER_HELP),
)
_LOADING_ADVANCED: tuple[Flag, ...] = (
    ("--engine", ("auto", "native", "llamacpp"), None, _ENGINE_HELP),
    ("--format", ("bf16", "f32"), None, FORMAT_HELP),
    ("--kv-format", KV_FORMATS, None, KV_HELP),
    ("--activations", ("int8", "bf16"), None, _ACTIVATIONS_HELP),
    ("--chat-template", str, "FILE", _TEMPLATE_HELP),
    ("--pre-tokenizer", str, "NAME", _PRE_HELP),
    ("--threads", int, "N", _THREADS_HELP),
    *HUB_FLAGS,
)
_DRAFT_HELP = (
    "what drafts the next tokens: a smaller model of the same vocabulary, a draft head, "
    "the model's own MTP block (mtp), or repeated text (ngram) (default: auto)"
)
_THINKING_HELP = (
    "whether the model thinks before it answers, or how much (default: the model's own)"
)
_BREAKERS_HELP = (
    "DRY: text at which a repetition ends; may be repeated; none: no such text "
    "(default: a line end, colon, quote and asterisk)"
)
_OVERFLOW_HELP = (
    "when a conversation is longer than the context: refuse it, or forget its oldest turns "
    "(default: error)"
)
_DEFAULTS = Sampling()
_SAMPLING: tuple[Flag, ...] = (  # {:g} is the sampler's default
    (
        *("--max-tokens", int, "N"),
        "longest answer, in tokens (default: what the context has room for; for a model without a "
        "chat template, `run` takes 512)",
    ),
    (
        *("--temperature", float, "T"),
        "0 always takes the most likely token (default: the model's, or {:g})",
    ),
    ("--seed", int, "N", "the same seed gives the same text (default: another every time)"),
    ("--stop", list, "TEXT", "end the answer at this text; may be repeated (default: none)"),
    ("--thinking", ("on", "off", "low", "medium", "high"), None, _THINKING_HELP),
    ("--draft", str, "MODEL|mtp|ngram|auto|off", _DRAFT_HELP),
)
_DRY_BASE_HELP = "DRY: factor for each further repeated token (default: {:g})"
_DRY_LAST_HELP = "DRY: look back over the last N tokens; -1: the whole text (default: {:g})"
_XTC_HELP = "XTC: leave out tokens as likely as P, all but the least likely (default: {:g})"
_SAMPLING_ADVANCED: tuple[Flag, ...] = (
    ("--top-k", int, "K", "keep the K most likely tokens; 0: all (default: the model's, or {:g})"),
    (
        *("--top-p", float, "P"),
        "keep the likeliest tokens up to a total probability of P (default: the model's, or {:g})",
    ),
    (
        *("--min-p", float, "P"),
        "keep tokens at least P times as likely as the likeliest (default: the model's, or {:g})",
    ),
    ("--typical-p", float, "P", "locally typical sampling with a mass of P (default: {:g}, off)"),
    ("--repetition-penalty", float, "X", "above 1: fewer repeated tokens (default: {:g})"),
    (
        *("--frequency-penalty", float, "X"),
        "above 0: tokens become less likely each time they occur (default: {:g})",
    ),
    (
        *("--presence-penalty", float, "X"),
        "above 0: tokens become less likely once they have occurred (default: {:g})",
    ),
    (
        *("--dry-multiplier", float, "X"),
        "avoid repeated passages (DRY); 0.8 is usual (default: {:g}, off)",
    ),
    ("--dry-base", float, "X", _DRY_BASE_HELP),
    (
        *("--dry-allowed-length", int, "N"),
        "DRY: repetitions of up to N tokens are free (default: {:g})",
    ),
    ("--dry-penalty-last-n", int, "N", _DRY_LAST_HELP),
    ("--dry-sequence-breaker", list, "TEXT", _BREAKERS_HELP),
    (
        *("--xtc-probability", float, "P"),
        "XTC: how often to leave out the most likely tokens (default: {:g}, never)",
    ),
    ("--xtc-threshold", float, "P", _XTC_HELP),
    ("--tree-budget", int, "K", "draft tokens in one pass (default: tuned while it runs)"),
    ("--overflow", ("error", "drop_oldest"), None, _OVERFLOW_HELP),
    (
        *("--thinking-tokens", int, "N"),
        "end the thinking after N tokens; 0: no thinking (default: no limit)",
    ),
)
_CONSTRAINTS: tuple[Flag, ...] = (
    (
        *("--json-schema", str, "FILE|TEXT"),
        "JSON that follows this schema; true: any JSON (default: any text)",
    ),
    ("--regex", str, "R", "text that matches this whole regular expression (default: any text)"),
    (
        *("--grammar", str, "FILE|TEXT"),
        "text that follows this grammar in GBNF, llama.cpp's notation (default: any text)",
    ),
    ("--grammar-file", str, "FILE", "the same, from a file (default: none)"),
)


def add_flags(
    parser: argparse._ActionsContainer, flags: Iterable[Flag], **defaults: object
) -> None:
    """Declare ``flags``. A missing flag has its default, else None, or False for a switch."""
    for name, kind, metavar, text in flags:
        how: dict[str, Any] = {"type": _NUMBERS.get(kind, kind), "metavar": metavar}
        if kind is bool:
            how = {"action": "store_true"}
        elif kind is list:
            how = {"action": "append", "metavar": metavar}
        elif isinstance(kind, tuple):
            how = {"choices": kind, "metavar": metavar}
        default = defaults.get(_option(name), False if kind is bool else None)
        parser.add_argument(name, help=text, default=default, **how)


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, is {text!r:.80}") from None


def number(text: str) -> float:
    """Convert the text of a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, is {text!r:.80}") from None


_NUMBERS: dict[object, object] = {int: _whole_number, float: number}


def flag_values(args: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Return the values of ``flags``, by option."""
    options = [_option(name) for name, *_ in flags]
    return {option: getattr(args, option) for option in options}


def _option(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def add_model_argument(parser: argparse.ArgumentParser, *, default: str | None = DEMO_NAME) -> None:
    """Add MODEL, by default the demo model."""
    text = f"{BARE_MODEL_HELP} (default: {DEMO_NAME})"
    parser.add_argument("model", nargs="?", default=default, metavar="MODEL", help=text)


def add_hub_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for a hub model."""
    add_flags(advanced(parser), HUB_FLAGS, offline=None)


def add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for a model on a server with OpenAI's protocol."""
    add_flags(parser.add_argument_group("server"), _ENDPOINT)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags of ``localrt.load``."""
    add_flags(parser.add_argument_group("model"), _LOADING, device="auto")
    add_flags(advanced(parser), _LOADING_ADVANCED, engine="auto", offline=None)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add generation flags; missing ones take the model's own defaults."""
    add_flags(parser.add_argument_group("generation"), map(_with_default, _SAMPLING))
    add_flags(advanced(parser), map(_with_default, _SAMPLING_ADVANCED))


def _with_default(flag: Flag) -> Flag:
    """Put the sampler's own default into the help text, where it has a place for it."""
    name, kind, metavar, text = flag
    default = getattr(_DEFAULTS, _option(name), None)
    return name, kind, metavar, text.format(default)


def add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags that constrain the form of the answer."""
    group = parser.add_argument_group("form of the answer")
    add_flags(group.add_mutually_exclusive_group(), _CONSTRAINTS)


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for ``localrt.load``."""
    options = flag_values(args, (*_LOADING, *_LOADING_ADVANCED))
    given = options.pop("adapter")
    if given:
        options["adapters"] = adapters_by_name(given)
    draft = getattr(args, "draft", None)
    return options | ({"draft": draft} if draft else {})


def adapters_by_name(given: Iterable[str]) -> dict[str, str]:
    """Parse ``--adapter [NAME=]PATH``; the default name is the last part of the path.

    Raises:
        OptionError: a name is used twice, or a path is missing.
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
    """Return the given generation options."""
    given = flag_values(args, (*_SAMPLING, *_SAMPLING_ADVANCED))
    options = {name: value for name, value in given.items() if value is not None}
    breakers = options.pop("dry_sequence_breaker", None)
    if breakers is not None:
        options["dry_sequence_breakers"] = [] if breakers == ["none"] else breakers
    adapters = adapters_by_name(getattr(args, "adapter", None) or ())
    return options | ({"adapter": next(iter(adapters))} if adapters else {})


def constraint_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options that constrain the answer; read schema and grammar files.

    Raises:
        OptionError: a file cannot be read, or is not a valid schema or grammar.
    """
    options: dict[str, Any] = {}
    schema = getattr(args, "json_schema", None)
    if schema is not None:
        text = schema.strip()
        is_text = text == "true" or text[:1] == "{"
        options["json_schema"] = text if is_text else read_text(schema)
    if getattr(args, "regex", None) is not None:
        options["regex"] = args.regex
    grammar, file = getattr(args, "grammar", None), getattr(args, "grammar_file", None)
    if file is None and grammar is not None and "::=" not in grammar:
        file = grammar
    if file is not None or grammar is not None:
        options["grammar"] = grammar if file is None else read_text(file)
        gbnf_to_lark(options["grammar"], lambda _: 0)
    read_options(options)
    return options
