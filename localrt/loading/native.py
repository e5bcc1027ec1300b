"""Loads a model on the native engine: chooses device and context, checks memory, places weights.

A model that fits is loaded whole; others are streamed (``placing.py``). Memory is checked before
any weight is read.
"""

from __future__ import annotations

from math import prod

from localrt.common.cores import giving_way
from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.common.settings import DEFAULT_CONTEXT
from localrt.engine.encoder import EncoderEngine
from localrt.engine.native.engine import NativeEngine
from localrt.engine.native.meters import resident_forecast
from localrt.engine.protocol import Engine, EngineInfo
from localrt.loading.context import LoadContext
from localrt.loading.first_passes import run_first_passes
from localrt.loading.format_names import most_used_format
from localrt.loading.options import LoadOptions, pick_context
from localrt.models.checkpoints import Checkpoint
from localrt.models.config import DecoderConfig
from localrt.models.encoders import EncoderConfig, TextEncoder
from localrt.models.registry import load_decoder, read_config, read_encoder_config
from localrt.models.weights import WeightLoader
from localrt.offload.account import PREFILL_ROWS, check_fits, resident_account, weight_nbytes
from localrt.offload.memory import current_rss, memory_state, ram_budget
from localrt.quant.choose import make_ops, vision_steps, why_not_our_kernels
from localrt.quant.cpu.abi import find_library
from localrt.quant.ops.protocol import Ops
from localrt.system import return_free_memory

_USUAL_CONTEXT = 8192  # of an encoder, whose memory is reserved for its longest text


def load_native(
    checkpoint: Checkpoint, options: LoadOptions, context: LoadContext
) -> tuple[Engine, int]:
    """Load the model; return its engine and context length.

    Raises:
        MemoryBudgetError: the model does not fit even when streamed; the message has the numbers.
    """
    if not options.gentle:
        return _load(checkpoint, options, context)
    thread = giving_way("localrt-gentle")
    try:
        # The kernels' threads are started there too.
        engine, ctx = thread.submit(_load, checkpoint, options, context).result()
    except BaseException:
        thread.shutdown(wait=False)
        raise
    engine.pass_on(thread)
    return engine, ctx


def _load(
    checkpoint: Checkpoint, options: LoadOptions, context: LoadContext
) -> tuple[NativeEngine | EncoderEngine, int]:
    config = read_encoder_config(checkpoint) or read_config(checkpoint, context=options.ctx)
    encodes = isinstance(config, EncoderConfig)
    if encodes and options.device.startswith("cuda"):
        raise OptionError(f"an encoder computes on the CPU: use {option('device', 'cpu')}")
    ops = make_ops(
        config.memory,
        device="cpu" if encodes else options.device,
        compute_format=options.format,
        kv_format=options.kv_format,
        activations=options.activations,
        threads=options.threads,
    )
    if options.format is None and not encodes:
        why = why_not_our_kernels(ops, config.memory, options.device)
        context.notes.extend([why] if why else [])

    def describe(config: DecoderConfig | EncoderConfig, streamed: bool) -> EngineInfo:
        return EngineInfo(
            engine="native",
            architecture=config.architecture,
            device=ops.device,
            format=_format_name(checkpoint, ops),
            parameters=sum(prod(i.shape) for i in checkpoint.tensors.values()),
            layers=len(config.layers) if isinstance(config, EncoderConfig) else config.layers,
            vocab_size=config.vocab_size,
            weight_bytes=weight_nbytes(checkpoint, ops),
            context_length=config.context_length,
            exactness="bit-exact" if ops.compute_format == "f32" else "approximate",
            streamed=streamed,
        )

    if isinstance(config, EncoderConfig):
        ctx = options.ctx or min(config.context_length, _USUAL_CONTEXT)
        if ctx > (most := config.context_length):
            raise OptionError(f"{option('ctx', ctx)} is more than the model's {most} positions")
        info = describe(config, streamed=False)
        check_left(info.weight_bytes + config.scratch_nbytes(max(PREFILL_ROWS, ctx)), ops, options)
        weights = WeightLoader(checkpoint, ops, context.byte_counter(info.weight_bytes))
        encoder = TextEncoder.load(config, weights)
        weights.finish()
        return EncoderEngine(encoder, vision_steps(ops), info), ctx
    if _must_stream(checkpoint, config, ops, options):
        # This imports the planner, which a resident model does not need.
        from localrt.loading.placing import load_placed

        return load_placed(checkpoint, ops, options, context, describe)
    ctx = _fit_context(checkpoint, config, ops, options, context.notes)
    if options.ctx != ctx:
        config = read_config(checkpoint, context=ctx)
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    forecast = resident_forecast(
        checkpoint, config, ops, rss=current_rss(), budget=ram_budget(options.ram)
    )
    decoder = load_decoder(checkpoint, ops, config, on_bytes=context.byte_counter(total))
    run_first_passes(decoder, context, most=PREFILL_ROWS)
    return_free_memory()  # left over from reading
    return NativeEngine(decoder, describe(config, streamed=False), ram=forecast), ctx


def _must_stream(
    checkpoint: Checkpoint, config: DecoderConfig, ops: Ops, options: LoadOptions
) -> bool:
    """Whether streaming is possible, and needed: weights and a useful context exceed the budget, or
    the weights must be able to leave memory later.
    """
    if ops.name not in ("native", "cuda") or not find_library():
        return False
    if options.shrinkable and (ops.name == "cuda" or not any(config.mixtures)):
        return True
    budget, _ = memory_left(ops, options)
    ctx = options.ctx or min(config.context_length, DEFAULT_CONTEXT)
    return resident_account(checkpoint, config, ops, ctx).total() > budget


def _fit_context(
    checkpoint: Checkpoint, config: DecoderConfig, ops: Ops, options: LoadOptions, notes: list[str]
) -> int:
    """Return the context: the requested one, or the longest up to the model's own that fits.

    Raises:
        MemoryBudgetError: the weights, or an explicitly requested context, do not fit.
    """
    budget, tier = memory_left(ops, options)
    account = resident_account(checkpoint, config, ops, 0)

    def fits(tokens: int) -> bool:
        return account.total() + ops.kv_nbytes(config.memory, tokens) <= budget

    ctx = pick_context(options.ctx, config.context_length, fits, notes)
    account = resident_account(checkpoint, config, ops, ctx)
    check_fits(account, budget, checkpoint.path.name, ctx=ctx, tier=tier)
    return ctx


def check_left(nbytes: int, ops: Ops, options: LoadOptions | Engine) -> None:
    """Raise MemoryBudgetError if a model's ``nbytes`` are not left of the budget."""
    left, tier = memory_left(ops, options)
    if nbytes > left:
        raise MemoryBudgetError(
            f"it needs {format_bytes(nbytes)} and {format_bytes(max(left, 0))} of {tier} are left"
        )


def memory_left(ops: Ops, options: LoadOptions | Engine) -> tuple[int, str]:
    """Return the bytes left of the budget where ``ops`` compute, and that memory's name.

    ``options`` have the budget: those of ``load``, or a loaded model's.
    """
    free = ops.free_memory()
    if free is not None:
        return min(free, options.gpu_memory or free), "GPU memory"
    if ops.name == "native":
        # The budget is for the whole process, so subtract what it uses already.
        return ram_budget(options.ram) - current_rss(), "RAM"
    available = memory_state().available
    return min(available, options.ram or available), "RAM"


def _format_name(checkpoint: Checkpoint, ops: Ops) -> str:
    """Return the format that most weights are computed in."""
    if ops.compute_format != "packed":
        return ops.compute_format
    return most_used_format(checkpoint) or "packed"
