"""Forecast of a model's speed on a machine: the request, the numbers, and the verdict for chat.

Answers should come as fast as people read, and a page of prompt should not make them wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from localrt.common.errors import OptionError
from localrt.common.formatting import format_bytes, format_rate, format_seconds
from localrt.offload.account import LONG_PREFILL_ROWS, PREFILL_ROWS, Account, Budgets
from localrt.offload.placement import Placement
from localrt.offload.shapes import ModelShape
from localrt.planning.costs import Costs, Resource
from localrt.planning.machine import MachineProfile
from localrt.quant.ops.kv_formats import KvFormat

READING_TOK_S = 7.0
"""About as fast as people read."""

THINKING_TOK_S = 20.0
"""Fast enough for a model that thinks first: its thoughts then take about half a minute."""

USABLE_TOK_S = 2.0
"""Below this a short answer takes minutes."""

PROMPT_TOKENS = 500
"""A page of text."""

# Tokens in the cache in the first minutes of a conversation, as for most answers.
_USUAL_HELD = 512

_GOOD_WAIT_S, _USABLE_WAIT_S = 20.0, 60.0  # for the first token after a page of prompt
_MERE_SHARE = 0.05  # of a token's weights: copying less is not mentioned
_WHOLE_SHARE = 0.98

Level = Literal["good", "usable", "slow"]

_WORDS: dict[Level, str] = {
    "good": "Good for chat",
    "usable": "Usable for chat",
    "slow": "Too slow for chat",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The forecast speed of a placement; rates in tokens per second, bytes per pass.

    ``ceiling_tok_s`` is the rate of this placement with perfect overlap; ``bottleneck``, the
    busiest resource. ``tok_s`` is for ``held`` tokens in the cache, ``full_context_tok_s`` for a
    full one (None in tables of models). ``page_s``: seconds for a prompt of one page
    (``PROMPT_TOKENS``), which may have fewer rows than the passes of ``prefill_tok_s``.

    ``nbytes``: bytes of a pass that are read (``ssd``), copied to the GPU (``link``), computed by
    the CPU (``ram``) and by the GPU (``vram``). ``busy`` and ``waits``: of a pass of ``pass_s``
    seconds, those for which each resource works, and for which computing waits, by cause.

    Bytes of weights: ``weights`` in all, ``needed`` for a token, of which ``by_cpu`` are in RAM for
    the CPU; ``on_gpu`` are resident on the GPU. ``thinks``: the model thinks before it answers.
    ``gpu_unused``: the model cannot use the machine's GPU.
    """

    tok_s: float
    ceiling_tok_s: float
    bottleneck: Resource
    efficiency: float
    prefill_tok_s: float
    page_s: float
    held: int
    full_context_tok_s: float | None
    nbytes: Mapping[str, float]
    busy: Mapping[Resource, float]
    waits: Mapping[str, float]
    pass_s: float
    weights: int
    needed: int
    on_gpu: int
    by_cpu: int
    thinks: bool = False
    gpu_unused: bool = False

    @property
    def read(self) -> int:
        """Bytes read from the disk for each token."""
        return round(self.nbytes["ssd"])

    @property
    def copied(self) -> int:
        """Bytes copied to the GPU for each token."""
        return round(self.nbytes["link"])

    @property
    def level(self) -> Level:
        """How good the model is for chat."""
        if self.tok_s < USABLE_TOK_S or self.page_s > _USABLE_WAIT_S:
            return "slow"
        return "good" if self.is_quick and self.page_s <= _GOOD_WAIT_S else "usable"

    @property
    def enough_tok_s(self) -> float:
        """Tokens per second that are fast enough for people."""
        return THINKING_TOK_S if self.thinks else READING_TOK_S

    @property
    def is_quick(self) -> bool:
        """Whether answers are fast enough for people."""
        return self.tok_s >= self.enough_tok_s

    @property
    def whole_on_gpu(self) -> bool:
        """Whether the GPU keeps and computes all weights that a token needs, except the
        embedding: it may be in RAM, as a token needs one row of it.
        """
        elsewhere = self.read + self.copied + self.by_cpu
        kept = self.on_gpu >= _WHOLE_SHARE * self.needed
        return kept and elsewhere <= (1 - _WHOLE_SHARE) * self.needed

    @property
    def place(self) -> str:
        """Where the weights are, in a few words."""
        if self.read:
            return "partly on the SSD"
        if self.whole_on_gpu:
            return "GPU memory"
        if self.on_gpu:
            return "GPU memory and RAM"
        return "RAM (not the GPU)" if self.gpu_unused else "RAM"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A level, and one line of ``text`` that begins with it."""

    level: Level
    text: str

    def __str__(self) -> str:
        return self.text


def judge(expected: Prediction) -> Verdict:
    """Judge a forecast: ``"Good for chat: 23 tok/s, all of it in memory"``."""
    level, slow = expected.level, not expected.is_quick
    text = f"{_WORDS[level]}: {speed(expected.tok_s)}"
    text += f", because {_burden(expected)}" if slow else f", {_where(expected)}"
    if expected.thinks and READING_TOK_S <= expected.tok_s < THINKING_TOK_S:
        text += "; it thinks before it answers, which takes longer"
    if expected.page_s > _GOOD_WAIT_S:
        text += f"; a page of text takes {format_seconds(expected.page_s)} to read"
    return Verdict(level, text)


def speed(tok_s: float) -> str:
    """Format a forecast rate with two digits: ``"23 tok/s"``, ``"0.9 tok/s"``."""
    if tok_s >= 9.95:
        return f"{tok_s:.0f} tok/s"
    return f"{tok_s:.1f} tok/s" if tok_s >= 0.95 else f"{format_rate(tok_s)} tok/s"


def _where(expected: Prediction) -> str:
    if expected.read:
        return _moved(expected)
    if expected.whole_on_gpu:
        return "all of it in GPU memory"
    if expected.on_gpu:
        return f"{part_of(expected.on_gpu, expected.weights)} in GPU memory, the rest in RAM"
    return f"all of it in {expected.place if expected.gpu_unused else 'memory'}"


def _burden(expected: Prediction) -> str:
    """Say what makes the model slow."""
    if expected.read or expected.copied > _MERE_SHARE * expected.needed:
        return _moved(expected)
    left = expected.needed - expected.on_gpu
    if expected.on_gpu and left > 0:
        return f"the CPU computes {part_of(left, expected.needed)} for every token"
    who = "GPU" if expected.on_gpu else "CPU"
    return f"the {who} has to go through {format_bytes(expected.needed)} for every token"


def _moved(expected: Prediction) -> str:
    if expected.read:
        return f"{part_of(expected.read, expected.needed)} are read from the SSD for every token"
    return f"{part_of(expected.copied, expected.needed)} are copied to the GPU for every token"


def part_of(part: int, whole: int) -> str:
    """Format one size as part of another: ``"31 of 40 GB"``."""
    some, unit = format_bytes(part).rsplit(" ", 1)
    total = format_bytes(whole)
    return f"{some} of {total}" if total.endswith(f" {unit}") else f"{some} {unit} of {total}"


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


_MEANINGS = {
    "tok/s": (
        "tokens per second. A token is about three quarters of a word; people read about "
        f"{READING_TOK_S:.0f} a second."
    ),
    "FILE": (
        "the bits of a weight come first (Q4: about 4); fewer are smaller, faster and less exact."
    ),
    "Bits per weight": "fewer are smaller, faster and less exact.",
    "Prefill": "reading the prompt.",
    "Decode": "writing the answer.",
    "TTFT": "the time to the first token of the answer.",
    "FIRST TOKEN": "of the answer to a page of text.",
    "Partly on the SSD": "every token waits until some weights have been read from it.",
    "Streamed": "some weights are read from the SSD, or copied to the GPU, for every token.",
    "Keys and values": "what the model remembers of a conversation, for each token of it.",
    "Link": "between RAM and GPU (PCIe).",
    "Pass": "one way through the model, for each token.",
    "Busy": "the share of the time for which a part works; the busiest sets the pace.",
    "Predicted": "the planner's forecast, without drafts.",
    "Perplexity": "how much a text surprises the model: less is better; f32 is the whole model.",
}


def meanings(text: str) -> Iterator[str]:
    """Yield a line for each word of a report's ``text`` that needs one. Capitals are headers'."""
    for word, meaning in _MEANINGS.items():
        flags = re.NOFLAG if word.isupper() else re.IGNORECASE
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, flags):
            yield f"{word}: {meaning}"


# -- plans -----------------------------------------------------------------------------------------


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
    ``whole``: it is the model's whole context. ``command`` is what to type. Its keys and values
    take ``nbytes``.
    """

    tokens: int
    tok_s: float
    whole: bool
    command: str = ""
    nbytes: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Where a model's weights are on a machine, and how fast it is there.

    Sizes are in bytes, rates in tokens per second. ``measured_tok_s`` is the rate when the model
    last ran here. The other fields are added by ``localrt.plan``: ``changes`` that would
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
        return self.prediction.read

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to the GPU for each token."""
        return self.prediction.copied

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
        return judge(self.prediction)

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


def figures(machine: MachineProfile) -> Iterator[str]:
    """Yield the rates of a plan, and whether each was measured, given or typical: ``"RAM 31 GB/s
    (measured)"``.
    """

    def figure(text: str, name: str) -> str:
        return f"{text} ({machine.sources.get(name, 'typical')})"

    def rate(what: str, name: str, value: float) -> str:
        return figure(f"{what} {format_bytes(value)}/s", name)

    yield rate("disk", "ssd_bytes_s", machine.ssd_bytes_s)
    yield rate("RAM", "ram_bytes_s", machine.ram_bytes_s)
    yield figure(f"{machine.threads} cores", "cores")
    yield figure("speed of the cores", "kernels")
    if machine.gpu is not None and machine.link_bytes_s is not None:
        yield f"{machine.gpu.name} with {rate('memory at', 'gpu', machine.gpu.bytes_s)}"
        yield rate("link to it", "link_bytes_s", machine.link_bytes_s)


def other_gpu_line(machine: MachineProfile, request: PlanRequest | None = None) -> str:
    """Return what llama.cpp can do with a GPU that localrt's kernels cannot use; empty without one.

    No rate is given that does not follow from a known one: reading weights once for each token.
    """
    gpu, text, rate = machine.other_gpu, "", None
    if gpu is None:
        return ""
    if request is not None:
        shape, room = request.shape, gpu.room_bytes
        needed = shape.nbytes + sum(shape.kv_nbytes(request.kv_format, request.ctx))
        share = 1.0 if room is None else min(1.0, room / needed)
        if room is not None:
            what = "all of the model fits" if share == 1 else f"{part_of(room, needed)} fit"
            text = f": {what} its memory"
        if gpu.bytes_s and needed < request.budgets.ram + (room or 0):
            seconds = share / gpu.bytes_s + (1 - share) / machine.ram_bytes_s
            rate = 1 / (shape.pass_nbytes * seconds)
    if rate is not None and gpu.bytes_s is not None:
        known = f"by its maker's {format_bytes(gpu.bytes_s)}/s"
        text += f"{',' if text else ':'} at most about {speed(rate)} {known}"
    return (
        f"{gpu.name}: llama.cpp can use it{text}. localrt's own kernels need an NVIDIA GPU, from "
        "GTX 16 or RTX 20 on; `localrt doctor` has the command that builds it"
    )


def gpu_room(machine: MachineProfile, budgets: Budgets) -> str:
    """Return ``", 7.8 of 8.6 GB of GPU memory"``; empty if none is used."""
    if machine.gpu is None or not budgets.vram:
        return ""
    return f", {part_of(budgets.vram, machine.gpu.vram_bytes)} of GPU memory"
