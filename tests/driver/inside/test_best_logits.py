"""Passes that leave all logits but the best ones on the GPU: the same answers, and fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localrt.engine.batch.sequence import generate
from localrt.engine.native.engine import NativeEngine
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from localrt.models.registry import load_decoder
from localrt.offload.placement import Where
from localrt.quant.cuda.driver import Cuda
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.protocol import Batch, is_best
from localrt.speculative.acceptance import TreePass
from localrt.speculative.tree import TokenTree
from tests.driver.inside.conftest import Kernels
from tests.driver.inside.gpus import made, on_gpu
from tests.engine.test_speculation import info_of
from tests.offload.placed import Model, needs_kernels, pack_synthetic, passing, tokens
from tests.ops.oracles import best_of

pytestmark = [needs_kernels, pytest.mark.gpu]

VOCAB = 2100
LENGTH = 8
RANDOM = Sampling(temperature=1.5, top_p=0.9, min_p=0.0, seed=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Two layers and a head of five slices."""
    folder = pack_synthetic(
        tmp_path_factory.mktemp("llama"),
        vocab=VOCAB,
        hidden=128,
        inner=64,
        layers=2,
        formats={"": "int4-g32"},
    )
    with closing(Model(folder)) as model:
        yield model


@pytest.fixture
def engine(model: Model, gpu: Kernels) -> Iterator[NativeEngine]:
    decoder = load_decoder(model.store, CudaOps(device="cuda"), model.config)
    with closing(NativeEngine(decoder, replace(info_of("llama"), vocab_size=VOCAB))) as engine:
        yield engine


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy to the host."""
    seen, plain = list[int](), Cuda.copy_out

    def copy_out(device: Cuda, values: Any, *where: Any) -> None:
        seen.append(values.nbytes)
        plain(device, values, *where)

    monkeypatch.setattr(Cuda, "copy_out", copy_out)
    return seen


def answer(engine: NativeEngine, session: Any = None, **options: Any) -> list[int]:
    request = Request(prompt=tokens(5), max_tokens=LENGTH, **options)
    chunks = generate(session or engine.session(64), None, request)
    return [token for chunk in chunks for token in chunk.token_ids]


def all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "best_only", property(lambda request: False))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), RANDOM], ids=["greedy", "random"])
def test_the_same_answer_from_fewer_bytes(
    engine: NativeEngine, copied: list[int], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer(engine, sampling=sampling)
    # The first passes of each kind, which are not recorded.
    assert copied.count(4 * VOCAB) <= 2
    copied.clear()
    assert answer(engine, sampling=sampling) == found
    assert copied == []
    all_logits(monkeypatch)
    assert answer(engine, sampling=sampling) == found
    assert copied == LENGTH * [4 * VOCAB]


def test_who_needs_all_logits_gets_them(engine: NativeEngine, gpu: Kernels) -> None:
    """On the same session; what was recorded with the best ones has all of them too."""
    session = engine.session(64)
    found = [answer(engine, session, sampling=RANDOM, logprobs=each) for each in (0, None, 0, None)]
    assert found == 4 * found[:1]
    # A prompt and single tokens, each without the best and with them.
    assert gpu.launches.count("record") <= 4


def test_trees(engine: NativeEngine) -> None:
    tree = TokenTree.of([7, 8, 9], [-1, 0, 0], [-1.0, -2.0, -3.0], "own")
    seen = []
    for best_only in (False, True):
        session = engine.session(64)
        session.best_only = best_only
        session.extend(tokens(5))
        for _ in range(3):
            logits = session.extend_tree(4, tree)
        assert is_best(logits) == best_only
        seen.append(logits)
    every, best = seen
    assert best.tobytes() == best_of(every).tobytes()
    assert TreePass(tree, best).likeliest() == TreePass(tree, every).likeliest()


def test_parts_of_a_head_give_all_logits(model: Model, gpu: Kernels) -> None:
    """Where the whole head is in one piece on the GPU, a segment finds the best."""
    whole = dict.fromkeys(passing(model.store), Where.VRAM)
    heads = [name for name in whole if "head" in name]
    for where in (whole, whole | {heads[1]: Where.RAM}):
        with on_gpu(model, where, slack=(2, 2), make=made("cuda")) as decoder:
            cache, seen = decoder.cache(64), []
            for best_only in (False, False, True, False):
                batch = Batch.extend([(cache, [5])])
                seen.append(decoder.forward(replace(batch, best_only=best_only)))
                cache.trim(0)
        assert is_best(seen[2]) == (where is whole)
        wanted = best_of(seen[1]) if where is whole else seen[1]
        assert seen[2].tobytes() == wanted.tobytes()
        assert np.array_equal(seen[3], seen[1])
