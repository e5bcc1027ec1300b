"""Memory accounting: the bytes of each part of the program, and budgets.

Loading, planner, drafts, budgets and the server use it. It turns shapes, rows and contexts into
bytes; ``offload/memory`` says how much memory there is, ``localrt/planning`` divides it. Estimates
err on the large side: a budget is a hard limit for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.models.config import DecoderConfig
from localrt.models.tensor_source import Checkpoint
from localrt.offload.placement import Placement, Where
from localrt.offload.shapes import ModelShape, PassSizes, aligned
from localrt.quant.ops.attention import LATENT_SCRATCH_NBYTES
from localrt.quant.ops.kv_formats import KvFormat
from localrt.quant.ops.protocol import Ops

PACKED_ROWS = 64
"""The most rows that products with packed weights take at once."""

# -- constants -----------------------------------------------------------------------------------

_PROCESS_NBYTES = 58 << 20  # interpreter, numpy, libraries, the kernels' threads
_VOCABULARY_NBYTES = 100  # per token in the tokenizer: its bytes, merges, hash tables
GROWTH_NBYTES = 2 << 20
"""Growth of a loaded process beyond the accounted parts: sampling, text, threads' stacks."""

KERNEL_SCRATCH_NBYTES = 3 << 20
"""What the native kernels allocate for themselves."""

TORCH_GROWTH_NBYTES = 20 << 20
"""The scratch of torch in passes, without its libraries."""

MARGIN_NBYTES = 3 << 20
"""Reserve of a budget: pages that two parts share, memory that is freed late."""

LOADING_NBYTES = 3 << 20
"""Memory that loading leaves in use; a check before loading must include it."""

SERVER_NBYTES = 4 << 20
"""A server's libraries, body validation, requests, threads and unsent data."""

MEASURING_NBYTES = 68 << 20
"""The measuring process, without the memory that it measures with."""

UNKNOWN_MODEL_NBYTES = 200 << 20
"""Process and conversation, for a model of which only the size is known."""

CUDA_CONTEXT_NBYTES = 400 << 20
"""CUDA's context and kernels' code in GPU memory, before any allocation: the least."""

ROUNDED_VRAM_NBYTES = (128 + 40) << 20
"""Of a real GPU: CUDA rounds each of about 64 allocations up by 2 MB at most; pools have up to 40
MB that nobody uses: nearly a slab of 16 MB of scratch, another of recordings, and ends of others.
"""

SPARE_VRAM_NBYTES = ROUNDED_VRAM_NBYTES + (150 << 20)
"""The same, and what stays free: below 150 MB other programs are given memory back."""

PREFILL_ROWS = 512
"""Rows of a prompt's pass: enough for the matrix units, few enough for progress and memory."""

LONG_PREFILL_ROWS = 2048
"""The same with a GPU: enough rows to compute for as long as the link copies missing weights.
"""

FIRST_CONTEXT = 512
"""Tokens that a first placement has room for; caches take it from the weights as they grow."""

SMALLEST_CONTEXT = 512
"""The smallest context that is chosen automatically."""

_OTHER_SCRATCH_NBYTES = 256 << 20  # of a pass of torch or on a GPU, with its libraries
_RECORDED_PART_NBYTES = 80 << 10  # of a graph, by the driver: about 16 KB for each launch
_RING_SLACK_NBYTES = 6 << 20  # beyond the largest unit: read while that is computed
_KV_BUFFERS = 2  # one for the computing layer, one for the next layer's load
_DRAFT_PASS_NBYTES = 40 << 20  # logits and activations of a draft's round
_CONSTRAINT_NBYTES = 400  # per token, to prepare a tokenizer for grammars; half stays
_CONTEXT_STEP = 256
_TABLES = ("embedding", "norm")  # units that never move: passes read rows of them

# A pass needs enough rows for arithmetic to outweigh reading, within a small part of the budget.
_ROW_CHOICES = (1024, 512, 256, 128, 64, 32)
_ACTIVATION_SHARE = 0.02
_GPU_ACTIVATION_SHARE = 0.07  # share of VRAM and RAM for passes of over 512 rows
_FEWEST_ROWS = 32

Tier = Literal["ram", "vram", "ssd"]


# -- accounts ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """``nbytes`` bytes of ``tier``, used for ``what``."""

    tier: Tier
    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Account:
    """All parts that are not empty."""

    parts: tuple[MemoryPart, ...]

    @classmethod
    def of(cls, parts: Sequence[tuple[Tier, str, int]]) -> Account:
        """An account of ``parts`` without the empty ones."""
        return cls(tuple(MemoryPart(*part) for part in parts if part[2]))

    def total(self, tier: Tier = "ram") -> int:
        """Bytes of one tier."""
        return sum(part.nbytes for part in self.parts if part.tier == tier)

    def nbytes(self, what: str, tier: Tier = "ram") -> int:
        """Bytes of one part; 0 where there is none."""
        return sum(p.nbytes for p in self.parts if (p.tier, p.what) == (tier, what))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes that may be used: ``ram`` by the whole process, ``vram`` of the GPU.

    ``process`` is what the process takes without weights, slots, KV caches and activations (None:
    an estimate); ``cuda_context`` what the driver takes of ``vram`` (None: an estimate; a virtual
    GPU has none); ``scratch`` what kernels allocate for themselves.
    """

    ram: int
    vram: int = 0
    process: int | None = None
    cuda_context: int | None = None
    scratch: int = KERNEL_SCRATCH_NBYTES

    def __post_init__(self) -> None:
        for name in ("ram", "vram", "scratch"):
            if getattr(self, name) < 0:
                raise OptionError(f"{option(name)} must not be negative, is {getattr(self, name)}")

    def less(self, nbytes: int) -> Budgets:
        """These budgets with ``nbytes`` less RAM."""
        return replace(self, ram=max(0, self.ram - nbytes))

    def process_bytes(self, vocab: int) -> int:
        """Bytes of the process without a model."""
        return process_nbytes(vocab) if self.process is None else self.process

    def context_bytes(self) -> int:
        """Bytes that the GPU's driver takes, and that are lost to rounding."""
        if self.vram == 0:
            return 0
        if self.cuda_context is None:
            return CUDA_CONTEXT_NBYTES + ROUNDED_VRAM_NBYTES
        return self.cuda_context


def check_fits(
    account: Account, budget: int, what: str, *, ctx: int | None = None, tier: str = "RAM"
) -> None:
    """Check that the account's RAM fits ``budget`` bytes.

    With ``ctx``, the context length in tokens of the account, the error names one that would fit.
    ``tier`` is what the memory is called.

    Raises:
        MemoryBudgetError: it does not fit; the message gives the numbers and a remedy.
    """
    total = account.total()
    if total <= budget:
        return
    parts = ", ".join(f"{part.what} {format_bytes(part.nbytes)}" for part in account.parts)
    raise MemoryBudgetError(
        f"{what} needs {format_bytes(total)} of {tier} ({parts}) and {format_bytes(budget)} is"
        f" available: {_way_out(account, budget, ctx)}"
    )


def _way_out(account: Account, budget: int, ctx: int | None) -> str:
    kv = account.nbytes("keys and values")
    room = budget - account.total() + kv
    if ctx and kv and room > 0:
        fitting = room * ctx // kv // _CONTEXT_STEP * _CONTEXT_STEP
        if fitting:
            return f"a context of {fitting} tokens fits ({option('ctx', fitting)} instead of {ctx})"
    return "use a smaller model or a smaller format, or give it more memory"


# -- contexts ------------------------------------------------------------------------------------


def shorter_contexts(ctx: int) -> Iterator[int]:
    """Yield ``ctx`` halved again and again, down to ``SMALLEST_CONTEXT``."""
    while ctx > SMALLEST_CONTEXT:
        ctx = max(ctx // 2, SMALLEST_CONTEXT)
        yield ctx


def longest_context(ctx: int, fits: Callable[[int], bool]) -> int:
    """The first of ``ctx`` and ``shorter_contexts`` that fits; if none does, the last of them."""
    if fits(ctx):
        return ctx
    shorter = (each for each in shorter_contexts(ctx) if fits(each))
    return next(shorter, min(ctx, SMALLEST_CONTEXT))


# -- the process and its passes ------------------------------------------------------------------


def process_nbytes(vocab: int) -> int:
    """Estimate the bytes of a new process: interpreter, libraries, tokenizer."""
    return _PROCESS_NBYTES + _VOCABULARY_NBYTES * vocab


def constraint_nbytes(vocab: int) -> int:
    """Bytes that preparing a tokenizer for grammars takes."""
    return _CONSTRAINT_NBYTES * vocab


def logits_nbytes(vocab: int, rows: int) -> int:
    """Logits of ``rows`` rows."""
    return 4 * vocab * rows


def pass_logits_nbytes(vocab: int, rows: int) -> int:
    """Logits of a pass that ``activation_nbytes`` omits: all rows but one, twice, since slices of
    the head are joined by a copy.
    """
    return 2 * logits_nbytes(vocab, max(0, rows - 1))


def activation_nbytes(sizes: PassSizes, rows: int) -> int:
    """Hidden states, queries, codes and the widest MLP of ``rows`` rows; logits of one.

    Codes are int8 beside their float32 values.
    """
    queries = max(2 * 4 * sizes.hidden, sizes.query_nbytes, sizes.mixed_nbytes)
    per_row = 2 * 4 * sizes.hidden + queries + 5 * (sizes.inner + sizes.hidden)
    per_row += 4 * sizes.beside
    # Of a mixture: every row's slots, and the codes of what goes into them.
    per_row += sizes.experts_used * (9 * sizes.hidden + 5 * sizes.expert_inner)
    latents = LATENT_SCRATCH_NBYTES if sizes.query_nbytes else 0
    return rows * per_row + logits_nbytes(sizes.vocab, 2) + latents


def gpu_scratch_nbytes(sizes: PassSizes, rows: int, recorded: int = 0) -> int:
    """GPU memory for passes of at most ``rows`` rows, without weights, keys and values.

    Long passes keep all products. Recorded short passes have memory of their own: the partial
    results of split attention, and the driver's of one shape of passes; or ``recorded``, if
    measuring found more.
    """
    graphs = max(sizes.split_nbytes + sizes.parts * _RECORDED_PART_NBYTES, recorded)
    return activation_nbytes(sizes, rows) + rows * 4 * sizes.inner + graphs


def fitting_rows(sizes: PassSizes, budget: int, most: int) -> int:
    """The most rows of a pass, up to ``most``, whose activations are a small part of ``budget``."""
    for rows in (most, *(choice for choice in _ROW_CHOICES if choice < most)):
        if _row_nbytes(sizes, rows) <= _ACTIVATION_SHARE * budget:
            return rows
    return min(most, _FEWEST_ROWS)


def gpu_rows_choices(sizes: PassSizes, budgets: Budgets, most: int) -> Iterator[int]:
    """Row counts above ``PREFILL_ROWS`` for a prompt's pass with a GPU, largest first."""
    room = _GPU_ACTIVATION_SHARE * min(budgets.ram, budgets.vram)
    for rows in (most, *(choice for choice in _ROW_CHOICES if choice < most)):
        if rows > PREFILL_ROWS and _row_nbytes(sizes, rows) <= room:
            yield rows


def _row_nbytes(sizes: PassSizes, rows: int) -> int:
    return activation_nbytes(sizes, rows) - logits_nbytes(sizes.vocab, 2)


def kv_buffer_nbytes(shape: ModelShape, kv_format: KvFormat, ctx: int) -> int:
    """Bytes of the buffers through which keys and values are read from the SSD."""
    return _KV_BUFFERS * _largest_kv(shape, kv_format, ctx)


def kv_tail_nbytes(shape: ModelShape, kv_format: KvFormat, layers: int) -> int:
    """RAM that a sequence takes for ``layers`` layers with KV caches on the SSD: the blocks being
    written.
    """
    return layers * 2 * _largest_kv(shape, kv_format, 1)


def _largest_kv(shape: ModelShape, kv_format: KvFormat, ctx: int) -> int:
    sizes = shape.kv_nbytes(kv_format, ctx)
    return max(aligned(sizes[layer]) for layer in shape.attending)


# -- models --------------------------------------------------------------------------------------


def weight_nbytes(checkpoint: Checkpoint, ops: Ops) -> int:
    """Bytes of all matrices of a model, as ``ops`` keep them."""
    matrices = [i for i in checkpoint.tensors.values() if len(i.shape) == 2]
    return sum(ops.weight_nbytes((i.shape[0], i.shape[1]), i.format) for i in matrices)


def resident_account(checkpoint: Checkpoint, config: DecoderConfig, ops: Ops, ctx: int) -> Account:
    """Account for a model loaded whole with a context of ``ctx`` tokens, without the process.

    Everything counts as RAM, even if ``ops`` compute on a GPU.
    """
    if ops.name == "native":
        activations = activation_nbytes(PassSizes.of_config(config), PREFILL_ROWS)
        scratch = activations + KERNEL_SCRATCH_NBYTES + GROWTH_NBYTES + MARGIN_NBYTES
    else:
        scratch = _OTHER_SCRATCH_NBYTES
    return Account.of(
        [
            ("ram", "weights", weight_nbytes(checkpoint, ops)),
            ("ram", "keys and values", ops.kv_nbytes(config.memory, ctx)),
            ("ram", "scratch", scratch),
        ]
    )


def placed_account(
    shape: ModelShape,
    budgets: Budgets,
    placement: Placement,
    *,
    ctx: int,
    kv_format: KvFormat,
    sequences: int,
    rows: int,
) -> Account:
    """Account for a model under a placement, with ``sequences`` caches for ``ctx`` tokens each;
    ``rows`` is the most rows of a pass.
    """
    weights = dict.fromkeys(Where, 0)
    for unit in shape.split(placement.split).units:
        where = placement.where[unit.name]
        weights[where] += unit.nbytes + (unit.unpacked if where is Where.VRAM else 0)
    caches = {"ram": 0, "vram": 0, "ssd": 0}
    for place, size in zip(placement.kv, shape.kv_nbytes(kv_format, ctx), strict=True):
        caches[place] += sequences * size
    on_ssd = placement.kv.count("ssd")
    caches["ram"] += sequences * kv_tail_nbytes(shape, kv_format, on_ssd)
    buffer = kv_buffer_nbytes(shape, kv_format, ctx) if on_ssd else 0
    activations = activation_nbytes(shape.sizes, rows)
    parts: list[tuple[Tier, str, int]] = [
        ("ram", "process", budgets.process_bytes(shape.sizes.vocab)),
        ("ram", "kernels' scratch", budgets.scratch),
        ("ram", "activations", activations),
        ("ram", "weights", weights[Where.RAM] + weights[Where.LINK]),
        ("ram", "keys and values", caches["ram"]),
        ("ram", "ring for reads", placement.ram_ring),
        ("ram", "buffer for keys and values", buffer),
        ("ssd", "weights", weights[Where.SSD] + weights[Where.SSD_LINK]),
        ("ssd", "keys and values", caches["ssd"]),
    ]
    if placement.uses_gpu:
        parts += [
            ("vram", "driver's context", budgets.context_bytes()),
            ("vram", "activations", gpu_scratch_nbytes(shape.sizes, rows)),
            ("vram", "weights", weights[Where.VRAM]),
            ("vram", "keys and values", caches["vram"]),
            ("vram", "ring for copies", placement.vram_ring),
        ]
    return Account.of(parts)


def growing_ring_nbytes(largest: int) -> int:
    """Bytes of a ring for units of up to ``largest`` bytes, for weights evicted later."""
    return largest + _RING_SLACK_NBYTES


def ring_for_all_nbytes(shape: ModelShape) -> int:
    """Bytes of a ring for every streamable unit, where none is streamed yet."""
    return growing_ring_nbytes(max(u.nbytes for u in shape.units if u.kind not in _TABLES))


def unstreamable_nbytes(shape: ModelShape, placement: Placement) -> int:
    """Bytes of RAM for weights that cannot be evicted, beyond the planned ring.

    An existing ring grows until every unit fits through it.
    """
    units = shape.split(placement.split).units
    in_ram = [u for u in units if placement.where[u.name] in (Where.RAM, Where.LINK)]
    stays = sum(u.nbytes for u in in_ram if u.kind in _TABLES or not placement.ram_ring)
    largest = max((u.nbytes for u in in_ram if u.kind not in _TABLES), default=0)
    if largest > placement.ram_ring > 0:
        stays += growing_ring_nbytes(largest) - placement.ram_ring
    return stays


def unstreamable_gpu_nbytes(shape: ModelShape, placement: Placement) -> int:
    """Bytes of weights on the GPU that cannot be evicted. Experts do not count."""
    limit = min(placement.ram_ring, placement.vram_ring)
    units = shape.split(placement.split).units
    on_gpu = [u for u in units if placement.where[u.name] is Where.VRAM]
    return sum(u.nbytes for u in on_gpu if u.kind != "expert" and u.nbytes > limit)


# -- drafts --------------------------------------------------------------------------------------


def draft_nbytes(shape: ModelShape, ctx: int, kv_format: KvFormat = "bf16") -> int:
    """Bytes of a resident draft model, its KV cache of ``ctx`` tokens, and its activations."""
    kv = sum(shape.kv_nbytes(kv_format, ctx))
    return shape.nbytes + kv + activation_nbytes(shape.sizes, PREFILL_ROWS)


def draft_growth_nbytes(kv: int) -> int:
    """Bytes by which a loaded draft still grows: its cache of ``kv`` bytes, and its passes."""
    return kv + _DRAFT_PASS_NBYTES
