"""Loads a model from disk: engine, tokenizer, chat template, defaults.

It chooses engine, device and context, and checks memory before any weight is read. It does not know
prompts or sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from localrt.chat_format.chat_template import (
    MessageTemplate,
    PlainTemplate,
    load_template,
)
from localrt.common.errors import (
    MissingExtraError,
    OptionError,
    TokenizerError,
    UnsupportedModelError,
)
from localrt.common.extras import install
from localrt.common.option_names import option
from localrt.common.settings import DEFAULT_CONTEXT
from localrt.engine.protocol import Engine
from localrt.engine.sampling import sampling_defaults
from localrt.hub.other_programs import Extras
from localrt.loading.context import LoadContext
from localrt.loading.format_names import quantization_name
from localrt.loading.native import load_native
from localrt.loading.options import LoadOptions
from localrt.loading.vision import VisionLoader
from localrt.models.checkpoints import Checkpoint, GgufCheckpoint, open_checkpoint
from localrt.models.checkpoints.safetensors.folder import NO_HEAD
from localrt.models.registry import (
    ARCHITECTURES,
    ENCODERS,
    ONLY_EMBEDS,
    find_architecture,
    read_encoder_config,
    require_readable,
)
from localrt.models.tokenizers import Tokenizer, load_tokenizer
from localrt.models.weight_files import POOLING_NAME
from localrt.offload.store.pack import fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory. ``tokenizer`` is None for a model without one.

    ``vision_problem`` says why a model that takes pictures refuses them.
    ``fingerprint`` identifies the files as they were opened; empty if KV caches cannot be saved.
    ``mute`` says why it writes no text; empty if it does.
    """

    path: Path
    engine: Engine
    tokenizer: Tokenizer | None
    template: MessageTemplate
    defaults: Mapping[str, object]
    eos_ids: frozenset[int]
    ctx: int
    notes: tuple[str, ...]
    tokenizer_problem: str = ""
    pooling: str = ""  # the pooling for embeddings; empty if the model does not name it
    system: str | None = None  # for conversations without a system prompt
    fingerprint: str = ""
    quantization: str = ""
    vision_problem: str = ""
    mute: str = ""


def load_model(
    path: Path,
    options: LoadOptions,
    context: LoadContext | None = None,
    extras: Extras | None = None,
) -> LoadedModel:
    """Open, check, and load the model at ``path``; ``extras`` is what Ollama keeps for it."""
    extras = extras or Extras()
    checkpoint = open_checkpoint(path)
    try:
        notes = list(checkpoint.notes)
        context = replace(context or LoadContext(), notes=notes)
        vision = VisionLoader(checkpoint.path, extras.projectors)
        name = _choose_engine(checkpoint, options, notes)
        # Before the weights, so that they reuse memory freed by building the vocabulary, and the
        # memory check counts what the template engine takes.
        tokenizer, problem = _load_tokenizer(checkpoint, options, notes)
        template: MessageTemplate | None = load_template(checkpoint, options.chat_template)
        if name == "native":
            engine, ctx = load_native(checkpoint, options, context)
        else:
            engine, ctx = _load_llamacpp(checkpoint, options, context)
            tokenizer = tokenizer or engine.tokenizer()
            problem = ""
        engine.ram, engine.gpu_memory = options.ram, options.gpu_memory
        vision.attach(engine, tokenizer, ctx)
        notes += vision.notes
        if problem:
            notes.append(problem)
        mute = NO_HEAD if checkpoint.config.get("headless") else ""
        mute = ONLY_EMBEDS if checkpoint.architecture in ENCODERS else mute
        if template is None:
            template = PlainTemplate()
            if tokenizer is not None and not mute:
                notes.append(_no_template(extras.go_template))
        return LoadedModel(
            path=checkpoint.path,
            engine=engine,
            tokenizer=tokenizer,
            template=template,
            defaults=sampling_defaults(checkpoint.generation_config, engine.info.vocab_size),
            eos_ids=_eos_ids(tokenizer, checkpoint.generation_config),
            ctx=ctx,
            notes=tuple(notes),
            tokenizer_problem=problem,
            pooling=_pooling(checkpoint),
            system=extras.system,
            fingerprint=checkpoint.stamp + fingerprint(checkpoint) if name == "native" else "",
            quantization=options.format or quantization_name(checkpoint),
            vision_problem=vision.problem,
            mute=mute,
        )
    finally:
        checkpoint.close()


def _no_template(go_template: bool) -> str:
    lacking = "the model has no chat template: chatting in a plain format"
    if not go_template:
        return lacking
    return f"{lacking}, as Ollama's is in Go's language; {option('chat_template')} takes Jinja2"


def _choose_engine(checkpoint: Checkpoint, options: LoadOptions, notes: list[str]) -> str:
    is_gguf = isinstance(checkpoint, GgufCheckpoint)  # a store may be of kind "gguf"
    if options.engine == "llamacpp":
        if not is_gguf:
            raise OptionError(
                f"the llamacpp engine reads GGUF files only: use {option('engine', 'native')}"
            )
        return "llamacpp"
    try:
        if checkpoint.architecture not in ENCODERS:
            find_architecture(checkpoint.architecture)
        require_readable(checkpoint)
    except UnsupportedModelError as error:
        if options.engine == "native" or not is_gguf:
            raise
        if find_spec("llama_cpp") is None:
            raise MissingExtraError(f"{error}: {install('llamacpp')}") from error
        notes.append(f"engine: llamacpp, because {_reason(checkpoint)}")
        return "llamacpp"
    return "native"


def _reason(checkpoint: Checkpoint) -> str:
    """Say briefly why the native engine cannot run a GGUF file."""
    if checkpoint.architecture not in ARCHITECTURES:
        return f"native does not know {checkpoint.architecture!r}"
    return "native cannot read all of the file's weight types"


def _load_llamacpp(
    checkpoint: Checkpoint, options: LoadOptions, context: LoadContext
) -> tuple[Engine, int]:
    from localrt.engine.llamacpp.engine import LlamaCppEngine  # an extra
    from localrt.engine.llamacpp.model import LlamaCppModel
    from localrt.engine.llamacpp.trial import check_build

    if options.format is not None:
        raise OptionError(
            f"the llamacpp engine computes in the file's own format: leave {option('format')} out"
        )
    if options.kv_format is not None:
        raise OptionError(
            f"the llamacpp engine chooses its own cache: leave {option('kv_format')} out"
        )
    if options.activations is not None:
        raise OptionError(
            f"the llamacpp engine chooses how it computes: leave {option('activations')} out"
        )
    trained = cast("int | None", checkpoint.config.get("max_position_embeddings"))
    ctx = options.ctx or min(int(trained or DEFAULT_CONTEXT), 8192)
    if trained and ctx > int(trained):
        context.notes.append(f"the context of {ctx} tokens is longer than the model's {trained}")
    check_build(context.settings.cache_dir)
    model = LlamaCppModel.load(
        checkpoint.path,
        ctx=ctx,
        threads=options.threads,
        device=options.device,
        gpu_memory=options.gpu_memory,
        progress=context.progress,
    )
    context.notes.extend(model.notes)
    return LlamaCppEngine(model), ctx


def _load_tokenizer(
    checkpoint: Checkpoint, options: LoadOptions, notes: list[str]
) -> tuple[Tokenizer | None, str]:
    """Return the model's tokenizer, or None and the reason."""
    try:
        return load_tokenizer(checkpoint, pre=options.pre_tokenizer, note=notes.append), ""
    except (TokenizerError, UnsupportedModelError) as error:
        return None, str(error)


def check_embeds(path: Path) -> None:
    """Raise ``OptionError`` unless the model at ``path`` was made to embed texts."""
    with closing(open_checkpoint(path)) as checkpoint:
        pooling = _pooling(checkpoint)
        if pooling == "rank" or not (pooling or checkpoint.architecture in ENCODERS):
            raise OptionError(f"{path} is no embedding model: choose one, such as BAAI/bge-m3")


def _pooling(checkpoint: Checkpoint) -> str:
    """Return the pooling in an embedding model's files (sentence-transformers or GGUF names)."""
    if (encoder := read_encoder_config(checkpoint)) is not None and encoder.ranks:
        return "rank"
    if checkpoint.kind == "gguf":
        kinds = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
        named = checkpoint.metadata.get(f"{checkpoint.architecture}.pooling_type")
        return kinds.get(named, "") if isinstance(named, int) else ""
    from localrt.models.tokenizers.base import read_json  # not needed for GGUF

    config = read_json(checkpoint.path / POOLING_NAME)
    modes = {"mean_tokens": "mean", "lasttoken": "last", "cls_token": "cls"}
    chosen = [kind for mode, kind in modes.items() if config.get(f"pooling_mode_{mode}") is True]
    return chosen[0] if len(chosen) == 1 else ""


def _eos_ids(
    tokenizer: Tokenizer | None, generation_config: Mapping[str, object]
) -> frozenset[int]:
    named = generation_config.get("eos_token_id")
    ids = set(tokenizer.eos_ids) if tokenizer is not None else set()
    for value in named if isinstance(named, list) else [named]:
        if isinstance(value, int):
            ids.add(value)
    return frozenset(ids)
