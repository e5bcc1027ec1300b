"""A draft head of a loaded model: an MTP block in the model's files, or a separate head.

A head reads features of the model's tokens, which sessions record once a head is loaded, and
computes with the model's ``Ops`` between the model's passes. It shares the embedding and the output
matrix; an assistant also shares keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from copy import copy
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from localrt.common.errors import (
    LocalrtError,
    MemoryBudgetError,
    OptionError,
    UnsupportedModelError,
)
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.drafts.heads.assistant import AssistantBlock
from localrt.drafts.heads.dflash import BlockDecoder, BlockSource
from localrt.drafts.heads.files import open_head
from localrt.drafts.heads.load import Shared, head_nbytes, load_head, output_rows, read_head_config
from localrt.engine.native.engine import NativeEngine
from localrt.engine.native.session import FEATURE_NBYTES, NativeSession
from localrt.engine.options import Options
from localrt.engine.protocol import EngineSession
from localrt.loading.load import LoadedModel
from localrt.loading.native import check_left
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import FinalNorm
from localrt.offload.account import FIRST_CONTEXT, draft_growth_nbytes
from localrt.offload.kv.cache import SsdKVCache
from localrt.offload.pipeline.caches import SplitCache
from localrt.quant.cpu.kv import NativeKVCache
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import AFTER_LAST, CARRIED, Features
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.protocol import Batch, Forward, Span, implementation
from localrt.speculative.ngram import common_length
from localrt.speculative.source import MOST_NODES, Check, Drafter, DraftSource, Rows, Step
from localrt.speculative.tree_source import TreeSource

OUTPUT_ROWS = 1 << 16
"""Rows of the output matrix that a head keeps in memory if the model streams it. A vocabulary lists
frequent tokens first: of Qwen's 151,936, these make up 98 % of English text and code.
"""


class TargetKeys(NativeKVCache):
    """The ``places`` of a target's ``cache`` in several memories, for an assistant. Those on a GPU
    are copied to RAM, each token once. ``UnsupportedModelError``: some cannot be read.
    """

    def __init__(
        self, cache: SplitCache | SsdKVCache, engine: NativeEngine, places: Sequence[int]
    ) -> None:
        kv_format = implementation(engine.weights.ops, NativeOps).kv_format
        self._cache, self._tokens = cache, list[int]()
        self._parts: dict[int, tuple[Any, int]] = {place: cache.part(place) for place in places}
        parts = self._parts.items()
        self._copied = [n for n, (own, _) in parts if not isinstance(own, NativeKVCache)]
        if any(own is None for _, (own, _) in parts) or (self._copied and kv_format == "int4"):
            other = f"use a smaller {option('ctx')}, or {option('kv_format', 'int8')}"
            raise UnsupportedModelError(f"it reads no keys of the SSD or of a GPU in int4: {other}")
        specs = [engine.weights.config.attending[place] for place in self._copied]
        shapes = [(spec.cached_heads, spec.head_dim) for spec in specs]
        super().__init__(shapes, cache.capacity, kv_format)

    def follow(self, tokens: Sequence[int]) -> None:
        """Hold ``tokens``, which the target's cache holds."""
        known = self._tokens if self.mix == self._cache.mix else []
        first = self.trim(common_length(known, tokens))
        self.mix, self._tokens = self._cache.mix, list(tokens[:first])
        self.reserve(len(tokens))
        starts = range(first - first % BLOCK_TOKENS, len(tokens), BLOCK_TOKENS)
        for layer, (cache, at) in enumerate(map(self._parts.__getitem__, self._copied)):
            for start, part in zip(starts, cache.parts(at, first // BLOCK_TOKENS), strict=False):
                new = slice(max(0, first - start), len(tokens) - start)
                self.put_rows(layer, start + new.start, *(own[:, new].bits() for own in part))
        self.advance(len(tokens) - first)
        self._tokens = list(tokens)

    def layer_ready(self, layer: int) -> tuple[int, int]:
        if layer in self._copied:
            return super().layer_ready(self._copied.index(layer))
        cache, place = self._parts[layer]
        return cast(NativeKVCache, cache).layer_ready(place)


class HeadDrafter(Drafter):
    """A head for one session.

    The row of a token reads the features of the previous token. Rows of draft tokens are temporary,
    since they read the head's own output instead.
    """

    name = "head"
    lasting = False

    def __init__(self, head: HeadDraft, session: NativeSession) -> None:
        self.tokens = head.config.tokens
        self._head = head
        self._session = session
        self._features = session.record_features(head.config.layers)
        self._target_cache = head.readable(session.cache)
        self._length = 0  # number of tokens before the last known one
        self._outputs: list[Floats] = []  # outputs of the last known token and of each draft token

    def cache(self, capacity: int) -> KVCache:
        with self._head.engine.alone():
            return self._head.decoder.cache(capacity)

    def first(self, length: int) -> int | None:
        first = self._features.first + 1
        if not first < length <= self._features.length + 1:
            return None
        return length - 1 if self._head.config.places else first

    @property
    def weights(self) -> HeadDraft:
        return self._head

    def compute(self, cache: KVCache, rows: Rows, *, check: Check | None) -> Floats:
        (logits,) = self.compute_together([Step(self, cache, rows)], check=check)
        return logits

    def compute_together(self, steps: Sequence[Step], *, check: Check | None) -> list[Floats]:
        head, all_rows = self._head, [step.rows for step in steps]
        drafters = [cast(HeadDrafter, step.drafter) for step in steps]  # with the same weights
        ends = list(accumulate(len(rows.tokens) for rows in all_rows))
        each = list(zip(drafters, all_rows, ends, strict=True))
        features = np.concatenate([drafter._features_of(rows) for drafter, rows, _ in each])
        wanted = [row for _, rows, end in each for row in range(end - rows.wanted, end)]
        layer = CARRIED if head.config.places else AFTER_LAST
        own = Features((layer,), np.empty((ends[-1], head.engine.hidden_size), np.float32))
        with head.engine.alone():
            places = [drafter._place(step) for drafter, step in zip(drafters, steps, strict=True)]
            tokens = np.concatenate([np.array(rows.tokens, np.int64) for rows in all_rows])
            positions, spans = (list(chain(*parts)) for parts in zip(*places, strict=True))
            batch = Batch(tokens, np.array(positions, np.int64), tuple(spans))
            logits = head.forward(
                batch, rows=wanted, check=check, features=own, target_features=features
            )
        outputs, results, first = head.normed_output(own.rows), list[Floats](), 0
        for drafter, rows, end in each:
            drafter._keep(rows, outputs[end - len(rows.tokens) : end])
            results.append(logits[first : first + rows.wanted])
            first += rows.wanted
        return results

    def _features_of(self, rows: Rows) -> Floats:
        """Return the inputs of ``rows``: the target's features of the previous tokens, or the
        head's own output.
        """
        if rows.above is not None:
            return np.array([self._outputs[1 + row] for row in rows.above])
        start = int(rows.positions[0]) - 1
        return self._head.normed_features(self._features.get(start, start + len(rows.tokens)))

    def _keep(self, rows: Rows, outputs: Floats) -> None:
        """Save the ``outputs`` of ``rows`` for later rows."""
        if rows.above is None:
            self._outputs = [outputs[-1]]
        else:
            self._outputs += list(outputs)

    def _place(self, step: Step) -> tuple[npt.NDArray[np.int64], list[Span]]:
        """Return positions and spans of a step's rows.

        An assistant's rows have the position of the last known token and attend to the target's
        cache before it. Since a pass appends rows to a cache, they replace the cache's last rows.
        """
        rows, count = step.rows, len(step.rows.tokens)
        if not self._head.config.places:
            return rows.positions, [Span(step.cache, count, rows.mask)]
        step.cache.reserve(step.cache.length + count)
        step.cache.advance(count)  # only counts rows
        cache = self._target_cache
        if rows.above is None:
            self._length = int(rows.positions[-1])
            if isinstance(cache, TargetKeys):
                cache.follow(self._session.tokens[: self._length])
        spans, length = [], self._length
        for first in range(0, count, length):
            most = min(length, count - first)
            view = copy(cache)
            view.mix = ()
            view.trim(length - most)
            spans.append(Span(view, most, np.ones((most, most), np.bool_)))
        return np.full(count, length), spans


class HeadDraft:
    """The head at ``path``, loaded for ``target``; None is the MTP block in the target's files.

    Raises:
        OptionError: it cannot draft for this model.
        MemoryBudgetError: it does not fit in memory along with the model.
        CheckpointError: it cannot be read.
    """

    kind = "head"

    def __init__(self, target: LoadedModel, path: Path | None = None) -> None:
        engine = target.engine
        assert isinstance(engine, NativeEngine), "it was checked"
        self.engine = engine
        weights, name = engine.weights, (path or target.path).name
        with ExitStack() as opened:
            checkpoint = opened.enter_context(closing(open_head(path or target.path)))
            try:
                config = self.config = read_head_config(checkpoint, weights.config)
                keys = self.readable(weights.cache(1)) if self.config.places else None
            except UnsupportedModelError as error:
                raise OptionError(f"draft {name} does not fit this model: {error}") from error
            self.nbytes = head_nbytes(checkpoint, weights.ops)
            output, load_output = weights.output_matrix, None
            if config.tokens is not None or config.output in checkpoint.tensors:
                output = None
            elif output is None:  # the output matrix is streamed
                model = opened.enter_context(closing(open_checkpoint(target.path)))
                count = min(OUTPUT_ROWS, weights.config.vocab_size)
                nbytes, load_output = output_rows(model, weights.config, weights.ops, count)
                self.nbytes += nbytes
                decoder = replace(config.decoder, vocab_size=count)
                self.config = replace(config, decoder=decoder, tokens=np.arange(count))
            length = min(target.ctx, FIRST_CONTEXT)
            kv = draft_growth_nbytes(weights.ops.kv_nbytes(self.config.decoder.memory, length))
            if isinstance(keys, TargetKeys):
                kv += keys.block_bytes * -(-length // BLOCK_TOKENS)
            row = 4 * len(self.config.layers) * engine.hidden_size
            self._reserve(self.nbytes + kv + min(row * target.ctx, FEATURE_NBYTES))
            try:
                with engine.alone() as ops:
                    output = output if load_output is None else load_output()
                    shared = Shared(weights.embedding_part, output)
                    self.decoder = load_head(checkpoint, self.config, ops, shared)
            except BaseException:
                engine.take_ram(-self._reserved)
                raise
        experts = self.decoder.weights.experts
        graphed = weights.ops.name == "cuda" and all(each.capturable for each in experts)
        # The host computes a part of an assistant's steps.
        graphed = graphed and not isinstance(self.config.decoder.block, AssistantBlock)
        plain: Forward = self.decoder.forward
        self.forward = weights.ops.graphed(plain) if graphed else plain
        self._target_norm = FinalNorm(engine.decoder) if self.config.normed else None
        self._own_norm = FinalNorm(self.decoder) if self.config.own_normed else None
        self.level_share = min(1.0, 1.5 * self.nbytes / max(engine.info.weight_bytes, 1))
        self.at_once = self.config.block > 0

    def _reserve(self, nbytes: int) -> None:
        """Reserve memory in addition to the model's."""
        weights = self.engine.weights
        if not weights.memory.streams:
            check_left(nbytes, weights.ops, self.engine)
        self._reserved = nbytes if weights.ops.free_memory() is None else 0
        try:
            self.engine.take_ram(self._reserved)
        except MemoryBudgetError as error:
            raise MemoryBudgetError(
                f"it needs {format_bytes(nbytes)} of RAM beside what cannot be streamed, which is "
                "not left"
            ) from error

    def source(self, session: EngineSession, options: Options) -> DraftSource:
        assert isinstance(session, NativeSession), "sessions belong to one engine"
        capacity, temperature = session.capacity, options.sampling.temperature
        if isinstance(decoder := self.decoder, BlockDecoder):
            capacity += self.config.block
            return BlockSource(self.engine, self.config, decoder, session, capacity, temperature)
        return TreeSource(
            HeadDrafter(self, session),
            capacity=capacity + (options.tree_budget or MOST_NODES),
            temperature=temperature,
        )

    def readable(self, cache: KVCache) -> KVCache:
        """The target's ``cache``, as an assistant reads it."""
        if not self.config.places or not isinstance(cache, SplitCache | SsdKVCache):
            return cache
        return TargetKeys(cache, self.engine, self.config.places)

    def normed_features(self, rows: Floats) -> Floats:
        """Return the target's features normalized as the head expects them."""
        return self._target_norm(rows) if self._target_norm else rows

    def normed_output(self, rows: Floats) -> Floats:
        """Return the head's output normalized as its input for the next draft token."""
        return self._own_norm(rows) if self._own_norm else rows

    def close(self) -> None:
        """Free the head and its CUDA graphs."""
        self.forward = self.decoder.forward
        self.decoder.close()
        with suppress(LocalrtError):  # the model may already be closed
            self.engine.take_ram(-self._reserved)
