"""A draft head beside a target whose weights are streamed, and what room it is given."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localrt.drafts.head import TRAINED, HeadDraft, target_identity, with_room_for_head
from localrt.engine.options import read_options
from localrt.errors import LocalrtError, MemoryBudgetError
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.offload.store import pack_store
from localrt.quant.ops.native.abi import find_library
from localrt.settings import Settings
from tests.engine.test_batch_streamed import CTX, LAYERS, VOCAB, open_engine
from tests.models.tiny import tokens
from tests.speculative.tiny_head import head_values, write_random_head
from tests.store.synthetic import SyntheticCheckpoint

pytestmark = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A store and a head for it."""
    folder = tmp_path_factory.mktemp("streamed")
    source = SyntheticCheckpoint(folder / "source", vocab=VOCAB, layers=LAYERS)
    pack_store(source, folder / "packed")
    with closing(open_checkpoint(folder / "packed")) as checkpoint:
        target = target_identity(read_config(checkpoint), None)
    values = head_values(target, VOCAB, guessed=90)
    write_random_head(folder / "head", values)
    return folder / "packed", folder / "head"


def test_guesses_do_not_depend_on_where_the_target_lies(made: Any) -> None:
    store, head = made
    with closing(open_checkpoint(store)) as checkpoint:
        manifest: Any = checkpoint
        names = [u.name for u in manifest.manifest.units if u.name.startswith(("layers", "head"))]
    prompt = tokens(40, seed=2)
    trees = []
    for streamed in ([], names):
        engine = open_engine(store, streamed, 1 << 30)
        parts: Any = SimpleNamespace(path=store, tokenizer=None)
        with closing(HeadDraft(str(head), parts, engine)) as drafted:
            session = engine.session(CTX // 4)
            source = drafted.source(session, read_options({"temperature": 0.3}))
            session.extend(prompt[:-1])
            trees.append(source.propose(prompt, 12, 4))
            tree = trees[-1]
            session.extend_tree(prompt[-1], tree)
            session.keep([0, 1])
            trees.append(source.propose([*prompt, int(tree.tokens[0]), 7], 12, 4))
            session.close()
        engine.close()
    for resident, streamed_tree in zip(trees[:2], trees[2:], strict=True):
        assert len(resident) == 12
        assert resident.tokens.tolist() == streamed_tree.tokens.tolist()
        np.testing.assert_array_equal(resident.scores, streamed_tree.scores)


def test_a_budget_leaves_the_head_its_room(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    options, settings = LoadOptions(ram=1 << 30), Settings.from_environment()
    folder = settings.data_dir / TRAINED
    assert with_room_for_head(str(made[1]), LoadOptions(), settings) == LoadOptions()
    left = with_room_for_head(str(made[1]), options, settings)
    assert left == replace(options, ram=left.ram)
    assert left.ram is not None
    assert 1 << 20 < (1 << 30) - left.ram < 8 << 20
    assert with_room_for_head("head", options, settings) == options  # there is none
    shutil.copytree(made[1], folder / "mine")
    assert with_room_for_head("head", options, settings) == left  # the largest that there is
    with pytest.raises(MemoryBudgetError, match=r"a draft head takes .* the budget is 1 MB"):
        with_room_for_head("head", LoadOptions(ram=10**6), settings)
    damaged = folder / "damaged"
    shutil.copytree(made[1], damaged)
    config = damaged / "config.json"
    config.write_text(config.read_text().replace('"num_attention_heads"', '"heads"'))
    assert with_room_for_head("head", options, settings) == left
    with pytest.raises(LocalrtError):
        with_room_for_head(str(damaged), options, settings)
