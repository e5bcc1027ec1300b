"""The values of planning: the request, and the forecast with its placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from localrt.common.errors import OptionError
from localrt.common.formatting import format_bytes
from localrt.offload.account import LONG_PREFILL_ROWS, PREFILL_ROWS, Account, Budgets
from localrt.offload.placement import Placement, Where
from localrt.offload.shapes import ModelShape
from localrt.planning.costs import Costs
from localrt.planning.machine import MachineProfile
from localrt.planning.simulate import Resource
from localrt.planning.verdict import PROMPT_TOKENS, Expected, Verdict, judge
from localrt.quant.ops.kv_formats import KvFormat

# Tokens in the cache in the first minutes of a conversation, as for most answers.
_USUAL_HELD = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The forecast for a plan; rates in tokens per second, bytes per pass.

    ``ceiling_tok_s`` is the rate of this placement with perfect overlap; ``bottleneck``, the
    busiest resource. ``tok_s`` is for ``held`` tokens in the cache, ``full_context_tok_s`` for a
    full one. ``page_s``: seconds for a prompt of one page (``PROMPT_TOKENS``), which may have fewer
    rows than the passes of ``prefill_tok_s``. ``busy`` and ``waits``: of a replayed pass of
    ``pass_s`` seconds, the seconds for which each resource works, and for which computing waits, by
    cause.
    """

    tok_s: float
    ceiling_tok_s: float
    bottleneck: Resource
    efficiency: float
    prefill_tok_s: float
    page_s: float
    held: int
    full_context_tok_s: float
    nbytes: Mapping[str, float]
    busy: Mapping[Resource, float]
    waits: Mapping[str, float]
    pass_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """A possible change (``"54 MB more RAM"``), and the forecast tokens per second with it:
    ``gain`` times those without it.

    ``option`` is the option of ``load`` and its value; ``command`` is what to type. A change of
    hardware has neither; a plan without a model's name has no commands.
    """

    what: str
    tok_s: float
    gain: float
    option: tuple[str, str] | None = None
    command: str = ""


@dataclass(frozen=True, slots=True)
class PlannedPicture:
    """The cost of a picture of ``side`` pixels square: its ``tokens``, the ``seconds`` to read
    them, and the ``nbytes`` that the vision encoder needs meanwhile, in RAM or ``on_gpu``.
    """

    side: int
    tokens: int
    seconds: float
    nbytes: int
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class PlannedContext:
    """A context of ``tokens`` that fits; ``tok_s`` is the rate with all of it in the cache.
    ``whole``: it is the model's whole context. ``command`` is what to type.
    """

    tokens: int
    tok_s: float
    whole: bool
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What to plan for: ``shape`` on ``machine`` within ``budgets``, for ``ctx`` tokens.

    ``rows``: rows of one pass (more than one for a draft tree). ``sequences``: the batch size; each
    sequence has its own cache. ``prefill_rows``: the most rows of a prompt's pass (None: 512, with
    a GPU 2,048); a tight budget allows fewer. ``held``: tokens that the forecast assumes in the
    cache. ``kv_on_ssd``: if KV caches do not fit, keep those of as few layers as needed on the SSD.
    ``splits``: GPU and CPU may share MLPs.

    The other fields are for the report: ``called`` is the user's name for the model; a model that
    ``thinks`` before it answers must be faster to be good for chat; ``quantization`` is the planned
    file of a repository with several; ``hypothetical`` lists options that describe another PC;
    ``note`` is a line for the user. ``gpu_unused``: there is a GPU, but it cannot compute this
    model.

    Raises:
        OptionError: a number below one.
    """

    shape: ModelShape
    machine: MachineProfile
    budgets: Budgets
    ctx: int
    rows: int = 1
    sequences: int = 1
    prefill_rows: int | None = None
    kv_format: KvFormat = "bf16"
    held: int | None = None
    kv_on_ssd: bool = False
    splits: bool = True
    called: str = ""
    thinks: bool = False
    quantization: str = ""
    hypothetical: tuple[str, ...] = ()
    note: str = ""
    gpu_unused: bool = False

    def __post_init__(self) -> None:
        for name in ("ctx", "rows", "sequences", "prefill_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, is {value}")

    @property
    def most_prefill_rows(self) -> int:
        """The most rows of a prompt's pass."""
        if self.prefill_rows is not None:
            return self.prefill_rows
        return LONG_PREFILL_ROWS if self.uses_gpu else PREFILL_ROWS

    @property
    def held_tokens(self) -> int:
        """The number of tokens in the cache that the forecast assumes."""
        return min(self.ctx, _USUAL_HELD if self.held is None else self.held)

    @property
    def uses_gpu(self) -> bool:
        """Whether there is a GPU with memory that may be used."""
        return self.machine.gpu is not None and self.budgets.vram > 0

    def without_gpu(self) -> PlanRequest:
        """Return the same request without a GPU."""
        budgets = replace(self.budgets, vram=0)
        return replace(self, machine=self.machine.without_gpu(), budgets=budgets)

    def with_usable_gpu(self) -> PlanRequest:
        """Return the request without its GPU if that cannot compute this model."""
        if not (self.uses_gpu and self.shape.off_gpu):
            return self
        return replace(self.without_gpu(), gpu_unused=True)

    def costs(
        self, *, rows: int | None = None, held: int | None = None, expert_hits: float | None = None
    ) -> Costs:
        """Return the costs of a pass; by default with the request's rows and held tokens."""
        return Costs(
            shape=self.shape,
            machine=self.machine,
            rows=max(self.rows, self.sequences) if rows is None else rows,
            held=self.held_tokens if held is None else held,
            sequences=self.sequences,
            kv_format=self.kv_format,
            expert_hits=expert_hits,
        )


def in_words(*, fits: bool, read: int, copied: int, tok_s: float | None, where: str) -> str:
    """Return ``"fits in memory, about 45 tok/s"`` or ``"streams 4.1 GB per token, ..."``.

    Each token reads ``read`` bytes from the disk and copies ``copied`` bytes over the link.
    """
    rate = "" if not tok_s else f", about {tok_s:.2g} tok/s"
    if tok_s and tok_s >= 10:
        rate = f", about {tok_s:.0f} tok/s"
    if fits:
        return f"fits {where}{rate}"
    if read:
        return f"streams {format_bytes(read)} per token{rate}"
    return f"copies {format_bytes(copied)} per token to the GPU{rate}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Where a model's weights are on a machine, and how fast it is there.

    Sizes are in bytes, rates in tokens per second. ``estimated`` is the forecast for a model that
    is not on this machine, as in tables of many models; ``measured_tok_s`` is the rate when the
    model last ran here. The other fields are added by ``localrt.plan``: ``changes`` that would
    help, best first; ``contexts``, the largest that fits and, if that is slow, the largest that is
    not slow. ``command`` runs the model; it is empty if there is nothing to run. ``draft`` is the
    default draft, ``picture`` the cost of a picture for a vision model.
    """

    request: PlanRequest
    placement: Placement
    prediction: Prediction
    memory: Account
    notes: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    contexts: tuple[PlannedContext, ...] = ()
    command: str = ""
    draft: str = ""
    picture: PlannedPicture | None = None
    estimated: Expected | None = None
    measured_tok_s: float | None = None

    def __str__(self) -> str:
        """Return one line such as ``"streams 4.1 GB per token, about 6 tok/s"``."""
        return in_words(
            fits=self.fits,
            read=self.read_bytes,
            copied=self.copied_bytes,
            tok_s=self.tok_s,
            where="in memory",
        )

    @property
    def model(self) -> str:
        """The model's name."""
        return self.request.shape.name

    @property
    def ctx(self) -> int:
        """Context in tokens."""
        return self.request.ctx

    @property
    def fits(self) -> bool:
        """Whether all weights are resident on the devices that compute with them."""
        return not self.read_bytes and not self.copied_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes read from the disk for each token."""
        return round(self.prediction.nbytes.get("ssd", 0))

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to the GPU for each token."""
        return round(self.prediction.nbytes.get("link", 0))

    @property
    def tok_s(self) -> float:
        """The forecast rate of decoding."""
        return self.prediction.tok_s

    @property
    def ceiling_tok_s(self) -> float:
        """The highest rate of decoding with this placement."""
        return self.prediction.ceiling_tok_s

    @property
    def prefill_tok_s(self) -> float:
        """The forecast prefill rate."""
        return self.prediction.prefill_tok_s

    @property
    def bottleneck(self) -> Resource:
        """``"ssd"``, ``"link"``, ``"cpu"`` or ``"gpu"``."""
        return self.prediction.bottleneck

    @property
    def thinks(self) -> bool:
        """Whether the model thinks before it answers."""
        return self.request.thinks

    @property
    def quantization(self) -> str:
        """The planned file, if the repository has several."""
        return self.request.quantization

    @property
    def hypothetical(self) -> tuple[str, ...]:
        """The options that describe another PC than this one."""
        return self.request.hypothetical

    @property
    def verdict(self) -> Verdict:
        """Whether the model is fast enough for chat, and why; ``str`` gives one line."""
        return judge(self.expected)

    @property
    def expected(self) -> Expected:
        """The few numbers from which the verdict follows."""
        if self.estimated is not None:
            return self.estimated
        shape, where = placed_shape(self), self.placement.where
        in_ram = [unit for unit in shape.units if where[unit.name] is Where.RAM]
        return Expected(
            tok_s=self.tok_s,
            prefill_tok_s=PROMPT_TOKENS / self.prediction.page_s,
            nbytes=self.weight_bytes,
            needed=round(shape.pass_nbytes),
            read=self.read_bytes,
            copied=self.copied_bytes,
            on_gpu=sum(unit.nbytes for unit in shape.units if where[unit.name] is Where.VRAM),
            by_cpu=round(sum(unit.nbytes * unit.use for unit in in_ram)),
            thinks=self.thinks,
            gpu_unused=self.request.gpu_unused,
        )

    def busy_share(self, resource: Resource) -> float:
        """Return the share of a pass for which a resource works, from 0 to 1."""
        return self.prediction.busy.get(resource, 0.0) / self.prediction.pass_s

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.request.shape.nbytes

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM that the whole process uses."""
        return self.memory.total("ram")

    @property
    def vram_bytes(self) -> int:
        """Bytes of GPU memory in use."""
        return self.memory.total("vram")

    def for_weights_and_caches(self) -> int:
        """Return the bytes of the RAM budget that are left for weights and caches."""
        memory = self.memory
        ours = memory.nbytes("weights") + memory.nbytes("keys and values")
        return self.request.budgets.ram - (memory.total() - ours)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. A mixture's experts are counted by place, not listed."""
        shape, request = placed_shape(self), self.request
        where: dict[str, str] = {}
        experts: dict[str, int] = {}
        for unit in shape.units:
            place = self.placement.where[unit.name].value
            if unit.kind == "expert":
                experts[place] = experts.get(place, 0) + 1
            else:
                where[unit.name] = place
        return {
            "model": {
                "name": shape.name,
                "architecture": shape.architecture,
                "parameters": shape.parameters,
                "active_parameters": shape.active_parameters,
                "weight_bytes": shape.nbytes,
                "pass_bytes": round(shape.pass_nbytes),
                "layers": shape.layers,
                "experts": None if shape.experts is None else asdict(shape.experts),
            },
            "verdict": asdict(self.verdict),
            "thinks": self.thinks,
            "quantization": self.quantization or None,
            "command": self.command,
            "ctx": request.ctx,
            "sequences": request.sequences,
            "kv_format": request.kv_format,
            "machine": request.machine.to_dict(),
            "budgets": asdict(request.budgets),
            "placement": {
                "units": where,
                "experts": experts,
                "kv": list(self.placement.kv),
                "ram_ring": self.placement.ram_ring,
                "vram_ring": self.placement.vram_ring,
                "prefill_rows": self.placement.prefill_rows,
                "gpu_rows": self.placement.gpu_rows,
                "crossing": sorted(self.placement.crossing),
                "split": {name: list(share) for name, share in self.placement.split.items()},
            },
            "prediction": asdict(self.prediction),
            "measured_tok_s": self.measured_tok_s,
            "memory": [asdict(part) for part in self.memory.parts],
            "changes": [asdict(change) for change in self.changes],
            "contexts": [asdict(context) for context in self.contexts],
            "notes": list(self.notes),
            "draft": self.draft,
            "picture": None if self.picture is None else asdict(self.picture),
            "hypothetical": list(self.hypothetical),
        }


def placed_shape(plan: Forecast) -> ModelShape:
    """The model as placed, with split MLPs as pieces."""
    return plan.request.shape.split(plan.placement.split)
