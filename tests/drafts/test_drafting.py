"""Drafts of a model: options, vocabularies, budgets, heads of targets in several memories, and the
same tokens always.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import localrt
from localrt.common.errors import OptionError
from localrt.drafts.head_draft import HeadDraft
from localrt.drafts.heads.files import prediction_notes
from localrt.drafts.model_draft import CacheRoom, EngineDrafter
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options, read_options
from localrt.loading.load import load_model
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.kv.cache import KvTier
from localrt.offload.store import pack_store
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats.tiled import tile_tensor
from localrt.quantize.quantize import Recipe, quantize_model
from localrt.speculative.best_first import DECAY
from localrt.speculative.source import DraftFailedError, Rows, TreeSize
from localrt.speculative.tree import ROOT
from tests.conftest import needs_kernels, write_tiny_model
from tests.engine.test_speculation import fixed, ids, info_of, run
from tests.inside import engine_of
from tests.models.make_gguf import write_tiny_gguf
from tests.models.tiny import save_tiny, tokens
from tests.models.tiny_heads import (
    BLOCK,
    CLUSTERS,
    MASK,
    TinyAssistant,
    TinyBlock,
    TinyDFlash,
    TinyEagle3,
)
from tests.offload.placed import Model, passing

pytestmark = needs_kernels

OPTIONS: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}


def test_same_tokens(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    with localrt.load(target) as model:
        for sampling in ({"temperature": 0.0}, {"temperature": 1.2, "seed": 3}):
            plain = model.generate("ab ab ab", draft="off", **sampling, **OPTIONS)
            assert plain.metrics.accepted_per_pass is None
            for options in (
                {},
                {"draft": "ngram", "tree_budget": 8},
                {"draft": str(draft)},
                {"draft": str(draft), "tree_budget": 6, "tree_depth": 3},
                {"draft": f"{draft}+ngram", "tree_budget": 12},
            ):
                ours = model.generate("ab ab ab", **options, **sampling, **OPTIONS)
                assert ours.token_ids == plain.token_ids
                assert ours.logprobs == plain.logprobs
                assert str(ours.metrics.speculation).startswith("speculation: ")
                assert ours.metrics.accepted_per_pass is not None


def test_unknown_vocabulary(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = folders
    write_tiny_model(tmp_path)
    words = tmp_path / "tokenizer.json"
    words.write_text(words.read_text("utf-8").replace('"Ġ":', '"Ġx":'))
    problem = r"token \d+ is 'Ġx', in the model 'Ġ'"
    for load in (
        lambda: localrt.load(target, draft=str(tmp_path)),
        lambda: localrt.load(target).generate("hi", draft=str(tmp_path)),
    ):
        with pytest.raises(
            localrt.OptionError, match=f"has another vocabulary: {problem}; name .* leave draft"
        ):
            load()


@pytest.mark.parametrize("more", ["target", "draft"])
def test_rows_of_no_token(folders: tuple[Path, Path], more: str, tmp_path: Path) -> None:
    """Models of one family may have matrices of several heights."""
    write_tiny_model(tmp_path, context=256, spare=8)
    target, draft = (tmp_path, folders[1]) if more == "target" else (folders[0], tmp_path)
    with localrt.load(target, draft=str(draft)) as model:
        plain = model.generate("ab ab ab", draft="off", temperature=0.0, **OPTIONS)
        ours = model.generate("ab ab ab", temperature=0.0, tree_budget=8, **OPTIONS)
    assert ours.token_ids == plain.token_ids
    assert "model" in str(ours.metrics.speculation)


def test_no_room(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = folders
    with localrt.load(target, ram="8GB") as model:
        monkeypatch.setattr("localrt.loading.native.memory_left", lambda *_: (1000, "RAM"))
        plain = model.generate("hi", draft="off", temperature=0.0, **OPTIONS)
        ours = model.generate("hi", draft=str(draft), tree_budget=8, temperature=0.0, **OPTIONS)
        assert ours.token_ids == plain.token_ids
        note = str(ours.metrics.speculation)
        assert f"draft {draft} is not used" in note
        assert "are left" in note


@pytest.mark.parametrize(
    "kind",
    [
        *("mtp", "eagle3"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("mtp-gguf", "mtp-store", "assistant-gguf", "dspark", "dflash2")
        ),
    ],
)
def test_heads_draft_the_same_tokens(kind: str, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", "mtp"
    if kind.startswith("mtp"):
        TinyBlock("qwen3.5", target)
        if kind == "mtp-gguf":
            own = tmp_path / "mtp-Q8_0.gguf"
            how: dict[str, Any] = {"kind": "q8_0", "predicting": 1, "only_block": True}
            draft = str(write_tiny_gguf(target, own, "qwen3.5", **how))
        if kind == "mtp-store":
            target = quantize_model(target, tmp_path / "store", Recipe("int8-g32")).path
    elif kind == "assistant-gguf":
        TinyAssistant("gemma4", target, tmp_path, use_ordered_embeddings=True, **CLUSTERS)
        draft = str(write_tiny_gguf(tmp_path, tmp_path / "a.gguf", "gemma4-assistant"))
    else:
        config, draft = save_tiny("llama", target).config, str(tmp_path)
        head = TinyEagle3 if kind == "eagle3" else TinyDFlash
        options: dict[str, Any] = {"rank": 24} if kind == "dspark" else {}
        options |= {"rank": 24, "choices": 9} if kind == "dflash2" else {}
        head(tmp_path, config.hidden_size, config.vocab_size, **options)
    prompt: dict[str, Any] = {"token_ids": [5, 6, 7, 8, 9]}
    with localrt.load(target, draft=draft) as model:
        for sampling in ({"temperature": 0.0}, {"temperature": 0.3, "seed": 3}):
            plain = model.generate(**prompt, draft="off", **sampling, **OPTIONS)
            for size in ({}, {"tree_budget": 8, "tree_depth": 3}, {"tree_budget": 40}):
                ours = model.generate(**prompt, **size, draft=draft, **sampling, **OPTIONS)
                assert ours.token_ids == plain.token_ids
                assert ours.logprobs == plain.logprobs
        assert "head, 40 draft tokens" in str(ours.metrics.speculation)
        chat = [*prompt["token_ids"], *plain.token_ids, 11, 12]  # the prefix is kept
        again = model.generate(token_ids=chat, draft=draft, tree_budget=4, **OPTIONS, seed=1)
        assert (
            again.token_ids
            == model.generate(token_ids=chat, draft="off", **OPTIONS, seed=1).token_ids
        )


@pytest.mark.parametrize(
    "kind",
    [
        "dspark",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("bonus anchor", "causal", "dflash2")),
    ],
)
def test_tree_of_a_block(kind: str, tmp_path: Path) -> None:
    """A node's probability is that of its token at its depth, in DSpark's behind its parent."""
    model = save_tiny("llama", tmp_path).module
    first = int(kind in ("bonus anchor", "dflash2"))
    options: dict[str, Any] = {"choices": 9} if kind == "dflash2" else {}
    options |= {"sample_from_anchor": kind != "bonus anchor", "is_causal": kind == "causal"}
    options |= {"rank": 24}
    width, vocab = model.config.hidden_size, model.config.vocab_size
    tiny = TinyDFlash(tmp_path / "own", width, vocab, **options)
    parts = load_model(tmp_path, LoadOptions(format="f32", device="cpu"))
    with closing(parts.engine), closing(HeadDraft(parts, tmp_path / "own")) as draft:
        assert isinstance(parts.engine, NativeEngine)
        session, ids = parts.engine.session(64), tokens(30)
        source = draft.source(session, read_options({"temperature": 0.0}))
        assert not len(source.propose(ids[:9], TreeSize(40, 3)))  # nothing is computed yet
        session.extend(ids[:8])
        for known, missing in ((8, 8), (12, 4), (13, 1), (6, 0), (9, 3)):
            if known > len(session.tokens):
                session.extend(ids[len(session.tokens) : known])
            session.trim(known)
            history = [*ids[:known], 50 + known]
            assert source.missing(history) == missing
            tree = source.propose(history, TreeSize(40, 9))
            assert (len(tree), source.missing(history)) == (40, 0)
            features = torch.tensor(session.record_features(draft.config.layers).get(0, known))
            block = torch.tensor([history[-1], *[MASK] * (BLOCK - 1)])
            with torch.no_grad():
                embedded = model.get_input_embeddings()(block)
                logits = tiny.expected(features, embedded, model.lm_head.weight)
            for token, parent, depth, score in zip(
                tree.tokens, tree.parents, tree.depths, tree.scores, strict=True
            ):
                above = 0.0 if parent == ROOT else tree.scores[parent]
                row = logits[depth - 1 + first][None].astype(np.float64)
                before = history[-1] if parent == ROOT else tree.tokens[parent]
                with torch.no_grad():
                    row = tiny.after(row, [int(before)], [depth - 1 + first])
                expected = row[0, token] - np.log(np.exp(row).sum())
                assert abs(score - above - DECAY - expected) < 1e-4
            assert tree.height <= BLOCK - first


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_head_of_a_streamed_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the first rows of the output matrix, and drafts their tokens."""
    source, own = tmp_path / "source", None
    if kind == "mtp":
        TinyBlock("qwen3.5", source)
    else:
        config, own = save_tiny("llama", source).config, tmp_path / "own"
        TinyDFlash(own, config.hidden_size, config.vocab_size)
    store = quantize_model(source, tmp_path / "store", Recipe("int8-g32")).path
    parts, model, ids = load_model(store, LoadOptions(device="cpu")), Model(store), tokens(12)
    found = {}
    assert bool(prediction_notes(store)) is (kind == "mtp")
    if kind != "mtp":
        with pytest.raises(localrt.LocalrtError, match="store has no MTP block"):
            HeadDraft(parts)
    with closing(parts.engine), closing(model), model.placed(passing(model.store)) as decoder:
        streamed = replace(parts, engine=NativeEngine(decoder, parts.engine.info))
        for case, most in (("resident", 0), ("streamed", 211), ("of 100", 100)):
            monkeypatch.setattr("localrt.drafts.head_draft.OUTPUT_ROWS", most)
            target = streamed if most else parts
            with closing(HeadDraft(target, own)) as draft:
                session = target.engine.session(64)
                source = draft.source(session, read_options({"temperature": 0.0}))
                session.extend(ids[:-1])
                found[case] = source.propose(ids, TreeSize(40, 3))
    for part in ("tokens", "parents", "scores"):
        assert np.array_equal(*(getattr(found[case], part) for case in ("resident", "streamed")))
    assert found["resident"].tokens.max() >= 100 > found["of 100"].tokens.max()
    assert len(found["of 100"]) == 40


def test_head_of_another_model(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "target")
    TinyEagle3(tmp_path, 32, 211)
    with pytest.raises(localrt.OptionError, match="does not fit this model: it has 32 hidden"):
        localrt.load(tmp_path / "target", draft=str(tmp_path))
    with pytest.raises(localrt.LocalrtError, match="no MTP block"):
        localrt.load(tmp_path / "target", draft="mtp")
    folder = tmp_path / "qwen"
    TinyBlock("qwen3.5", folder)
    how: dict[str, Any] = {"predicting": 1, "only_block": True}
    block = write_tiny_gguf(folder, tmp_path / "mtp-m.gguf", "qwen3.5", **how)
    with pytest.raises(localrt.OptionError, match=r"it is an MTP block of qwen3_5, and the model"):
        localrt.load(tmp_path / "target", draft=str(block))
    dflash = TinyDFlash(tmp_path / "dflash", 64, 211).save_gguf(tmp_path / "dflash.gguf")
    TinyAssistant("gemma4", tmp_path / "gemma", tmp_path / "own")
    assistant = write_tiny_gguf(tmp_path / "own", tmp_path / "a.gguf", "gemma4-assistant")
    with pytest.raises(localrt.OptionError, match="do not fit the model's keys and values"):
        localrt.load(tmp_path / "target", draft=str(assistant))
    for head, what in (
        (block, "only the MTP block"),
        (tmp_path, "an EAGLE-3 head"),
        (dflash, "a DFlash draft"),
        (assistant, "an assistant"),
    ):
        with pytest.raises(localrt.UnsupportedModelError, match=f"{head} holds {what} of a model"):
            localrt.load(head)


@pytest.fixture(scope="module")
def plain_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return folder


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "more layers": ({"block_count": 2}, "an EAGLE-3 head has one layer"),
    "text for a size": ({"target_hidden_size": "x"}, "target_hidden_size must be an integer"),
    "tokens beyond": ({"tokens": np.arange(500, 590)}, "its tokens are not all of the model's"),
    "cut within the header": ({"cut": 230_000}, "claims 14 tensors, which 382 bytes"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_head(case: str, plain_llama: Path, tmp_path: Path) -> None:
    """One line each."""
    how, said = DAMAGED[case]
    how = dict(how)
    tiny = TinyEagle3(tmp_path, 64, 211)
    tiny.tokens = how.pop("tokens", tiny.tokens)
    cut = how.pop("cut", 0)
    path = tiny.save_gguf(tmp_path / "eagle3.gguf", **how)
    path.write_bytes(path.read_bytes()[: -cut or None])
    with pytest.raises(localrt.LocalrtError, match=said) as caught:
        localrt.load(plain_llama, draft=str(path))
    assert "\n" not in str(caught.value)


class Cache:
    length = nbytes = 0


def test_caches_stay_within_their_room() -> None:
    room = CacheRoom(lambda length: 10 * length, 100)
    one, other = Cache(), Cache()
    for cache, rows in ((one, 6), (other, 4)):
        room.add(cache)  # type: ignore[arg-type]
        room.check(cache, rows)  # type: ignore[arg-type]
        cache.length += rows
    with pytest.raises(DraftFailedError, match="110 B of the GPU's memory, and 100 B were set"):
        room.check(one, 1)  # type: ignore[arg-type]
    del other, cache
    room.check(one, 4)  # type: ignore[arg-type]


def test_token_that_only_the_target_has() -> None:
    unused: Any = None
    drafter, rows = EngineDrafter(unused, 4000), Rows([1, 4000], np.arange(2), 1)
    with pytest.raises(DraftFailedError, match="vocabulary has no token 4000"):
        drafter.compute(unused, rows, check=None)


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
def test_assistant_of_a_streamed_target(
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


def test_assistant_within_a_budget(folder: Path) -> None:
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
