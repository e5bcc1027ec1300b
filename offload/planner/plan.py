"""What is planned for, and the answer: a placement with what to expect of it. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from localrt.common.errors import OptionError
from localrt.common.formatting import format_bytes
from localrt.offload.account import LONG_PREFILL_ROWS, PREFILL_ROWS, Account, Budgets
from localrt.offload.placement import Placement, Where
from localrt.offload.planner.costs import Costs
from localrt.offload.planner.machine import MachineProfile
from localrt.offload.planner.simulate import Resource
from localrt.offload.planner.verdict import PROMPT_TOKENS, Expected, Verdict, judge
from localrt.offload.shapes import ModelShape
from localrt.quant.ops.kv_formats import KvFormat

PlannedPlace = Literal["streamed", "memory", "gpu"]

# A conversation in its first minutes: what most tokens see.
_USUAL_HELD = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the plan will do; rates in tokens per second, bytes per pass.

    ``ceiling_tok_s`` is what this placement allows with perfect overlap, ``bottleneck`` the
    busiest resource. ``tok_s`` holds for ``held`` tokens in the cache, ``full_context_tok_s``
    for all. ``page_s`` is how long a prompt of a page takes (``PROMPT_TOKENS``), which has fewer
    rows than the passes of ``prefill_tok_s`` may have. ``waits`` is the time of a pass that
    computing stood still, by what it waited for.
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


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to change (``"54 MB more RAM"``), and the tokens per second that planning with it
    gives: ``gain`` times what it gives without.

    ``option`` is what of ``load`` changes it, with its value; ``command`` is what to type. Hardware
    has neither, and plans without a model's name have no commands.
    """

    what: str
    tok_s: float
    gain: float
    option: tuple[str, str] | None = None
    command: str = ""


@dataclass(frozen=True, slots=True)
class PlannedSize:
    """The weights in so many ``bits`` each, in the layers: bytes of all, tokens per second, and the
    ``place`` of what a token needs: ``"streamed"`` (some of it is read or copied for each token),
    ``"memory"`` (it stays there), ``"gpu"`` (all of it in the GPU's).

    ``loss`` is how far next tokens diverge from those of the weights as they are, in nats; None if
    that was not measured. ``command`` is what to type.
    """

    bits: float
    nbytes: int
    tok_s: float
    place: PlannedPlace
    loss: float | None
    command: str = ""


@dataclass(frozen=True, slots=True)
class PlannedContext:
    """A context of ``tokens`` fits, and with all of them held answers come at ``tok_s``. ``whole``:
    it is all that the model has. ``command`` is what to type.
    """

    tokens: int
    tok_s: float
    whole: bool
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is planned for: ``shape`` on ``machine`` within ``budgets``, for ``ctx`` tokens.

    ``rows`` is those of one pass (more than one: a drafted tree); ``sequences`` a batch, each with
    its own cache. ``prefill_rows`` is the most rows of a prompt's pass: a tight budget takes fewer
    (None: 512, beside a GPU 2,048).
    ``held`` is how many tokens the prediction assumes in the cache. ``kv_on_ssd`` lets the keys and
    values of as few layers as needed live on the SSD where they do not fit.

    What is only told: ``called`` is what the user calls the model, ``thinks`` that it thinks before
    it answers, and has to be faster to be good for chat; ``quantization`` the file that is planned
    for, where the model is not here and its repository has several; ``hypothetical`` names what was
    given and is not this machine's; ``note`` is a line for the user.

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
    called: str = ""
    thinks: bool = False
    quantization: str = ""
    hypothetical: tuple[str, ...] = ()
    note: str = ""

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
        """Tokens in the cache that the prediction is for."""
        return min(self.ctx, _USUAL_HELD if self.held is None else self.held)

    @property
    def uses_gpu(self) -> bool:
        """Whether there is a GPU, and memory of it to use."""
        return self.machine.gpu is not None and self.budgets.vram > 0

    def without_gpu(self) -> PlanRequest:
        """The same with nothing but the processor."""
        budgets = replace(self.budgets, vram=0)
        return replace(self, machine=self.machine.without_gpu(), budgets=budgets)

    def costs(
        self,
        *,
        rows: int | None = None,
        held: int | None = None,
        expert_hits: float | None = None,
    ) -> Costs:
        """Seconds of a pass."""
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
    """``"fits in memory, about 45 tok/s"``, ``"streams 4.1 GB per token, about 6 tok/s"``.

    ``read`` bytes come from the disk and ``copied`` over the link for each token.
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
class Plan:
    """Where a model lives on a machine, what to expect of it, and what would help.

    Sizes are in bytes, rates in tokens per second. ``changes`` would help, best first; ``sizes``
    are the weights as they are, then smaller ones; ``contexts`` are the largest that fits and,
    where that is slow, the largest that is not. They are there where they were asked for, and so is
    ``command``, which runs the model (empty where there are no weights to run).
    """

    request: PlanRequest
    placement: Placement
    prediction: Prediction
    memory: Account
    notes: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    sizes: tuple[PlannedSize, ...] = ()
    contexts: tuple[PlannedContext, ...] = ()
    command: str = ""

    def __str__(self) -> str:
        """``"streams 4.1 GB per token, about 6 tok/s"``."""
        return in_words(
            fits=self.fits,
            read=self.read_bytes,
            copied=self.copied_bytes,
            tok_s=self.tok_s,
            where="in memory",
        )

    @property
    def report(self) -> str:
        """What ``localrt plan`` prints."""
        from localrt.offload.planner.report import page  # which is about plans

        return page(self)

    @property
    def details(self) -> str:
        """The same with ``--details``: all tables."""
        from localrt.offload.planner.report import explain

        return explain(self)

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
        """Whether all weights stay where they are computed."""
        return not self.read_bytes and not self.copied_bytes

    @property
    def read_bytes(self) -> int:
        """What comes from the disk for each token."""
        return round(self.prediction.nbytes.get("ssd", 0))

    @property
    def copied_bytes(self) -> int:
        """What goes over the link to the GPU for each token."""
        return round(self.prediction.nbytes.get("link", 0))

    @property
    def tok_s(self) -> float:
        """Decoding, predicted."""
        return self.prediction.tok_s

    @property
    def ceiling_tok_s(self) -> float:
        """Decoding at most, with this placement."""
        return self.prediction.ceiling_tok_s

    @property
    def prefill_tok_s(self) -> float:
        """Reading a prompt, predicted."""
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
        """The file that was planned for, where a repository has several."""
        return self.request.quantization

    @property
    def hypothetical(self) -> tuple[str, ...]:
        """What was given and is not this machine's."""
        return self.request.hypothetical

    @property
    def verdict(self) -> Verdict:
        """Whether it is fast enough to chat with, and why: ``str`` is one line."""
        return judge(self.expected)

    @property
    def expected(self) -> Expected:
        """What it comes to, in the few numbers that it is judged by."""
        shape, where = self.request.shape, self.placement.where
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
        )

    def busy_share(self, resource: Resource) -> float:
        """The share of a pass that a resource works, from 0 to 1."""
        seconds = self.request.sequences / self.prediction.tok_s
        return min(1.0, self.prediction.busy.get(resource, 0.0) / seconds)

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return self.request.shape.nbytes

    @property
    def ram_bytes(self) -> int:
        """RAM in use, of everything."""
        return self.memory.total("ram")

    @property
    def vram_bytes(self) -> int:
        """The GPU's memory in use."""
        return self.memory.total("vram")

    def for_weights_and_caches(self) -> int:
        """Bytes that the other parts of the plan leave of the RAM."""
        memory = self.memory
        ours = memory.nbytes("weights") + memory.nbytes("keys and values")
        return self.request.budgets.ram - (memory.total() - ours)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. A mixture's experts are counted by place, not listed."""
        shape, request = self.request.shape, self.request
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
            },
            "prediction": asdict(self.prediction),
            "memory": [asdict(part) for part in self.memory.parts],
            "changes": [asdict(change) for change in self.changes],
            "sizes": [asdict(size) for size in self.sizes],
            "contexts": [asdict(context) for context in self.contexts],
            "notes": list(self.notes),
            "hypothetical": list(self.hypothetical),
        }
