"""Training a head: text that can be continued, steps, and a folder that the runtime opens."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import localrt
from benchmarks.heads.head import HeadModel, Target, export
from benchmarks.heads.prompts import held_names, held_rows, prompts_in_turn, standard_functions
from benchmarks.heads.text import SequenceFile, write_text
from benchmarks.heads.training import Trainer
from benchmarks.heads.trees import simulate
from localrt.drafts.heads.files import open_head
from localrt.drafts.heads.load import Shared, load_head, read_head_config
from localrt.engine.native.engine import NativeEngine
from localrt.models.checkpoints import open_checkpoint
from localrt.quant.ops.protocol import Batch, Span
from tests.inside import engine_of

LENGTH = 24
PROMPTS = [[70, 101, 80], [33, 90, 120, 64], [77, 71], [102, 81, 99]]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[NativeEngine]:
    with localrt.load(tiny_folder, format="f32", draft="off") as model:
        assert isinstance(engine_of(model), NativeEngine)
        yield engine_of(model)


def write(engine: NativeEngine, file: Path, count: int, together: int = 8) -> SequenceFile:
    sequences = SequenceFile(file, LENGTH, 3 * engine.hidden_size)
    begun = prompts_in_turn(PROMPTS)
    eos, layers = frozenset({2}), (0, 1, -1)
    write_text(engine, begun, sequences, count, layers, eos, together, lambda line: None)
    return sequences


@pytest.fixture(scope="module")
def text(engine: NativeEngine, tmp_path_factory: pytest.TempPathFactory) -> SequenceFile:
    return write(engine, tmp_path_factory.mktemp("text") / "text.bin", 4)


def trainer(tiny_folder: Path) -> Trainer:
    with closing(open_checkpoint(tiny_folder)) as checkpoint:
        size = int(checkpoint.config["vocab_size"])
        target = Target.read(checkpoint, torch.arange(0, size, 2))
    return Trainer(HeadModel(target, torch.ones(3), 64), total=8, batch=2, rate=3e-3)


def test_text_is_continued(engine: NativeEngine, text: SequenceFile, tmp_path: Path) -> None:
    write(engine, tmp_path / "text.bin", 3, together=2)
    with (tmp_path / "text.bin").open("ab") as stream:
        stream.write(b"cut off")
    again = write(engine, tmp_path / "text.bin", 4, together=2).read()
    once = text.read()
    for name in ("tokens", "written"):
        np.testing.assert_array_equal(again[name], once[name])
    assert once["tokens"][1, :4].tolist() == PROMPTS[1]
    assert once["written"][1].tolist()[:6] == [False] * 4 + [True] * 2


def test_training_is_continued(tiny_folder: Path, text: SequenceFile, tmp_path: Path) -> None:
    whole, records = trainer(tiny_folder), text.read()
    for _ in range(4):
        loss, agreed = whole.train(records[whole.choose([0, 1, 3])])
        assert np.isfinite(loss)
    assert len(agreed) == 2
    assert sorted(whole.seen.tolist()) == [0, 2, 3, 3]
    half = trainer(tiny_folder)
    for _ in range(3):
        half.train(records[half.choose([0, 1, 3])])
    half.save(tmp_path / "state.pt")
    other = trainer(tiny_folder)
    other.load(tmp_path / "state.pt")
    other.train(records[other.choose([0, 1, 3])])
    for name, weight in whole.model.weights.items():
        torch.testing.assert_close(other.model.weights[name], weight)


def test_export(
    engine: NativeEngine, tiny_folder: Path, text: SequenceFile, tmp_path: Path
) -> None:
    """The runtime computes what training computed."""
    own, record = trainer(tiny_folder), text.read()[1]
    own.train(text.read())
    model = own.model
    export(model, (0, 1, engine.info.layers), tmp_path)
    tokens = np.array(record["tokens"], np.int64)
    bits = torch.from_numpy(np.array(record["features"]).view(np.int16))
    features = bits.view(torch.bfloat16)[:-1]
    with torch.no_grad():
        (out,) = model.unrolled(features[None], torch.from_numpy(tokens[None, 1:]), 1)
        theirs = model.logits(out)[0].numpy()
    weights = engine.weights
    with closing(open_head(tmp_path)) as checkpoint, engine.alone() as ops:
        config = read_head_config(checkpoint, weights.config)
        shared = Shared(weights.embedding_part, weights.output_matrix)
        head = load_head(checkpoint, config, ops, shared)
        assert config.layers == (0, 1, -1)
        batch = Batch(tokens[1:], np.arange(1, LENGTH), (Span(head.cache(LENGTH), LENGTH - 1),))
        ours = head.forward(batch, given=features.float().numpy())
    assert np.abs(ours - theirs).max() < 0.03 * np.abs(theirs).max()


def test_trees(tiny_folder: Path, text: SequenceFile) -> None:
    own = trainer(tiny_folder)
    chain, tree = (simulate(own.model, text.read()[0], budget, 16) for budget in (1, 8))
    assert chain.tokens == tree.tokens
    assert 1 <= tree.passes <= chain.passes <= chain.tokens
    assert len(own.score(text.read())) == 4


def test_prompts(tmp_path: Path) -> None:
    file = tmp_path / "held.jsonl"
    file.write_text('{"prompt": "def f(", "entry_point": "f"}\n{"turns": ["hello"]}\n')
    assert held_names(held_rows([file])) == ["def f("]
    functions = standard_functions()
    assert len(functions) > 1000
    assert all("def " in each for each in functions)
