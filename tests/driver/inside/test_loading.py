"""``localrt.load`` on the driver: whole models, bit for bit as where all is done at once; models
that share a GPU, and KV caches that leave a full one.
"""

from __future__ import annotations

import gc
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import localrt
from localrt.common.errors import MemoryBudgetError
from localrt.common.progress import Progress
from localrt.loading import native, placing
from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.offload.account import SPARE_VRAM_NBYTES
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.placement import Where
from localrt.offload.reading.files import StoreFiles
from localrt.planning.forecast import Forecast, PlanRequest
from localrt.quant import choose
from localrt.quant.cuda import driver as calling
from localrt.quant.cuda.programs import Program, kernels_folder
from localrt.server import pool as pooling
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool
from tests.conftest import write_byte_tokenizer, write_tiny_model
from tests.driver.inside.conftest import AT_ONCE, Kernels, StepByStep, all_in_ram, forget, quantized
from tests.driver.standin import Driver, image
from tests.inside import core_of, engine_of
from tests.models.tiny import CONFIGS, MIXTURES, random_model, save_tiny
from tests.offload.placed import needs_kernels, place_on_gpu, tokens
from tests.waits import wait_for

pytestmark = [needs_kernels, pytest.mark.usefixtures("given_rates")]


SLOW = pytest.mark.slow
Both = Callable[..., localrt.ModelInfo]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return quantized(write_tiny_model(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of eight experts."""
    folder = tmp_path_factory.mktemp("moe")
    save_tiny("qwen3-moe", folder, vocab=write_byte_tokenizer(folder))
    return quantized(folder)


def talk(model: localrt.Model) -> list[np.ndarray]:
    """Logits of a prompt, tokens, what is taken back, and what follows from an answer."""
    engine = engine_of(model)
    if engine.is_mixture and model.info.streamed:
        wait_for(partial(all_in_ram, engine))
    session = engine.session(64)
    seen = [session.extend(tokens(9)), *(session.extend([token]) for token in tokens(4, seed=1))]
    session.trim(5)
    seen += [session.extend([token]) for token in tokens(4, seed=2)]
    answer = model.generate("ab", max_tokens=8, ignore_eos=True, temperature=0.0)
    return [*seen, np.array(answer.token_ids)]


@pytest.fixture
def on_both(gpu: Kernels, measured: None, monkeypatch: pytest.MonkeyPatch) -> Both:
    """A model loaded for a GPU, which must say what one says whose work is done at once."""

    def both(path: Path, device: str = "cuda") -> localrt.ModelInfo:
        seen, make_ops = [], choose.make_ops
        for made in (lambda *_, **__: StepByStep(device=AT_ONCE), make_ops):
            monkeypatch.setattr(native, "make_ops", made)
            with localrt.load(path, device=device, draft="off", ctx=64) as model:
                seen.append(talk(model))
                info = model.info
        for theirs, ours in zip(*seen, strict=True):
            assert np.array_equal(ours, theirs)
        return info

    return both


Places = Callable[[list[str]], dict[str, Where]]
"""From a store's units to where they are; the others are in RAM."""
Place = Callable[[Path, Places], None]


def by_turns(*turns: Where) -> Places:
    """Units that may pass through a ring in these places."""

    def places(units: list[str]) -> dict[str, Where]:
        names = [name for name in units if name.startswith(("layers", "head"))]
        return {name: turns[n % len(turns)] for n, name in enumerate(names)}

    return places


EVERYWHERE = by_turns(Where.LINK, Where.SSD, Where.VRAM, Where.SSD_LINK, Where.RAM)


def experts_on_gpu(share: float) -> Places:
    """A share of the experts on the GPU, and all that is between them."""

    def places(units: list[str]) -> dict[str, Where]:
        experts = [name for name in units if ".expert." in name]
        where = dict.fromkeys(units, Where.VRAM) | dict.fromkeys(("embedding", "norm"), Where.RAM)
        return where | dict.fromkeys(experts[round(share * len(experts)) :], Where.RAM)

    return places


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Have plans place the units of a store so."""

    def placed(path: Path, places: Places) -> None:
        with closing(open_checkpoint(path)) as checkpoint:
            assert isinstance(checkpoint, StoreCheckpoint)
            where = places([unit.name for unit in checkpoint.manifest.units])
            placement = place_on_gpu(checkpoint, where, slack=(2, 2))
        plan = placing.first_plan

        def first_plan(request: PlanRequest, rows: int) -> Forecast:
            return replace(plan(request, rows), placement=placement)

        monkeypatch.setattr(placing, "first_plan", first_plan)
        monkeypatch.setattr(native, "memory_left", lambda *_: (0, ""))  # nothing is resident

    return placed


@pytest.mark.parametrize("kind", ["store", pytest.param("mixture", marks=SLOW)])
def test_resident(on_both: Both, kind: str, gpu: Kernels, request: pytest.FixtureRequest) -> None:
    info = on_both(request.getfixturevalue(kind))
    assert (info.device, info.streamed) == ("cuda:0", False)
    assert gpu.launches.count("replay") > 10


@pytest.mark.usefixtures("gpu", "measured")
def test_no_room_is_one_line(store: Path) -> None:
    with pytest.raises(MemoryBudgetError, match=r"^the GPU has no room for weights: 596 MB of "):
        localrt.load(store, device="cuda", gpu_memory="50MB", draft="off", ctx=64)


def test_streamed(on_both: Both, place: Place, store: Path, gpu: Kernels) -> None:
    place(store, EVERYWHERE)
    info = on_both(store, "cuda:1")
    assert (info.device, info.streamed) == ("cuda:1", True)
    assert gpu.launches.count("replay") > 10


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    "name", ["streamed", *(pytest.param(n, marks=SLOW) for n in ("resident", "hybrid"))]
)
def test_first_answer_compiles_nothing(
    gpu: Kernels,
    place: Place,
    store: Path,
    mixture: Path,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = kernels_folder(tmp_path / "cache")
    compiled: list[Program] = []

    def machine_code(program: Program, capability: int, folder: Path) -> bytes:
        if program not in compiled:
            compiled.append(program)
            kept.mkdir(parents=True, exist_ok=True)
            (kept / f"{len(compiled)}.cubin").touch()
        return image(program)

    monkeypatch.setattr(calling, "machine_code", machine_code)
    path = mixture if name == "hybrid" else store
    if name != "resident":
        place(path, EVERYWHERE if name == "streamed" else experts_on_gpu(0.5))
    steps: list[Progress] = []
    options: dict[str, Any] = {"device": "cuda", "draft": "off", "progress": steps.append}
    with localrt.load(path, ctx=256, **options) as model:
        before = list(compiled)
        for words in (2, 9, 20, 70):
            model.generate("ab " * words, max_tokens=6, ignore_eos=True, temperature=0.0)
        assert compiled == before
    assert [step.stage for step in steps].count("compile") > 7
    steps.clear()
    forget()
    localrt.load(path, ctx=256, **options).close()
    assert [step.stage for step in steps].count("compile") == 1
    assert compiled == before


# -- models that share a GPU -----------------------------------------------------------------------

GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
TEXT = "Count from one to twenty."


class Shared:
    """A pool of two models on one GPU, with room for the weights of both, or of one at a time."""

    def __init__(self, store: Path, driver: Driver, patch: pytest.MonkeyPatch, *, both: bool):
        self.store, self.loaded, self.said = store, list[str](), list[str]()
        with localrt.load(store, device="cuda", draft="off", ctx=256) as whole:
            self.alone = whole.generate(TEXT, **GREEDY).token_ids
        with localrt.load(store, device="cuda", draft="off", ctx=256, shrinkable=True) as one:
            assert one.generate(TEXT, **GREEDY).token_ids == self.alone
            use = one.gpu_use
        del whole, one
        assert use is not None
        assert use.leavable > 0 == use.missing
        self.total, self.nbytes = 3 * use.used, use.leavable
        if not both:
            driver.set(memory=SPARE_VRAM_NBYTES + self.total)
            for name in ("_RESERVE", "_BESIDE_ON_GPU"):
                patch.setattr(pooling, name, 1 << 30)  # everybody wants all of it
        files = [LocalFile(name, name, self.nbytes) for name in "ab"]
        self.pool = ModelPool(self.load, lambda: files, ServeOptions(), on_change=self.said.append)

    def load(
        self, name: str, shrinkable: bool, cancel: threading.Event, on_gpu: int
    ) -> localrt.Model:
        self.loaded.append(name)
        gc.collect()  # what closed models have left
        return localrt.load(self.store, device="cuda", draft="off", ctx=256, shrinkable=shrinkable)

    @property
    def gpus(self) -> list[Any]:
        """The lane of each model's GPU."""
        return [engine_of(one.model).weights.gpu for one in self.pool.at_work()]

    async def ask(self, name: str) -> tuple[int, ...]:
        self.pool._slot(name).contested = True  # as once it has been unloaded for the other
        async with self.pool.using(name) as served:
            use = served.model.gpu_use
            assert use is not None
            assert (use.leavable, use.missing) == (self.nbytes, 0)
            tokens: tuple[int, ...] = (await served.live.agenerate(TEXT, **GREEDY)).token_ids
            return tokens


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes are read of stores."""
    counted, read_into = Counter[str](), StoreFiles.read_into

    def noted(files: StoreFiles, name: str, offset: int, out: Any) -> None:
        counted[name] += out.nbytes
        read_into(files, name, offset, out)

    monkeypatch.setattr(StoreFiles, "read_into", noted)
    return counted


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What all models have taken of the GPU together, whenever one takes more."""
    gpus, seen, reserve = WeakSet[CudaGpu](), list[int](), CudaGpu.set_reserved

    def noted(gpu: CudaGpu, nbytes: int) -> None:
        reserve(gpu, nbytes)
        gpus.add(gpu)
        seen.append(sum(each.used + each.reserved for each in gpus if each.used))

    monkeypatch.setattr(CudaGpu, "set_reserved", noted)
    return seen


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("kind", "both"),
    [
        pytest.param("store", True, marks=SLOW),
        ("store", False),
        pytest.param("mixture", False, marks=SLOW),
    ],
)
async def test_by_turns(
    gpu: Kernels,
    driver: Driver,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    reads: Counter[str],
    peaks: list[int],
    kind: str,
    both: bool,
) -> None:
    """Each answers as it does alone. Nothing is loaded or read again, and the GPU is never full."""
    shared = Shared(request.getfixturevalue(kind), driver, monkeypatch, both=both)
    with closing(shared.pool):
        for name in "abab":
            assert await shared.ask(name) == shared.alone
        for counted in (reads, peaks, shared.said):
            counted.clear()
        links = [one.gpu.link_bytes for one in shared.gpus]
        for name in "ababab":
            assert await shared.ask(name) == shared.alone
        copied = [
            one.gpu.link_bytes - before for one, before in zip(shared.gpus, links, strict=True)
        ]
        assert copied == [0, 0] if both else [3 * shared.nbytes] * 2
        assert shared.loaded == ["a", "b"]
        assert not reads
        assert max(peaks) <= (8 << 30 if both else shared.total)
        left = [text for text in shared.said if "of GPU memory, and keeps the rest" in text]
        assert len(left) == (0 if both else 6)


# -- KV caches of idle conversations ---------------------------------------------------------------

QUESTIONS = ["What is the sea made of? " * 11, "Name four trees. " * 4]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALRT_KV_DISK", "1GB")
    return tmp_path


def packed(folder: Path, name: str) -> Path:
    """A store of a random model."""
    config = (CONFIGS | MIXTURES)[name]()
    (folder / "model").mkdir()
    config.vocab_size = write_byte_tokenizer(folder / "model")
    config.max_position_embeddings = 2048
    random_model(config).save_pretrained(folder / "model")
    return quantized(folder / "model")


def on_disk(folder: Path) -> bool:
    return any(path.is_file() for path in (folder / "cache" / "kv").rglob("*"))


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("llama", {}, id="bf16", marks=SLOW),
        pytest.param("llama", {"kv_format": "int4", "shrinkable": True}, id="placed"),
        pytest.param("qwen3.5", {"kv_format": "int8"}, id="states", marks=SLOW),
    ],
)
def test_full_gpu(
    gpu: Kernels, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    """Conversations that take turns push each other out. They go on as if they had stayed, and read
    only what is new.
    """
    store = packed(folder, name)
    monkeypatch.setattr("localrt.engine.batch.schedule._WORTH_SAVING_S", 0.0)

    def talk(room: str) -> list[tuple[tuple[int, ...], int]]:
        said, texts = [], list(QUESTIONS)
        if room != "gpu":
            monkeypatch.setattr("localrt.service.live.kv_room", lambda engine: 0)
        with (
            localrt.load(store, device="cuda", draft="off", ctx=1024, **options) as model,
            model.live() as live,
        ):
            if room == "disk":
                core_of(model).saver._prompts._room = lambda: 0
            memory, parked = engine_of(model).weights.memory, list[int]()
            for turn in range(4):
                spare, before = memory.spare, live.stats().parked_bytes
                answer = live.generate(texts[turn % 2], **{**GREEDY, "max_tokens": 3})
                said.append((answer.token_ids, answer.metrics.cached_tokens))
                texts[turn % 2] += answer.text + f" And {turn}?"
                parked.append(live.stats().parked_bytes)
                if memory.streams and turn > 1:
                    assert memory.spare + parked[-1] == spare + before
            assert (min(parked[1:]) > 0) is (max(parked) > 0) is (room == "ram")
            assert on_disk(folder) is (room == "disk")
        assert on_disk(folder) is (room != "gpu")  # what was in RAM too, for the next time
        shutil.rmtree(folder / "cache" / "kv", ignore_errors=True)
        return said

    stayed = talk("gpu")
    assert all(cached > 60 for _, cached in stayed[2:])
    assert talk("ram") == stayed
    assert talk("disk") == stayed
