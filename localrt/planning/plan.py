"""``localrt.plan``: where a model would live and how fast it would be, before anything is loaded.

It reads a model's shape, not its weights; ``localrt.offload.planner`` makes the plan. A model that
is not on this machine is planned for the file that would be downloaded. The plan also compares
other sizes of the weights: speeds are estimated, losses are those that ``localrt quantize --bits``
measured.
"""

from __future__ import annotations

import shlex
import timeit
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from localrt.common.errors import HubError, LocalrtError, OptionError, known_arguments
from localrt.common.option_names import on_command_line, option
from localrt.common.settings import DEFAULT_CONTEXT, Settings
from localrt.common.speeds import known_speed
from localrt.drafts.offers import own_draft
from localrt.hub import resolve
from localrt.hub.known_models import repo_thinks
from localrt.hub.names import HubRef, looks_like_path
from localrt.hub.resolving import Offer, ResolvedModel, offer_of
from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.models.vision.cost import SIDE, picture_cost
from localrt.offload.planner import ModelShape, Plan, PlanRequest, make_plan
from localrt.offload.planner.advice import (
    LEAST_GAIN,
    helpful_changes,
    in_bits,
    largest_contexts,
    layer_bits,
)
from localrt.offload.planner.pc import Hardware, planned_hardware
from localrt.offload.planner.plan import Change, PlannedPicture, PlannedPlace, PlannedSize
from localrt.offload.planner.predict import estimate
from localrt.offload.planner.verdict import Expected
from localrt.offload.store.pack import fingerprint
from localrt.planning.models import find_model, has_weights, hub_ref, known_model_of, shape_of
from localrt.planning.recommending import (
    FILE,
    as_published,
    only,
    other_files,
    recommend_on,
    sized,
    usual_offer,
)
from localrt.quant.cpu.abi import find_library
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.vision import NativeVision
from localrt.quant.formats import FORMATS, pack
from localrt.quant.ops.kv_formats import KvFormat, parse_kv_format
from localrt.quantize.mix import MIX_FORMATS, LossTable, known_losses

_LEAST_BITS = 2.7  # all matrices in the smallest format
_USUAL_BITS = 4.5
_MANY_ROWS = 512  # a tower's products have


@known_arguments
def plan(
    model: str | Path,
    *,
    ctx: int | None = None,
    format: str | None = None,
    kv_format: KvFormat = "bf16",
    batch: int = 1,
    kv_on_ssd: bool = False,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    gpu: str | None = None,
    link: str | None = None,
    ssd: str | None = None,
    pc: str | None = None,
    ram_speed: str | None = None,
    cores: int | None = None,
    advise: bool = True,
    remeasure: bool = False,
    revision: str | None = None,
    offline: bool | None = None,
) -> Plan:
    """Plan ``model`` for this machine, or for one that is described.

    Nothing is loaded; only the config of a hub model that is not on this machine is downloaded. A
    machine that was never measured is measured first, which takes seconds: call it from a thread.

    Args:
        model: as ``load`` takes it, or a ``config.json`` (or its folder) without weights.
        ctx: context in tokens; None is 4096, or the model's own if that is less.
        format: plan as if packed in this format, such as ``"int4-g32"``.
        kv_format: how keys and values are kept.
        batch: sequences at once.
        kv_on_ssd: let keys and values that do not fit be read from the disk.
        ram, gpu_memory: sizes to use, such as ``"32GB"``; None: what this machine has.
        gpu: a GPU by name, or ``virtual:8GB@12GB/s,...``.
        link, ssd: rates such as ``"12GB/s"``.
        pc: a whole PC, ``"RTX 4060, 32GB DDR5-5600, 8 cores, NVMe"`` or a preset's name such as
            ``"gaming-pc"``, instead of this machine; missing parts are assumed typical.
        ram_speed: the RAM's speed, ``"DDR5-5600"`` or a rate such as ``"60GB/s"``.
        cores: the number of processor cores.
        advise: plan variations too, to say what would help and how smaller weights compare; takes
            about twice as long in all.
        remeasure: measure this machine again.
        revision: branch, tag or commit of a hub model.
        offline: never use the network; None follows the environment.

    Raises:
        MemoryBudgetError: it does not fit even when streamed; the message says what would fit.
        LocalrtError: no such model, or an option that cannot be used.
    """
    for name, value in (("ctx", 1 if ctx is None else ctx), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{option(name)} must be an integer of at least 1, is {value!r}")
    kv_format = parse_kv_format(kv_format)
    settings, name = Settings.from_environment(), str(model)
    wanted = Hardware(
        ram=ram,
        gpu_memory=gpu_memory,
        gpu=gpu,
        link=link,
        ssd=ssd,
        pc=pc,
        ram_speed=ram_speed,
        cores=cores,
    )
    path = find_model(name, settings, revision=revision, offline=offline, any_file=True)
    ref = hub_ref(name, settings)
    shape = shape_of(path, format)
    machine, budgets, note = planned_hardware(
        wanted, settings, path=path, formats=_formats(shape), remeasure=remeasure
    )
    offer = None if format is not None else _offer(ref, path, settings, offline)
    file = ""
    if offer is not None:
        named = ref and ref.variant
        candidates = only(offer, named) if named else offer
        chosen = recommend_on(candidates, machine, budgets, ctx=ctx)
        file, why = chosen.name, f"of its files {chosen.name} is planned: {chosen.reason}"
        if named:
            why = f"{named} was not looked up on the hub: its size is an estimate"
        if as_published(candidates):
            shape = replace(shape, notes=(*shape.notes, *((why,) if named else ())))
        else:
            shape = replace(sized(shape, file, candidates.sizes[file]), notes=(why,))
            # The processor's rates depend on the file's format.
            machine, budgets, note = planned_hardware(
                wanted, settings, path=path, formats=_formats(shape)
            )
    if ctx is not None and ctx > shape.context_length:
        note = (
            f"the context of {ctx} tokens is longer than the {shape.context_length} that "
            f"the model has: answers may degrade{f'. {note}' if note else ''}"
        )
    found = make_plan(
        PlanRequest(
            shape=shape,
            machine=machine,
            budgets=budgets,
            ctx=ctx or min(DEFAULT_CONTEXT, shape.context_length),
            sequences=batch,
            kv_format=kv_format,
            kv_on_ssd=kv_on_ssd,
            called="" if looks_like_path(name) else name,
            thinks=repo_thinks(name) or (ref is not None and repo_thinks(ref.repo)),
            quantization=file,
            hypothetical=wanted.hypothetical,
            note=note,
        )
    )
    if not found.hypothetical:
        found = replace(found, measured_tok_s=known_speed(settings.data_dir, path.name))
    if has_weights(path):
        resolved = resolve(name, settings=settings, revision=revision, download=False)
        found = _with_picture(_with_draft(found, path, settings), resolved)
    if advise:
        found = _advised(found, path, settings, offer, file, resized=format is not None)
    if not has_weights(path) and looks_like_path(name):
        return found  # there is nothing to run
    # The ``load`` options of the plan; those that describe another PC are left out.
    given = {
        "ctx": ctx,
        "kv_format": None if kv_format == "bf16" else kv_format,
        "ram": None if found.hypothetical else ram,
        "gpu_memory": None if found.hypothetical else gpu_memory,
    }
    options = {each: value for each, value in given.items() if value is not None}
    return _with_commands(found, name, options, weights=has_weights(path))


def _with_draft(plan: Plan, path: Path, settings: Settings) -> Plan:
    """Add what drafts for the model: ``auto`` does so on the CPU, and with streamed weights too
    with a head or a small model of its family.
    """
    draft = own_draft(path, settings, streamed=not plan.fits)
    if draft is None:
        return plan
    if plan.placement.uses_gpu:
        line = f"{draft.line}, on a GPU only if you name it as the draft ({draft.name})"
        return replace(plan, notes=(*plan.notes, line))
    return replace(plan, notes=(*plan.notes, draft.line), draft=draft.name)


def _with_picture(plan: Plan, found: ResolvedModel) -> Plan:
    """Add what a picture costs: its tower's passes, and its tokens like any others."""
    try:
        cost = picture_cost(found.path, () if found.extras is None else found.extras.projectors)
    except LocalrtError as error:
        return replace(plan, notes=(*plan.notes, f"pictures are refused: {error}"))
    if cost is None:
        return plan
    machine, on_gpu = plan.request.machine, False
    if plan.placement.uses_gpu and (gpu := machine.gpu) is not None and machine.link_bytes_s:
        on_gpu = True
        tower = 2 * cost.products / (gpu.attention_flops or gpu.flops)
        tower += cost.tower_bytes / machine.link_bytes_s  # which weights cross for each picture
    else:
        rate = machine.kernel("f16").at(_MANY_ROWS) / _MANY_ROWS
        tower = cost.products * rate * _tower_slowness()
    seconds = tower + cost.tokens / plan.prefill_tok_s
    picture = PlannedPicture(SIDE, cost.tokens, seconds, cost.room_bytes, on_gpu=on_gpu)
    return replace(plan, picture=picture)


@cache
def _tower_slowness() -> float:
    """The time of a tower's products, of that of a decoder's with the same weights: measured, as
    it depends on the instruction set.
    """
    if find_library() is None:
        return 1.0
    ops, shape = NativeOps(), (1024, 1024)
    weight = ops.weight(shape, [pack(np.full(shape, 0.01, np.float32), FORMATS["f16"], name="w")])
    x, out = np.ones((_MANY_ROWS, 1024), np.float32), np.empty((_MANY_ROWS, 1024), np.float32)
    tower = NativeVision(ops)
    as_tower, as_decoder = (
        min(timeit.repeat(call, number=1, repeat=9))
        for call in (lambda: tower.linear(x, weight), lambda: ops.linear(x, weight, out))
    )
    return as_tower / as_decoder


def _advised(
    plan: Plan, path: Path, settings: Settings, offer: Offer | None, file: str, *, resized: bool
) -> Plan:
    """Add what would help. ``file`` is the one chosen of ``offer``; ``resized``: a given format."""
    changes, sizes = helpful_changes(plan), tuple[PlannedSize, ...]()
    if offer is not None:
        changes += other_files(offer, file, plan.request, plan.tok_s)
    elif not resized:
        sizes = other_sizes(plan, path, settings)
    changes = tuple(sorted(changes, key=lambda each: -each.gain))
    return replace(plan, changes=changes, sizes=sizes, contexts=largest_contexts(plan))


def _with_commands(plan: Plan, name: str, options: Mapping[str, object], *, weights: bool) -> Plan:
    """Add the commands that run ``name`` with these options, and that make each change.

    Without ``weights`` on this machine, changes of format are dropped: nothing can be quantized.
    """
    changes = plan.changes
    if plan.sizes or not weights:  # sizes in bits, or other files, replace changes of format
        changes = tuple(each for each in changes if (each.option or ("",))[0] != "format")
    return replace(
        plan,
        command=typed("chat", name, options),
        changes=tuple(replace(each, command=_command_of(each, name, options)) for each in changes),
        contexts=tuple(
            replace(each, command=typed("chat", name, {**options, "ctx": each.tokens}))
            for each in plan.contexts
        ),
        sizes=tuple(
            replace(each, command=typed("quantize", name, {"bits": f"{each.bits:.1f}"}))
            for each in plan.sizes
        ),
    )


def typed(command: str, model: str, options: Mapping[str, object]) -> str:
    """Return a command line such as ``"localrt chat model.gguf --ctx 8192"``."""
    words = ["localrt", command, shlex.quote(model)]
    return " ".join(words + [on_command_line(name, value) for name, value in options.items()])


def _command_of(change: Change, model: str, options: Mapping[str, object]) -> str:
    """Return the command for a change; empty for a change of hardware."""
    if change.option is None:
        return ""
    name, value = change.option
    if name == FILE:
        return typed("chat", value, options)
    if name == "format":
        return typed("quantize", model, {name: value})
    return typed("chat", model, {**options, name: value})


def _formats(shape: ModelShape) -> set[str]:
    return {unit.format for unit in shape.units}


def _offer(
    ref: HubRef | None, path: Path, settings: Settings, offline: bool | None
) -> Offer | None:
    """Return the files of a hub model without local weights; None if there is nothing to choose."""
    known = known_model_of(path, settings)
    if known is not None:
        return usual_offer(known)
    if ref is None or ref.variant is not None or has_weights(path):
        return None
    if settings.offline if offline is None else offline:
        return None
    try:
        offer = offer_of(ref.repo, settings)
    except HubError:
        return None
    return offer if len(offer.sizes) > 1 and offer.config is not None else None


# -- other sizes of the weights --------------------------------------------------------------------


def other_sizes(plan: Plan, path: Path, settings: Settings) -> tuple[PlannedSize, ...]:
    """Return the planned size of the model at ``path``, then smaller ones that are faster.

    Smaller ones are the usual size, and the largest that stay in memory and in GPU memory. Empty
    if the model's place is already the best, or it is a quantized copy.
    """
    best: PlannedPlace = "gpu" if plan.request.uses_gpu else "memory"
    here, now = _place(plan.expected), estimate(plan.request)
    if here == best or now is None:
        return ()
    table = None
    try:
        with closing(open_checkpoint(path)) as checkpoint:
            if isinstance(checkpoint, StoreCheckpoint) and checkpoint.manifest.quantization:
                return ()
            table = known_losses(settings.data_dir / "losses", fingerprint(checkpoint))
    except LocalrtError:  # a config without weights
        pass
    scale, bits = plan.tok_s / now.tok_s, layer_bits(plan.request.shape)
    least = _LEAST_BITS if table is None else table.least_bits

    def size(tenths: int) -> PlannedSize | None:
        return _size(plan, tenths / 10, table, scale)

    found: list[PlannedSize | None] = []
    if bits > _USUAL_BITS + 0.2 >= least:
        found.append(_size(plan, _USUAL_BITS, table, scale))
    for place in ("memory", "gpu") if here == "streamed" else ("gpu",):
        if place == "gpu" and best != "gpu":
            continue
        low, high = int(10 * least + 0.99), int(10 * bits)  # ``high`` bits do not fit there
        while low < high:
            middle = (low + high) // 2
            tried = size(middle)
            reached = tried is not None and tried.place in (place, best)
            low, high = (middle + 1, high) if reached else (low, middle)
        tried = size(low - 1)
        if tried is not None and tried.bits >= least and tried.place in (place, best):
            found.append(tried)
    sizes = [each for each in dict.fromkeys(found) if each is not None]
    faster = [each for each in sizes if each.tok_s > LEAST_GAIN * plan.tok_s]
    own = PlannedSize(bits, plan.weight_bytes, plan.tok_s, here, loss=0.0)
    return (own, *faster) if faster else ()


def _size(plan: Plan, bits: float, table: LossTable | None, scale: float) -> PlannedSize | None:
    format_ = min(MIX_FORMATS, key=lambda name: abs(FORMATS[name].bits_per_weight - bits))
    shape = in_bits(plan.request.shape, bits, format_)
    expected = estimate(replace(plan.request, shape=shape))
    if expected is None:
        return None
    loss = None if table is None else table.loss(bits)
    return PlannedSize(bits, shape.nbytes, scale * expected.tok_s, _place(expected), loss)


def _place(expected: Expected) -> PlannedPlace:
    """Return the place of the weights that a token needs."""
    if expected.read or expected.copied:
        return "streamed"
    return "gpu" if expected.whole_on_gpu else "memory"
