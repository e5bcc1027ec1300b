"""Draft heads of targets in several memories, and of a small trained model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.common.errors import OptionError
from localrt.drafts.head_draft import HeadDraft
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.kv.cache import KvTier
from localrt.offload.store import pack_store
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats.tiled import tile_tensor
from tests.conftest import needs_kernels
from tests.engine.test_speculation import fixed, ids, info_of, run
from tests.inside import engine_of
from tests.models.tiny import tokens
from tests.models.tiny_heads import TinyAssistant
from tests.offload.placed import Model, passing

pytestmark = needs_kernels

CAPACITY = 300
PROMPT = tokens(270)  # more than a block of a cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of six layers in a store, and its assistant."""
    folder = tmp_path_factory.mktemp("gemma4")
    TinyAssistant("gemma4-keys-as-values", folder / "target", folder / "own")
    with closing(open_checkpoint(folder / "target")) as source:
        pack_store(source, folder / "store", tiler=tile_tensor)
    return folder


@pytest.fixture
def model(folder: Path, request: Any) -> Iterator[Model]:
    with closing(Model(folder / "store", kv_format=getattr(request, "param", "bf16"))) as model:
        yield model


def head_of(engine: NativeEngine, folder: Path) -> HeadDraft:
    target: Any = SimpleNamespace(engine=engine, path=folder / "store", ctx=CAPACITY)
    return HeadDraft(target, folder / "own")


def answers(engine: NativeEngine, head: HeadDraft | None) -> list[int]:
    """Two answers of one session, the second of which goes back to before a block's end."""
    said, session = list[int](), engine.session(CAPACITY)
    drafts = head and fixed(head.source(session, Options()), budget=9, depth=3)
    for prompt in (PROMPT, [*PROMPT[:250], 7, 8]):
        said += ids(run(engine, drafts, session=session, prompt=prompt, max_tokens=8))
    return said


def drafted(engine: NativeEngine, folder: Path) -> tuple[list[int], list[np.ndarray]]:
    """Answers with drafts, and all logits of the assistant."""
    seen = list[np.ndarray]()
    with closing(head_of(engine, folder)) as head:
        forward = head.forward

        def noted(*args: Any, **options: Any) -> np.ndarray:
            seen.append(forward(*args, **options))
            return seen[-1]

        head.forward = noted
        return answers(engine, head), seen


@pytest.mark.parametrize("on_ssd", [None, (0, 1, 2, 4)])
def test_streamed(
    on_ssd: tuple[int, ...] | None, folder: Path, model: Model, tmp_path: Path
) -> None:
    """The same logits as with a resident target, and with other layers' keys on the SSD."""
    resident = NativeEngine(model.resident, info_of("gemma4"))
    wanted, logits = drafted(resident, folder)
    assert wanted == answers(resident, None)
    with ExitStack() as opened:
        options: dict[str, Any] = {}
        if on_ssd is not None:
            ops, specs = NativeOps(threads=1), model.config.attending
            places: Any = ["ssd" if n in on_ssd else "ram" for n in range(len(specs))]
            tier = KvTier(specs, places, tmp_path, capacity=CAPACITY, kv_format="bf16")
            ops.kv_maker, model.ops, options = tier, ops, {"kv_tier": tier}
        decoder = opened.enter_context(model.placed(passing(model.store), **options))
        engine = NativeEngine(decoder, resident.info)
        said, seen = drafted(engine, folder)
        assert said == wanted == answers(engine, None)
    assert len(seen) == len(logits)
    assert all(map(np.array_equal, seen, logits))


def test_keys_on_the_ssd(folder: Path, model: Model, tmp_path: Path) -> None:
    specs, places = model.config.attending, ("ram",) * 5 + ("ssd",)
    model.ops.kv_maker = KvTier(specs, places, tmp_path, capacity=CAPACITY, kv_format="bf16")  # type: ignore[arg-type]
    with closing(model.ops.kv_maker):  # type: ignore[arg-type]
        engine = NativeEngine(model.resident, info_of("gemma4"))
        with pytest.raises(OptionError, match=r"no keys of the SSD .*: use a smaller ctx"):
            head_of(engine, folder)


def test_budget(folder: Path) -> None:
    """Through the API, before and after the target's weights are taken from RAM."""
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
    own, prompt = str(folder / "own"), PROMPT[:40]
    with localrt.load(folder / "target", draft=own, shrinkable=True, ctx=CAPACITY) as model:
        plain = model.generate(token_ids=prompt, draft="off", **options)
        for leave in (False, True):
            if leave:
                assert model.leave_ram(1 << 40) > 0
            ours = model.generate(token_ids=prompt, draft=own, tree_budget=8, **options)
            assert ours.token_ids == plain.token_ids
            assert "head, 8 draft tokens" in str(ours.metrics.speculation)
            assert (engine_of(model).counts().ssd_read_bytes > 0) is leave


FOLDER = Path(__file__).parents[1] / "data/hybrid"
ROWS = (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
PROMPTS = [json.loads(row)["prompt"] for row in ROWS]


@pytest.fixture(scope="module")
def trained() -> Iterator[localrt.Model]:
    with localrt.load(FOLDER, device="cpu", ctx=512, draft="mtp", threads=1) as loaded:
        yield loaded


def test_drafts_are_accepted(trained: localrt.Model) -> None:
    """Chains of three: plain decoding's tokens, about two of them a pass."""
    brought = []
    for prompt in PROMPTS[:2]:
        options = {"raw": True, "max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
        plain = trained.generate(prompt, draft="off", **options)
        ours = trained.generate(prompt, draft="mtp", tree_budget=3, tree_depth=3, **options)
        assert ours.token_ids == plain.token_ids
        brought.append(ours.metrics.accepted_per_pass or 1.0)
    assert np.mean(brought) > 1.7
