"""A draft head beside its target: found among those that were trained here, checked, and at work.

It opens the target's checkpoint once more for what head and target share, and computes with the
target's own kernels while no pass runs. Options and tuning are the business of ``choice.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.engine.native.engine import NativeEngine
from localrt.engine.native.session import NativeSession
from localrt.errors import LocalrtError, MemoryBudgetError, OptionError
from localrt.formatting import format_bytes
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import ARCHITECTURES, read_config
from localrt.offload.account import draft_head_nbytes
from localrt.option_names import option
from localrt.settings import Settings
from localrt.speculative.draft_head import REMEMBERED, DraftHead, HeadDrafter, target_parts
from localrt.speculative.draft_head_file import HeadConfig, is_head_folder, read_head
from localrt.speculative.tree_source import TreeSource

if TYPE_CHECKING:
    from localrt.engine.options import Options
    from localrt.engine.protocol import EngineSession
    from localrt.loading.options import LoadOptions
    from localrt.loading.parts import LoadedModel
    from localrt.models.config import DecoderConfig
    from localrt.models.tokenizers import Tokenizer

__all__ = [
    "OWN_HEAD",
    "TRAINED",
    "HeadDraft",
    "find_head",
    "is_draft_head",
    "target_identity",
    "with_room_for_head",
]

TRAINED = "heads"
"""Where the heads lie that were trained here, below the settings' data folder."""

OWN_HEAD = "head"
"""What a ``draft`` option says to have the head used that is there for the model."""

_HELD_TOKENS = 4096  # whose hidden states there is room for
_MOST_NODES = 256  # of a tree; larger ones are for drafts that cost more than the head's rows
_ROUND_NODES = 16


def is_draft_head(name: str) -> bool:
    """Whether a ``draft`` option asks for a draft head: by its folder, or for whichever fits."""
    return name == OWN_HEAD or is_head_folder(Path(name))


def with_room_for_head(name: str, options: LoadOptions, settings: Settings) -> LoadOptions:
    """A target's options with room in its RAM budget for the head ``name`` and what it keeps.

    Raises:
        CheckpointError: the head is damaged.
        MemoryBudgetError: it takes all of the budget.
    """
    if options.ram is None:
        return options
    held = REMEMBERED + min(options.ctx or _HELD_TOKENS, _HELD_TOKENS)
    # Which one fits is known when the target is there: until then there is room for the largest.
    heads = _trained(settings) if name == OWN_HEAD else [read_head(Path(name))]
    sizes = (
        draft_head_nbytes(
            head.nbytes, hidden=head.decoder.hidden_size, vocab=len(head.draft_tokens), held=held
        )
        for head in heads
    )
    room = max(sizes, default=0)
    if room >= options.ram:
        raise MemoryBudgetError(
            f"a draft head takes {format_bytes(room)}, and the budget is "
            f"{format_bytes(options.ram)} of RAM: raise {option('ram')}, or "
            f"leave {option('draft')} out"
        )
    return replace(options, ram=options.ram - room)


def _trained(settings: Settings) -> Iterator[HeadConfig]:
    """The heads that were trained here; as nobody named them, what cannot be read is left out."""
    for folder in sorted((settings.data_dir / TRAINED).glob("*")):
        with suppress(LocalrtError):
            yield read_head(folder)


def find_head(target: str, settings: Settings) -> HeadConfig | None:
    """A head for ``target`` among those that were trained here."""
    return next((head for head in _trained(settings) if head.target == target), None)


def target_identity(config: DecoderConfig, tokenizer: Tokenizer | None) -> str:
    """What a head must have been trained on to be of use for a model: its sizes and tokens.

    A head of another model with the same ones guesses worse, which the tuner finds out.
    """
    digest = hashlib.sha256()
    if tokenizer is not None:
        for token in range(tokenizer.vocab_size):
            digest.update(tokenizer.token_text(token).encode("utf-8", "surrogatepass") + b"\0")
    # One name for an architecture, whatever kind of file names it.
    architecture = ARCHITECTURES.get(config.architecture, config.architecture)
    return (
        f"{architecture} of {config.layers} layers, hidden size {config.hidden_size}, "
        f"{config.vocab_size} tokens ({digest.hexdigest()[:16]})"
    )


class HeadDraft:
    """The head ``name``, a folder or ``"head"``, for a loaded ``target``.

    Raises:
        OptionError: there is none, it was trained on another model, or that computes on a card.
        CheckpointError: its file is damaged.
    """

    kind = HeadDrafter.name

    def __init__(self, name: str, target: LoadedModel, engine: NativeEngine) -> None:
        self._engine = engine
        self._checkpoint = open_checkpoint(target.path)
        try:
            config = read_config(self._checkpoint)
            ours = target_identity(config, target.tokenizer)
            own = name == OWN_HEAD
            head = find_head(ours, Settings.from_environment()) if own else read_head(Path(name))
            if head is None:
                raise OptionError(
                    "there is no draft head for this model: localrt draft train makes one"
                )
            sizes = head.decoder.hidden_size, head.decoder.vocab_size
            if (head.target, *sizes) != (ours, config.hidden_size, config.vocab_size):
                raise OptionError(
                    f"draft head {head.path} was trained on another model: {head.target}, not "
                    f"{ours}"
                )
            parts = target_parts(self._checkpoint, config, head.draft_tokens)
            with engine.alone() as ops:
                if ops.name != "native":
                    raise OptionError(
                        f"draft head {head.path} computes on the CPU kernels only: leave "
                        f"{option('draft')} out"
                    )
                self._head = DraftHead(head, parts, ops)
        except BaseException:
            self._checkpoint.close()
            raise
        nbytes = head.nbytes + sum(block.nbytes for block in parts.head)
        self.level_share = min(1.0, 1.5 * nbytes / max(engine.info.weight_bytes, 1))

    def source(self, session: EngineSession, options: Options) -> TreeSource:
        """Guesses for a session, whose hidden states are recorded from now on."""
        assert isinstance(session, NativeSession), "the engine is native"
        nodes = min(options.tree_budget or _MOST_NODES, _MOST_NODES)
        return TreeSource(
            HeadDrafter(self._head, session.record_features(), self._engine.alone),
            capacity=session.capacity + nodes,
            nodes=nodes,
            temperature=options.sampling.temperature,
            round_nodes=_ROUND_NODES,
        )

    def close(self) -> None:
        """Close the target's files."""
        self._checkpoint.close()
