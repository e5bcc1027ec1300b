"""Loading onto a GPU: its rates are measured, and passes launch only what was compiled."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from localrt import system
from localrt.common.errors import CancelledError, LocalrtError
from localrt.common.progress import Progress
from localrt.loading import native
from localrt.loading.context import LoadContext
from localrt.loading.first_passes import run_first_passes
from localrt.loading.gpu import open_gpu
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import Checkpoint, TensorInfo, open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.offload.account import PREFILL_ROWS
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock
from localrt.offload.placement import Placement, Where, host_piece, link_piece
from localrt.planning.machine import typical_machine
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.device import Grid, emulate
from localrt.quant.cuda.memory import Pool, PoolBlock
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.programs import Program, kernels_folder
from localrt.quant.cuda.steps import BEST_LOGITS
from localrt.quant.formats import CODECS, pack, unpack
from localrt.quant.ops.protocol import Batch, Span
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import save_tiny
from tests.offload.placed import MODE, PLENTY, Model, needs_kernels, open_decoder, place_on_gpu
from tests.planner.models import RATE
from tests.store.synthetic import SyntheticCheckpoint

FORMATS = {"": "q4_k", "down_proj": "q6_k", "lm_head": "q6_k", "embed_tokens": "q4_k"}
LENGTHS = (1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 65, 300)


class FakeGpu:
    """Launches nothing, and keeps what it compiled in ``folder``. ``broken`` kernels do not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiled: dict[Program, None] = {}
        self.launches = 0
        self.broken = ""

    def prepare(self, program: Program) -> None:
        if program.name == self.broken:
            raise LocalrtError(f"the kernel {program.name} does not compile")
        self.compiled[program] = None
        (self.folder / f"{len(self.compiled)}.cubin").touch()

    def launch(self, program: Program, grid: Grid, threads: int, args: ctypes.Structure) -> None:
        self.launches += 1
        if program not in self.compiled:
            self.prepare(program)


class GpuOps(CudaOps):
    """On a GPU with room for everything."""

    def free_memory(self) -> int:
        return PLENTY


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGpu]:
    """What kernels would have written is zero: routers then choose, and nothing is not a number."""
    take = Pool.take

    def zeroed(pool: Pool, nbytes: int) -> PoolBlock:
        block = take(pool, nbytes)
        ctypes.memset(block.address, 0, nbytes)
        return block

    monkeypatch.setattr(Pool, "take", zeroed)
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    folder = kernels_folder(tmp_path / "cache")
    folder.mkdir(parents=True)
    gpu = FakeGpu(folder)
    before = emulate(gpu)
    yield gpu
    emulate(before)


def check(gpu: FakeGpu, decoder: Decoder) -> None:
    """Passes of any length compile nothing."""
    before = dict(gpu.compiled)
    assert BEST_LOGITS in before  # that is for recorded passes
    for rows in LENGTHS:
        cache = decoder.cache(rows)
        wanted = [rows - 1] if rows > 64 else None
        batch = Batch.extend([(cache, [1] * rows)])
        decoder.forward(batch, rows=wanted)
        assert gpu.compiled == before
        if rows == 4:
            assert cache.trim(0) == 0
            tree = Span(cache, rows, np.tri(rows, dtype=np.bool_))
            decoder.forward(replace(batch, spans=(tree,)))
    assert gpu.compiled == before


class Packed:
    """A checkpoint whose matrices are in ``format_`` where they can be."""

    def __init__(self, inner: Checkpoint, format_: str) -> None:
        self._inner, self._codec = inner, CODECS[format_]
        self.tensors = {name: self._info(info) for name, info in inner.tensors.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _info(self, info: TensorInfo) -> TensorInfo:
        fits = len(info.shape) == 2 and info.shape[1] % 32 == 0
        return replace(info, format=self._codec.format) if fits else info

    def blocks(self, name: str) -> Iterator[Any]:
        whole = self._inner.read(name)
        if self.tensors[name].format != self._codec.format:
            yield whole
            return
        yield replace(pack(unpack(whole), self._codec.format), name=name)


def load_whole(source: Checkpoint, **options: Any) -> Decoder:
    decoder = load_decoder(source, CudaOps(device="cpu"), read_config(source))
    run_first_passes(decoder, LoadContext(**options), most=PREFILL_ROWS)
    return decoder


def synthetic(folder: Path, formats: Mapping[str, str] = FORMATS) -> Any:
    return SyntheticCheckpoint(folder, formats=formats, hidden=256, inner=512)


@pytest.mark.parametrize(
    ("formats", "fine"),
    [(FORMATS, True), ({"": "nvfp4", "o_proj": "bf16", "v_proj": "q8_0"}, False)],
)
def test_the_first_passes_compile_nothing(
    formats: dict[str, str],
    fine: bool,
    gpu: FakeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two formats, of stacked matrices in several, of some that no kernel reads."""
    monkeypatch.setattr(native, "make_ops", lambda *_, **__: GpuOps(device="cpu", fine=fine))
    source = synthetic(tmp_path, formats)
    engine, _ = native.load_native(source, LoadOptions(device="cuda"), LoadContext())
    with closing(engine):
        check(gpu, cast(Any, engine).decoder)


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        *(("gpt-oss", "int4-g32"), ("kimi-linear", None), ("gemma4", "int4-g32")),
        *(
            pytest.param(name, format_, marks=pytest.mark.slow)
            for name in ("qwen2-moe", "deepseek-v2", "nemotron-h-moe", "lfm3", "gemma4-unified")
            for format_ in ("int4-g32", None)
        ),
    ],
)
def test_mixtures_latents_and_states(
    name: str, format_: str | None, gpu: FakeGpu, tmp_path: Path
) -> None:
    save_tiny(
        name, tmp_path, layers=None if name.startswith("gemma4") else 2
    )  # the last share keys
    with closing(open_checkpoint(tmp_path)) as model:
        check(gpu, load_whole(model if format_ is None else cast(Any, Packed(model, format_))))


@needs_kernels
@pytest.mark.parametrize("split", [{}, {"layers.0.mlp": (0.5, 0.25)}, {"layers.0.mlp": (0.5, 0.0)}])
def test_part_on_gpu(split: dict[str, tuple[float, float]], gpu: FakeGpu, tmp_path: Path) -> None:
    """Attention of one layer, MLPs of long passes of the other, the head; pieces of an MLP."""
    from localrt.offload.store import pack_store
    from localrt.quant.formats.tiled import tile_tensor

    folder = pack_store(synthetic(tmp_path / "model"), tmp_path / "store", tiler=tile_tensor)
    with closing(Model(folder)) as model:
        where = {"layers.0.attention": Where.VRAM}
        where |= {u.name: Where.LINK for u in model.store.manifest.units if "head" in u.name}
        for name, (_, link) in split.items():
            where |= {name: Where.VRAM, host_piece(name): Where.RAM}
            where |= {link_piece(name): Where.LINK} if link else {}
        plain = place_on_gpu(model.store, where)
        placement = Placement(
            where={**plain.where, **where},
            kv=plain.kv,
            ram_ring=plain.ram_ring,
            vram_ring=plain.vram_ring,
            crossing=frozenset(["layers.1.mlp", *map(host_piece, split)]),
            gpu_rows=70,
            split=split,
        )
        ops, clock = CudaOps(device="cpu"), Clock()
        decoder = open_decoder(
            model.store,
            model.ops,
            model.config,
            placement,
            mode=MODE,
            budget=PLENTY,
            gpu=CudaGpu(clock, ops, CudaCopies(device="cpu"), capacity=PLENTY),
            clock=clock,
        )
        with closing(decoder):
            run_first_passes(decoder, LoadContext(), most=PREFILL_ROWS, longest=70)
            counts = decoder.weights.counts()
            assert counts is not None
            assert (counts.passes, counts.decode_passes, counts.link_bytes) == (0, 0, 0)
            assert not any(counts.busy_s.values())
            check(gpu, decoder)


def test_progress(gpu: FakeGpu, tmp_path: Path) -> None:
    source, steps = synthetic(tmp_path), list[Progress]()
    load_whole(source, progress=steps.append)
    assert {(step.stage, step.unit) for step in steps} == {("compile", "passes")}
    assert [step.done for step in steps] == list(range(len(steps)))
    assert {step.total for step in steps} == {len(steps)} != {1}


def test_logits_of_the_first_passes(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rows where drafts could be checked, else of the last one."""
    asked: list[tuple[int, list[int] | None]] = []
    forward = Decoder.forward

    def noted(decoder: Decoder, batch: Batch, **options: Any) -> Any:
        asked.append((len(batch.tokens), options["rows"]))
        return forward(decoder, batch, **options)

    monkeypatch.setattr(Decoder, "forward", noted)
    load_whole(synthetic(tmp_path))
    assert max(asked)[0] > 64 > min(asked)[0]
    assert all(rows == (None if count <= 64 else [count - 1]) for count, rows in asked)


def test_kept_kernels(gpu: FakeGpu, tmp_path: Path) -> None:
    """Where the disk has the kernels, one row shows it."""
    source, steps = synthetic(tmp_path), list[Progress]()
    decoder = load_whole(source)
    before = gpu.launches
    decoder.forward(Batch.extend([(decoder.cache(1), [0])]))
    one = gpu.launches - before
    load_whole(source, progress=steps.append)
    assert gpu.launches == before + 2 * one
    assert len(steps) == 1


def test_compile_errors(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Decoder] = []
    monkeypatch.setattr(Decoder, "close", lambda decoder: closed.append(decoder))
    source = synthetic(tmp_path)
    gpu.broken = "attention"
    with pytest.raises(LocalrtError, match="the kernel attention does not compile"):
        load_whole(source)
    gpu.broken, cancel = "", threading.Event()
    with pytest.raises(CancelledError):
        load_whole(source, cancel=cancel, progress=lambda step: cancel.set())
    assert len(closed) == 2


def test_other_processors(gpu: FakeGpu, tmp_path: Path) -> None:
    source, steps = synthetic(tmp_path), list[Progress]()
    decoder = load_decoder(source, cast(Any, TorchOps()), read_config(source))
    run_first_passes(decoder, LoadContext(progress=steps.append), most=PREFILL_ROWS)
    assert not steps


def test_why_not_our_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "make_ops", lambda *_, **__: TorchOps())
    monkeypatch.setattr(native, "why_not_our_kernels", lambda ops, attention, device: "no compiler")
    context = LoadContext()
    for format_ in (None, "bf16"):  # which is torch's anyway
        options = LoadOptions(device="cuda", format=format_, ctx=64)
        source = synthetic(tmp_path)
        native.load_native(source, options, context)[0].close()
    assert context.notes == ["no compiler"]


def test_open_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from localrt.quant.cuda import cuda_memory, measuring
    from localrt.quant.cuda.ops import CudaOps

    asked: list[set[str]] = []

    def rates(
        ops: CudaOps, formats: set[str], *, host: Any, on_step: Callable[[int, int], None]
    ) -> Any:
        asked.append(formats)
        if len(asked) > 1:
            raise LocalrtError("the GPU refuses a kernel")
        on_step(1, 4)
        return RATE

    monkeypatch.setattr(measuring, "gpu_rates", rates)
    monkeypatch.setattr(cuda_memory, "_SAMPLE", 1 << 20)
    ops, seen = CudaOps(device="cpu"), list[Progress]()
    monkeypatch.setattr(ops, "free_memory", lambda: 8 << 30)
    options: dict[str, Any] = {"threads": 1, "gpu_memory": None, "formats": {"q4_k"}}
    gpu = open_gpu(ops, **options, progress=seen.append)
    machine = gpu.on(typical_machine())
    assert asked == [{"q4_k"}]
    assert seen == [Progress("measure", 1, 4, "rates")]
    assert machine.link_bytes_s == RATE.to_gpu_bytes_s
    assert machine.link_latency_s == RATE.crossing_s
    assert machine.gpu is not None
    assert machine.gpu.kernels["int4-g32"].at(8) == RATE.products["int4-g32"][1]
    assert machine.sources["gpu"] == "measured"
    assert machine.sources["kernels"] == "typical"
    # A copy of bytes is measured even so.
    ruled = open_gpu(ops, **options).on(typical_machine()).gpu
    assert ruled is not None
    assert not ruled.kernels
    assert ruled.flops == 100 * ruled.bytes_s


def test_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that its driver would move to RAM is not used, and half of RAM may be pinned."""
    from localrt.loading import gpu
    from localrt.offload import memory
    from localrt.quant.cuda.cuda_memory import CudaCopies
    from localrt.quant.cuda.ops import CudaOps

    gib, kept, made = 1 << 30, list[int](), list[CudaCopies]()
    start = CudaCopies.__init__

    def noted(copies: CudaCopies, *args: Any, **options: Any) -> None:
        made.append(copies)
        start(copies, *args, **options)

    monkeypatch.setattr(gpu, "_rates", lambda *_: RATE)
    monkeypatch.setattr(memory, "memory_state", lambda: memory.MemoryState(32 * gib, 20 * gib))
    monkeypatch.setattr(CudaCopies, "__init__", noted)
    monkeypatch.setattr(CudaCopies, "total_nbytes", 8 * gib)
    monkeypatch.setattr(CudaCopies, "keep_free", lambda _, nbytes: kept.append(nbytes))
    ops = CudaOps(device="cpu")
    monkeypatch.setattr(ops, "free_memory", lambda: 7 * gib)
    opened = {}
    for platform, pinned, left in (("linux", None, 0), ("windows", 16 * gib, gib // 2)):
        monkeypatch.setattr(system, "pinnable_nbytes", lambda ram, pinned=pinned: pinned)
        monkeypatch.setattr(system, "spilling_nbytes", lambda vram, left=left: left)
        opened[platform] = open_gpu(ops, threads=1, gpu_memory=None)
    assert kept == [gib // 2]
    assert [copies._may_pin for copies in made] == [None, 16 * gib]
    assert opened["linux"].free_memory() == 7 * gib
    assert opened["windows"].free_memory() == 7 * gib - gib // 2
    assert opened["windows"].capacity == opened["linux"].capacity - gib // 2
