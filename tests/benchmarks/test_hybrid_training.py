"""Training a hybrid model: transformers' computation, steps that continue, the folder."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from benchmarks.hybrid.model import HybridModel, config_of, delta_rule
from benchmarks.hybrid.text import source_files
from benchmarks.hybrid.training import Trainer, export
from localrt.drafts.heads.files import open_head
from localrt.drafts.heads.load import Shared, load_head, read_head_config
from localrt.models.decoder import FinalNorm
from localrt.quant.ops.features import AFTER_LAST, Features
from localrt.quant.ops.protocol import Batch, Span
from tests.models.tiny import load_ours, relative_error, tokens

IDS = tokens(64)
_NO_CONFIG = ("architectures", "model_type", "dtype", "mtp_num_hidden_layers")


def random_model() -> HybridModel:
    """Weights that differ from how a training begins, so that none can be forgotten unseen."""
    model = HybridModel(config_of(vocab=211, layers=4), seed=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.weights.values():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
            weight.copy_(weight.bfloat16())
    model.refresh()
    return model


@torch.no_grad()
def test_body_is_that_of_transformers() -> None:
    model = random_model()
    config = {key: value for key, value in model.config.items() if key not in _NO_CONFIG}
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config)).float().eval()
    state = {name: w for name, w in model.weights.items() if not name.startswith("mtp.")}
    loaded = theirs.load_state_dict(state, strict=False)
    assert not loaded.unexpected_keys
    assert loaded.missing_keys == ["lm_head.weight"]  # the embedding, as in the config
    ids = torch.tensor([IDS])
    found = model.logits(model.body(ids))
    assert relative_error(found.numpy(), theirs(ids).logits.numpy()) < 1e-4


@torch.no_grad()
def test_delta_rule_in_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, size, generator=generator) for size in (8, 8, 12))
    k = k / k.norm(dim=-1, keepdim=True)
    decay, beta = (
        -torch.rand(1, 2, 64, generator=generator),
        torch.rand(1, 2, 64, generator=generator),
    )
    state, expected = torch.zeros(1, 2, 8, 12), []
    for n in range(64):
        state = state * decay[:, :, n, None, None].exp()
        change = beta[:, :, n, None] * (v[:, :, n] - (k[:, :, n, None] @ state)[:, :, 0])
        state = state + k[:, :, n, :, None] * change[:, :, None]
        expected.append(q[:, :, n, None] @ state)
    torch.testing.assert_close(delta_rule(q, k, v, decay, beta), torch.cat(expected, 2))


@torch.no_grad()
def test_runtime_computes_what_was_trained(tmp_path: Path) -> None:
    """The body's logits, and the block's on its first level and on the one behind it."""
    model, ids = random_model(), torch.tensor([IDS])
    export(model, tmp_path)
    target = load_ours(tmp_path, context=len(IDS))
    features = Features((AFTER_LAST,), np.empty((len(IDS), target.config.hidden_size), np.float32))
    batch = Batch.extend([(target.cache(len(IDS)), IDS)])
    logits = target.forward(batch, features=features)
    hidden = model.body(ids)
    assert relative_error(logits, model.logits(hidden)[0].numpy()) < 1e-4
    levels = [model.logits(out)[0] for out in model.unrolled(hidden[:, :-1], ids[:, 1:], 2)]
    with closing(open_head(tmp_path)) as checkpoint:
        config = read_head_config(checkpoint, target.config)
        shared = Shared(target.weights.embedding_part, target.weights.output_matrix)
        head = load_head(checkpoint, config, target.ops, shared)
    given, cache = FinalNorm(target)(features.rows), head.cache(len(IDS))
    own = Features((AFTER_LAST,), np.empty((len(IDS) - 2, given.shape[1]), np.float32))
    rows = Batch(np.array(IDS[1:-1]), np.arange(1, len(IDS) - 1), (Span(cache, len(IDS) - 2),))
    found = head.forward(rows, features=own, given=given[:-2])
    assert relative_error(found, levels[0][:-1].numpy()) < 1e-4
    last = Batch(np.array(IDS[-1:]), np.array([len(IDS) - 1]), (Span(cache, 1),))
    behind = head.forward(last, given=FinalNorm(head)(own.rows[-1:]))
    assert relative_error(behind, levels[1][-1:].numpy()) < 1e-4


def trainer() -> Trainer:
    model = HybridModel(config_of(vocab=64, layers=4), seed=1, dtype=torch.float32)
    text = torch.from_numpy(np.random.default_rng(0).integers(64, size=600))
    return Trainer(model, text, total=4, seed=1)


def test_training_is_continued(tmp_path: Path) -> None:
    whole, half, other = trainer(), trainer(), trainer()
    for _ in range(3):
        loss, agreed = whole.train()
        assert np.isfinite(loss)
    assert len(agreed) == 2
    half.train()
    half.train()
    half.descent.save(tmp_path / "state.pt")
    other.descent.load(tmp_path / "state.pt")
    other.train()
    for name, weight in whole.model.weights.items():
        torch.testing.assert_close(other.model.weights[name], weight)


@pytest.mark.parametrize("held", [False, True])
def test_files_held_out(held: bool) -> None:
    files, others = source_files(held=held), source_files(held=not held)
    assert not set(files) & set(others)
    assert len(files) > 20
