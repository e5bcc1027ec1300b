"""Draft heads on the driver: their steps, and the passes that verify their trees, are recorded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import OptionError
from localrt.drafts.head_draft import HeadDraft
from localrt.drafts.heads.dflash import BlockDecoder
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock
from localrt.offload.placement import Placement, Where
from localrt.offload.store import pack_store
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.driver import Cuda, device_of
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops.protocol import Batch, Span
from localrt.speculative.source import TreeSize
from localrt.speculative.tree import TokenTree
from localrt.speculative.tree_source import TreeSource
from tests.driver.inside.conftest import AT_ONCE, Kernels, StepByStep, on_gpu
from tests.engine.test_speculation import fixed, ids, info_of, run
from tests.models.test_heads import IDS, load_block
from tests.models.tiny import load_ours, relative_error, save_tiny, tokens
from tests.models.tiny_heads import BLOCK, TinyAssistant, TinyBlock, TinyDFlash, TinyEagle3
from tests.offload.placed import PLENTY, Model

pytestmark = pytest.mark.gpu
SLOW = pytest.mark.slow

CAPACITY = 200
LENGTH = 5  # tokens of an answer: some rounds come again, and are replayed
MOST_RECORDED = 8  # shapes of passes, of the head and of its target


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama, and a head that reads three of its layers."""
    folder = tmp_path_factory.mktemp("llama")
    config = save_tiny("llama", folder / "model").config
    (folder / "head").mkdir()
    TinyEagle3(folder / "head", config.hidden_size, config.vocab_size)
    return folder / "model", folder / "head"


@contextmanager
def opened(folder: Path, ops: CudaOps) -> Iterator[NativeEngine]:
    with closing(open_checkpoint(folder)) as checkpoint:
        decoder = load_decoder(checkpoint, ops, read_config(checkpoint, context=CAPACITY))
    with closing(NativeEngine(decoder, info_of("llama"))) as engine:
        yield engine


def head_of(engine: NativeEngine, folder: Path, own: Path | None) -> HeadDraft:
    loaded: Any = SimpleNamespace(engine=engine, path=folder, ctx=CAPACITY)
    return HeadDraft(loaded, own)


def answer(engine: NativeEngine, head: HeadDraft) -> tuple[list[int], list[np.ndarray]]:
    """Two answers' tokens, and all logits of the head."""
    made, forward = list[np.ndarray](), head.forward

    def seen(*args: Any, **options: Any) -> np.ndarray:
        made.append(forward(*args, **options))
        return made[-1]

    head.forward, said = seen, list[int]()
    for seed in (1, 2):
        session = engine.session(CAPACITY)
        drafts = fixed(head.source(session, Options(draft="mtp")), budget=6, depth=2)
        prompt = tokens(6, seed=seed)
        said += ids(run(engine, drafts, session=session, prompt=prompt, max_tokens=LENGTH))
    head.forward = forward
    return said, made


def check_same_bits(folder: Path, own: Path | None, gpu: Kernels) -> None:
    """Replayed as launched, from few recordings for many sizes of rounds and trees."""
    with opened(folder, StepByStep(device=AT_ONCE)) as engine:
        wanted, logits = answer(engine, head_of(engine, folder, own))
        plain = [
            ids(run(engine, None, prompt=tokens(6, seed=seed), max_tokens=LENGTH))
            for seed in (1, 2)
        ]
    assert "replay" not in gpu.launches
    with opened(folder, CudaOps(device="cuda")) as engine:
        head = head_of(engine, folder, own)
        seen, again = answer(engine, head)
        head.close()
    assert seen == wanted == [token for each in plain for token in each]
    assert len(again) == len(logits)
    assert all(map(np.array_equal, again, logits))
    assert gpu.launches.count("replay") > len(logits)
    assert gpu.launches.count("record") <= 2 * MOST_RECORDED


def test_eagle3(eagle3: tuple[Path, Path], gpu: Kernels) -> None:
    check_same_bits(*eagle3, gpu)


@SLOW
def test_block(gpu: Kernels, tmp_path: Path) -> None:
    """Of a model with recurrent layers, whose passes have the rows that they have."""
    TinyBlock("qwen3.5", tmp_path)
    check_same_bits(tmp_path, None, gpu)


def test_a_step(eagle3: tuple[Path, Path], gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy in, one graph, one copy out; and no memory is left when the head is closed."""
    folder, own = eagle3
    device: Any = device_of("cuda")
    calls, call, left = list[str](), Cuda.call, list[int]()

    def used() -> int:
        gc.collect()
        return int(device.persistent.nbytes - device.persistent.unused_nbytes)

    def noted(self: Cuda, name: str, *args: Any, **options: Any) -> Any:
        calls.append(name)
        return call(self, name, *args, **options)

    monkeypatch.setattr(Cuda, "call", noted)
    with opened(folder, CudaOps(device="cuda")) as engine:
        capture: Any = engine.decoder.ops.capture  # type: ignore[attr-defined]
        for length in (7, 12):  # what is kept for all comes with the first
            head, session = head_of(engine, folder, own), engine.session(CAPACITY)
            history = tokens(length)
            source = head.source(session, Options(draft="mtp"))
            assert isinstance(source, TreeSource)
            session.extend(history)
            for _ in range(5):  # computes what is known, then the last of it: seen, recorded
                calls.clear()
                passes = source.passes
                source.propose([*history, 5], TreeSize(8, 3))
                steps = source.passes - passes
            assert steps > 1
            step = ["cuCtxSetCurrent", "cuLaunchKernel", "cuGraphLaunch", "cuMemcpyDtoHAsync"]
            assert calls == [*step, "cuStreamSynchronize"] * steps
            assert capture.nbytes > 0
            held = used()
            head.close()
            del head, source, session
            left.append(used())
            assert left[-1] < held
            assert capture.nbytes == 0
    assert left[0] == left[1]


THERE = {"sliding": ({3}, "bf16"), "refused": ({3}, "int4")}
"""Layers on the GPU, and the format of keys and values. An assistant reads those of 3 and of 5."""


@pytest.mark.parametrize("case", THERE)
def test_assistant_of_a_split_target(case: str, gpu: Kernels, tmp_path: Path) -> None:
    """It reads the keys and values that attention on the GPU reads, and drafts what an assistant of
    a target in RAM drafts, up to what two processors' roundings change.
    """
    (there, kv_format), folder, own = THERE[case], tmp_path / "target", tmp_path / "own"
    TinyAssistant("gemma4-keys-as-values", folder, own)
    with closing(open_checkpoint(folder)) as source:
        store = pack_store(source, tmp_path / "store", tiler=tile_tensor)
    drafted: dict[str, list[TokenTree]] = {}
    with closing(Model(store, kv_format=kv_format)) as model:
        units = [unit.name for unit in model.store.manifest.units]
        names = {f"layers.{n}.{part}" for n in there for part in ("attention", "mlp")}
        plan = Placement(
            where={name: Where.VRAM if name in names else Where.RAM for name in units},
            kv=tuple("vram" if n in there else "ram" for n in range(6)),
        )

        def make(clock: Clock) -> CudaGpu:
            ops = CudaOps(device="cuda", kv_format=kv_format)
            return CudaGpu(clock, ops, CudaCopies(device="cuda"), capacity=PLENTY)

        with on_gpu(model, {}, placement=plan, make=make) as decoder:
            for place, each in (("RAM", model.resident), ("split", decoder)):
                engine = NativeEngine(each, info_of("gemma4"))
                if case == "refused" and place == "split":
                    with pytest.raises(OptionError, match=r"a GPU in int4: use .*int8"):
                        head_of(engine, folder, own)
                    return
                head = head_of(engine, folder, own)
                session, prompt = engine.session(CAPACITY), tokens(12)
                source, drafted[place] = head.source(session, Options()), []
                for count in (9, 10, 12, 8, 11):  # goes on, goes back, goes on
                    session.trim(min(count, len(session.tokens)))
                    if count > len(session.tokens):
                        session.extend(prompt[len(session.tokens) : count])
                    drafted[place].append(source.propose([*prompt[:count], 5], TreeSize(20, 2)))
                plain, drafts = ids(run(engine, None, max_tokens=LENGTH)), fixed(source, budget=6)
                assert ids(run(engine, drafts, session=session, max_tokens=LENGTH)) == plain
                head.close()
    for one, two in zip(*drafted.values(), strict=True):
        both = [dict(zip(map(tuple, paths(t)), t.scores, strict=True)) for t in (one, two)]
        alike = both[0].keys() & both[1].keys()
        assert len(alike) > 10
        assert max(abs(both[0][path] - both[1][path]) for path in alike) < 0.1


def paths(tree: TokenTree) -> list[list[int]]:
    """The tokens from the root to each node."""
    found: list[list[int]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


# -- heads against the reference -------------------------------------------------------------------


def test_dflash(tmp_path: Path, gpu: Kernels) -> None:
    """A block behind the context, whose rows see each other, and what the token before adds."""
    config = save_tiny("llama", tmp_path).config
    TinyDFlash(tmp_path / "own", config.hidden_size, config.vocab_size, rank=32, choices=9)
    plain, ours = load_ours(tmp_path), load_ours(tmp_path, CudaOps(device="cuda"), context=256)
    given = np.random.default_rng(1).standard_normal((9, 3 * config.hidden_size), np.float32)
    found = []
    for target in (plain, ours):
        _, head = load_block(tmp_path / "own", target)
        assert isinstance(head, BlockDecoder)
        cache = head.cache(32)
        head.context.forward(Batch.extend([(cache, IDS[:9])]), rows=[], target_features=given)
        span = Span(cache, BLOCK, np.ones((BLOCK, BLOCK), np.bool_))
        batch = Batch(np.array(IDS[:BLOCK]), np.arange(9, 9 + BLOCK), (span,))
        found.append(head.forward(batch))
        assert head.pairs is not None
        hidden = given[:BLOCK, : config.hidden_size]
        with head.ops.scope():
            found[-1] = head.pairs.add(head.ops, found[-1], IDS[:BLOCK], hidden)
    both = np.isfinite(found[0]) & np.isfinite(found[1])  # those chosen by either's roundings
    assert both.sum() > 0.8 * np.isfinite(found[0]).sum()
    assert relative_error(found[1][both], found[0][both]) < 0.03
