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

from localrt.drafts.head_draft import HeadDraft
from localrt.drafts.selection import Drafts
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.driver import Cuda, device_of
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.products import MOST_ROWS
from localrt.speculative.source import TreeSize
from localrt.speculative.tree_source import TreeSource
from tests.driver.inside.conftest import Kernels, once
from tests.driver.inside.gpus import StepByStep
from tests.driver.standin import AT_ONCE
from tests.engine.test_speculation import SAMPLINGS, fixed, ids, info_of, run
from tests.models.tiny import save_tiny, tokens
from tests.models.tiny_assistants import TinyAssistant
from tests.models.tiny_heads import TinyBlock, TinyEagle3

CAPACITY = 200
LENGTH = 7  # tokens of an answer: some rounds come again, and are replayed
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
        drafts = fixed(head.source(session, Options(draft="mtp")), budget=9, depth=3)
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


@once
def test_eagle3(eagle3: tuple[Path, Path], gpu: Kernels) -> None:
    check_same_bits(*eagle3, gpu)


@once
def test_assistant(gpu: Kernels, tmp_path: Path) -> None:
    """The host computes a part of its steps: they are not recorded, the target's passes are."""
    folder, own = tmp_path / "target", tmp_path / "own"
    TinyAssistant("gemma4-unified", folder, own)
    with opened(folder, StepByStep(device=AT_ONCE)) as engine:
        wanted, logits = answer(engine, head_of(engine, folder, own))
    with opened(folder, CudaOps(device="cuda")) as engine:
        seen, again = answer(engine, head_of(engine, folder, own))
    assert seen == wanted
    assert all(row.any() for row in logits)
    assert all(map(np.array_equal, again, logits))
    assert "replay" in gpu.launches


@once
def test_block(gpu: Kernels, tmp_path: Path) -> None:
    """Of a model with recurrent layers, whose passes have the rows that they have."""
    TinyBlock("qwen3.5", tmp_path)
    check_same_bits(tmp_path, None, gpu)


@once
def test_auto(eagle3: tuple[Path, Path], gpu: Kernels) -> None:
    """Repeated text is drafted on a GPU by default; answers do not change."""
    folder, _ = eagle3
    prompt = tokens(5) * 3
    with opened(folder, CudaOps(device="cuda")) as engine:
        target: Any = SimpleNamespace(engine=engine, path=folder, ctx=CAPACITY)
        drafts = Drafts(target, lambda name, target: head_of(engine, folder, None))
        speculation = drafts.speculation(Options(draft="auto"))
        assert speculation is not None
        assert speculation.tuner.most_rows == MOST_ROWS
        for kind in ("greedy", list(SAMPLINGS)[-1]):
            plain, drafted = (
                ids(run(engine, each, prompt=prompt, max_tokens=24, sampling=SAMPLINGS[kind]))
                for each in (None, speculation)
            )
            assert drafted == plain
    assert "replay" in gpu.launches


@once
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
