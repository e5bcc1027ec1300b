"""``localrt.plan``: where a model would live and how fast it would be, before anything is loaded.

It reads a model's shape, not its weights. What decides is ``localrt.offload.planner``. Beside the
plan it tells the largest contexts that fit and that are fast, and what other sizes of the weights
would do: speeds are planned, losses are those that ``localrt quantize --bits`` measured.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from localrt.common.errors import HubError, LocalrtError, OptionError, known_arguments
from localrt.common.settings import Settings
from localrt.hub.known_models import repo_thinks
from localrt.hub.listing import expand_name
from localrt.hub.names import looks_like_path, parse_hub_ref
from localrt.hub.resolving import Offer, offer_of
from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.offload.account import shorter_contexts
from localrt.offload.placement import PlacedUnit, Where
from localrt.offload.planner import ModelShape, Plan, PlanRequest, make_plan
from localrt.offload.planner.estimate import estimate
from localrt.offload.planner.plan import Change, PlannedContext, PlannedPlace, PlannedSize
from localrt.offload.planner.search import in_bits, layer_bits
from localrt.offload.planner.verdict import READING_TOK_S, Expected
from localrt.offload.store.pack import fingerprint
from localrt.planning.inputs import (
    Hardware,
    find_model,
    has_weights,
    hypothetical,
    known_model_of,
    planned_machine,
    shape_of,
)
from localrt.planning.published import published_of
from localrt.planning.recommending import (
    Recommendation,
    other_files,
    recommend_on,
    sized,
    usual_offer,
)
from localrt.planning.report import details, report, with_commands
from localrt.quant.formats import FORMATS
from localrt.quant.ops.kv import KvFormat, parse_kv_format
from localrt.quantize.mix import MIX_FORMATS, LossTable, known_losses

_AS_FAST = 0.9  # of the plan's speed, where that is below reading speed


def largest_contexts(plan: Plan) -> tuple[PlannedContext, ...]:
    """Halves of the model's context are tried, by estimates that are scaled to ``plan``.

    First the largest that fits; then, where answers come below reading speed with all of it held,
    the largest with which they do not. A plan below reading speed is compared with itself.
    """
    request = plan.request
    whole = request.shape.context_length
    now = estimate(request)
    scale = 1.0 if now is None else plan.tok_s / now.tok_s
    enough = min(READING_TOK_S, _AS_FAST * plan.tok_s)

    def found(tokens: int) -> PlannedContext | None:
        expected = estimate(replace(request, ctx=tokens, held=tokens))
        if expected is None:
            return None
        return PlannedContext(tokens, scale * expected.tok_s, whole=tokens == whole)

    largest: PlannedContext | None = None
    for tokens in (whole, *shorter_contexts(whole)):
        tried = found(tokens)
        if tried is None:
            continue
        largest = largest or tried
        if tried.tok_s >= enough:
            return (largest,) if tried is largest else (largest, tried)
    return () if largest is None else (largest,)


_LEAST_BITS = 2.7  # all matrices in the smallest format
_USUAL_BITS = 4.5
_STEP = 0.1
_TRIES = 12
_LEAST_GAIN = 1.05  # times as fast: less is not worth a line


def other_sizes(plan: Plan, path: Path, settings: Settings) -> tuple[PlannedSize, ...]:
    """Sizes of the model at ``path`` beside the one of ``plan``, which comes first.

    None of a model that lies best as it is, or that is a quantized copy already.
    """
    goals = [goal for goal in ("memory", "card") if _misses(plan, goal)]
    if not goals:
        return ()
    table = None
    try:
        with closing(open_checkpoint(path)) as checkpoint:
            if isinstance(checkpoint, StoreCheckpoint) and checkpoint.manifest.quantization:
                return ()
            table = known_losses(settings.data_dir / "losses", fingerprint(checkpoint))
    except LocalrtError:  # a config without weights
        pass
    bits = layer_bits(plan.request.shape)
    now = PlannedSize(bits, plan.weight_bytes, plan.tok_s, _place(plan), loss=0.0)
    least = _LEAST_BITS if table is None else table.least_bits
    found: list[PlannedSize] = []
    if bits > _USUAL_BITS + 2 * _STEP >= least:
        found.append(_size(plan, _USUAL_BITS, table)[1])
    for goal in goals:
        tried = (_size(plan, tenth, table) for tenth in _tenths(plan, goal, bits, least))
        size = next((size for smaller, size in tried if not _misses(smaller, goal)), None)
        if size is not None and size not in found:
            found.append(size)
    faster = [size for size in found if size.tok_s > _LEAST_GAIN * plan.tok_s]
    return (now, *faster) if faster else ()


def _tenths(plan: Plan, goal: str, bits: float, least: float) -> list[float]:
    """Bits to try, from what may just reach the goal on."""
    used = [unit for unit in plan.request.shape.units if unit.use]
    kept = sum(unit.nbytes for unit in used if not _is_away(plan, unit, goal))
    guess = bits * kept / sum(unit.nbytes for unit in used) + 4 * _STEP
    most = int(min(guess, bits - _STEP) / _STEP)
    lowest = max(most - _TRIES, int(least / _STEP - 1e-6))
    return [round(number * _STEP, 1) for number in range(most, lowest, -1)]


def _size(plan: Plan, bits: float, table: LossTable | None) -> tuple[Plan, PlannedSize]:
    format_ = min(MIX_FORMATS, key=lambda name: abs(FORMATS[name].bits_per_weight - bits))
    shape = in_bits(plan.request.shape, bits, format_)
    found = make_plan(replace(plan.request, shape=shape))
    loss = None if table is None else table.loss(bits)
    return found, PlannedSize(bits, found.weight_bytes, found.tok_s, _place(found), loss)


def _place(plan: Plan) -> PlannedPlace:
    """The best of the goals that is reached."""
    if _misses(plan, "memory"):
        return "streamed"
    return "card" if plan.request.uses_gpu and not _misses(plan, "card") else "memory"


def _misses(plan: Plan, goal: str) -> bool:
    """Whether weights that a token needs are read or copied for it; or are not on the card that
    there is.
    """
    if goal == "card" and not plan.request.uses_gpu:
        return False
    return any(_is_away(plan, unit, goal) for unit in plan.request.shape.units if unit.use)


def _is_away(plan: Plan, unit: PlacedUnit, goal: str) -> bool:
    where = plan.placement.where[unit.name]
    if unit.kind == "norm":
        return False
    return where is not Where.VRAM if goal == "card" else where.read or where.copied


_DEFAULT_CTX = 4096


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

    Nothing is loaded or downloaded, but for the config of a hub model that is not here. A machine
    that was never measured is measured first, which takes seconds: call it from a thread.

    Args:
        model: as ``load`` takes it, or a ``config.json`` (or its folder) without weights.
        ctx: context in tokens; None is 4096, or the model's own if that is less.
        format: plan as if packed in this format, such as ``"int4-g32"``.
        kv_format: how keys and values are kept.
        batch: sequences at once.
        kv_on_ssd: let keys and values that do not fit be read from the disk.
        ram, gpu_memory: sizes to use, such as ``"32GB"``; None: what this machine has.
        gpu: a card by name, or ``virtual:8GB@12GB/s,...``.
        link, ssd: rates such as ``"12GB/s"``.
        pc: a whole PC, ``"RTX 4060, 32GB DDR5-5600, 8 cores, NVMe"`` or a preset's name such as
            ``"gaming-pc"``, instead of this machine; what it does not say is typical.
        ram_speed: of the RAM, ``"DDR5-5600"`` or a rate such as ``"60GB/s"``.
        cores: of the processor.
        advise: plan variations too, to say what would help and what smaller weights would do; takes
            about as long again.
        remeasure: measure this machine again.
        revision: branch, tag or commit of a hub model.
        offline: never use the network; None follows the environment.

    Raises:
        MemoryBudgetError: it cannot fit, not even streamed; says what would do.
        LocalrtError: no such model, or an option that cannot be used.
    """
    for name, value in (("ctx", 1 if ctx is None else ctx), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} must be an integer of at least 1, is {value!r}")
    kv_format = parse_kv_format(kv_format)
    settings = Settings.from_environment()
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
    path = find_model(str(model), settings, revision=revision, offline=offline)
    shape = shape_of(path, format)
    machine, budgets, note = planned_machine(path, settings, shape, wanted, remeasure=remeasure)
    offer = None if format is not None else _offer(str(model), path, settings, offline)
    chosen = None
    if offer is not None:
        chosen = recommend_on(offer, machine, budgets, ram=ram, ctx=ctx)
    if offer is not None and chosen is not None:
        shape = _in_file(shape, offer, chosen)
        # A processor has rates of its own for the file's format.
        machine, budgets, note = planned_machine(path, settings, shape, wanted)
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=budgets,
        ctx=ctx or min(_DEFAULT_CTX, shape.context_length),
        sequences=batch,
        kv_format=kv_format,
        kv_on_ssd=kv_on_ssd,
    )
    if request.ctx > shape.context_length:
        note = (
            f"the context of {request.ctx} tokens is longer than the {shape.context_length} that "
            f"the model has: answers may degrade{f'. {note}' if note else ''}"
        )
    found = make_plan(request, advise=advise)
    if chosen is not None and (expected := estimate(request)) is not None:
        found = _as_estimated(found, expected)
    found = replace(
        found,
        notes=(note, *found.notes) if note else found.notes,
        hypothetical=hypothetical(wanted),
        thinks=repo_thinks(str(model)) or repo_thinks(expand_name(str(model), settings)),
        quantization="" if chosen is None else chosen.name,
    )
    if advise:
        others: tuple[Change, ...] = ()
        if offer is not None and chosen is not None:
            others = other_files(offer, chosen.name, found.request, found.tok_s)
        changes = sorted((*found.changes, *others), key=lambda each: -each.gain)
        sizes = other_sizes(found, path, settings) if format is None and offer is None else ()
        found = replace(
            found, changes=tuple(changes), sizes=sizes, contexts=largest_contexts(found)
        )
    name, weights = str(model), has_weights(path)
    if weights or not looks_like_path(name):
        found = with_commands(found, name, _given(found, wanted, ctx, format), weights=weights)
    return with_texts(found, name)


def with_texts(plan: Plan, name: str) -> Plan:
    """``plan`` of the model that the user calls ``name``, with its texts."""
    shape, gpu = plan.request.shape, plan.request.machine.gpu
    same_card = () if gpu is None else published_of(shape, gpu.name)
    return replace(
        plan,
        report=report(plan, name, same_card),
        details=details(plan, published_of(shape)),
    )


def _offer(model: str, path: Path, settings: Settings, offline: bool | None) -> Offer | None:
    """The files of a hub model of which only the config is here; None where there is no choice."""
    known = known_model_of(path, settings)
    if known is not None:
        return usual_offer(known)
    name = expand_name(model, settings)
    ref = None if has_weights(path) or looks_like_path(name) else parse_hub_ref(name)
    if ref is None or ref.variant is not None or (settings.offline if offline is None else offline):
        return None
    try:
        offer = offer_of(ref.repo, settings)
    except HubError:
        return None
    return offer if len(offer.sizes) > 1 and offer.config is not None else None


def _as_estimated(plan: Plan, expected: Expected) -> Plan:
    """``plan`` of a model that is not here with the figures that tables of models have."""
    was, scale = plan.prediction, expected.tok_s / plan.tok_s
    now = replace(
        was,
        tok_s=expected.tok_s,
        ceiling_tok_s=max(was.ceiling_tok_s, expected.tok_s),
        full_context_tok_s=scale * was.full_context_tok_s,
        page_s=expected.wait_s,
    )
    changes = tuple(replace(each, tok_s=each.gain * expected.tok_s) for each in plan.changes)
    return replace(plan, prediction=now, changes=changes)


def _in_file(shape: ModelShape, offer: Offer, chosen: Recommendation) -> ModelShape:
    """The model in the file that was chosen for it."""
    if len(offer.sizes) == 1:  # as it was published
        return shape
    shape = sized(shape, chosen.name, offer.sizes[chosen.name])
    return replace(shape, notes=(f"of its files {chosen.name} is planned: {chosen.reason}",))


def _given(plan: Plan, wanted: Hardware, ctx: int | None, format: str | None) -> dict[str, object]:
    """The options of ``load`` that it was planned with, as far as they are this machine's too."""
    options: dict[str, object] = {} if ctx is None else {"ctx": ctx}
    if plan.request.kv_format != "bf16":
        options["kv_format"] = plan.request.kv_format
    if not plan.hypothetical:
        given = {"ram": wanted.ram, "gpu_memory": wanted.gpu_memory}
        options |= {name: value for name, value in given.items() if value is not None}
    return options
