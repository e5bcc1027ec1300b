"""DeepSeek from every form that it is published in: the same logits, the same experts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.offload.store import pack_store
from localrt.quant.formats import F16, unpack
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops.attention import LatentSpec
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Batch, Rope, Span
from localrt.quant.reference.ops import TorchOps
from tests.models.make_gguf import write_tiny_gguf
from tests.models.tiny import CONFIGS, edited, load_ours, oracle, relative_error, save_tiny, tokens
from tests.models.tiny_configs import DEEPSEEK_SPARSE

IDS = tokens(40)


def whole(decoder: Decoder, ids: list[int] = IDS) -> np.ndarray:
    return decoder.forward(Batch.extend([(decoder.cache(len(ids)), ids)]))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek-v3")
    save_tiny("deepseek-v3", folder)
    return folder


@pytest.mark.parametrize("name", sorted(DEEPSEEK_SPARSE))
def test_the_same_experts_are_chosen_with_the_same_weights(name: str, tmp_path: Path) -> None:
    theirs = save_tiny(name, tmp_path)
    ours = load_ours(tmp_path)
    routes: dict[int, Routing] = {}
    expected: dict[int, tuple[Any, Any]] = {}
    layers = list(ours.config.sparse_layers)
    ours.weights.watch_routing(lambda place, routing: routes.update({layers[place]: routing}))
    for layer in layers:
        gate = theirs.model.layers[layer].mlp.gate
        gate.register_forward_hook(
            lambda _m, _i, out, layer=layer: expected.update({layer: out[1:]})
        )
    whole(ours)
    oracle(theirs, IDS)
    assert set(routes) == set(expected) == {1, 2}
    for layer, (weights, experts) in expected.items():
        order = torch.argsort(experts, dim=-1)
        mine = np.argsort(routes[layer].chosen, axis=-1)
        chosen = np.take_along_axis(routes[layer].chosen, mine, -1)
        assert np.array_equal(chosen, experts.gather(-1, order).numpy())
        ours_weights = np.take_along_axis(routes[layer].weights, mine, -1)
        np.testing.assert_allclose(ours_weights, weights.gather(-1, order).numpy(), rtol=1e-4)


def test_a_tree_mask_gives_each_branch_its_own_logits(tmp_path: Path) -> None:
    save_tiny("deepseek-v3-dense", tmp_path)
    ours = load_ours(tmp_path)
    mask = np.eye(3, dtype=bool)
    mask[1:, 0] = True
    cache = ours.cache(32)
    ours.forward(Batch.extend([(cache, IDS[:12])]), rows=[])
    batch = Batch(np.array([5, 6, 7]), np.array([12, 13, 13]), (Span(cache, 3, mask),))
    logits = ours.forward(batch)
    for path in ([5], [5, 6], [5, 7]):
        alone = whole(ours, IDS[:12] + path)[-1]
        assert relative_error(logits[path[-1] - 5], alone) < 1e-4


@pytest.mark.parametrize(
    "name", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v2-dense", "deepseek-v3", "glm4-moe-lite"]
)
def test_older_gguf_files(name: str, tmp_path: Path) -> None:
    theirs = save_tiny(name, tmp_path / "hf")
    path = write_tiny_gguf(tmp_path / "hf", tmp_path / "model.gguf", name, absorbed=False)
    assert relative_error(whole(load_ours(path)), oracle(theirs, IDS)) < 1e-4


@pytest.mark.llamacpp
@pytest.mark.parametrize(("absorbed", "groups"), [(True, True), (False, False)])
@pytest.mark.parametrize(
    "name", ["deepseek-v2-lite", "deepseek-v2-dense", "deepseek-v3", "glm4-moe-lite"]
)
def test_gguf_files_as_llama_cpp_reads_them(
    name: str, absorbed: bool, groups: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    from localrt.engine.llamacpp.engine import LlamaCppEngine
    from localrt.engine.llamacpp.model import LlamaCppModel

    if name == "deepseek-v2-lite":  # which it knows by its layers
        config = CONFIGS[name]()
        config.num_hidden_layers = 27
        monkeypatch.setitem(CONFIGS, name, lambda: config)
    save_tiny(name, tmp_path / "hf")
    path = write_tiny_gguf(
        tmp_path / "hf", tmp_path / "model.gguf", name, absorbed=absorbed, groups=groups
    )
    engine = LlamaCppEngine(LlamaCppModel.load(path, threads=1))
    session = engine.session(64)  # whose memory the logits are
    try:
        logits = session.extend(IDS).copy()
    finally:
        engine.close()
    assert relative_error(whole(load_ours(path))[-1], logits) < 0.01


def test_matrices_that_were_quantized_as_one_are_taken_apart(tmp_path: Path) -> None:
    """Values in their own bytes; keys, which have to be transposed, in f16."""
    theirs = save_tiny("deepseek-v2-dense", tmp_path / "hf")
    path = write_tiny_gguf(
        tmp_path / "hf",
        tmp_path / "model.gguf",
        "deepseek-v2-dense",
        absorbed=False,
        kind="q8_0",
    )
    config = theirs.config
    heads, nope, value = 4, config.qk_nope_head_dim, config.v_head_dim
    with closing(open_checkpoint(path)) as checkpoint:
        stem = "model.layers.0.self_attn."
        assert f"{stem}kv_b_proj.weight" not in checkpoint.tensors
        keys, values = (checkpoint.tensors[f"{stem}{n}_b_proj.weight"] for n in "kv")
        assert (keys.format, values.format.name) == (F16, "q8_0")
        assert (keys.shape, values.shape) == ((heads * 32, nope), (heads * value, 32))
        for info in (keys, values):
            pieces = [block.data for block in checkpoint.blocks(info.name, 1)]
            once = checkpoint.read(info.name)
            assert np.array_equal(np.concatenate(pieces), once.data)
            assert once.data.nbytes == info.nbytes
            for start, stop in ((0, 0), (3, 70), (64, 65), (100, info.shape[0])):
                part = checkpoint.read(info.name, start, stop)
                assert part.shape == (stop - start, info.shape[1])
                assert np.array_equal(part.data, once.data[start:stop])
            with pytest.raises(ValueError, match="rows"):
                checkpoint.read(info.name, 0, info.shape[0] + 1)
        both = theirs.model.layers[0].self_attn.kv_b_proj.weight.detach().numpy()
        both = both.reshape(heads, nope + value, 32)
        got = unpack(checkpoint.read(keys.name)).reshape(heads, 32, nope)
        np.testing.assert_allclose(got, both[:, :nope].swapaxes(1, 2), atol=0.01)
        got = unpack(checkpoint.read(values.name)).reshape(heads, value, 32)
        np.testing.assert_allclose(got, both[:, nope:], atol=0.01)
    assert relative_error(whole(load_ours(path)), oracle(theirs, IDS)) < 0.05


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_a_store_holds_the_matrices_apart(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "hf")
    with closing(open_checkpoint(tmp_path / "hf")) as source:
        pack_store(source, tmp_path / "store", tiler=tile_tensor)
        expected = load_decoder(source, TorchOps(compute_format="f32"), read_config(source))
    with closing(open_checkpoint(tmp_path / "store")) as store:
        assert "model.layers.1.self_attn.k_b_proj.weight" in store.tensors
        ours = load_decoder(store, TorchOps(compute_format="f32"), read_config(store))
    assert np.array_equal(whole(ours), whole(expected))


def test_layers_of_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    """V3's checkpoints have a layer behind the last."""
    from safetensors.numpy import load_file, save_file

    save_tiny("deepseek-v3", tmp_path)
    expected = whole(load_ours(tmp_path))
    path = tmp_path / "model.safetensors"
    extra = {"model.layers.3.enorm.weight": np.ones(64, np.float32)}
    save_file({**load_file(path), **extra}, path)
    assert np.array_equal(whole(load_ours(tmp_path)), expected)
    edited(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedModelError, match="not part of"):
        load_ours(tmp_path)


def test_published_scaling(tmp_path: Path) -> None:
    """DeepSeek-V3's own config: the softmax's scale grows, the turns do not."""
    save_tiny("deepseek-v3", tmp_path)
    scaling = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    edited(tmp_path, rope_parameters=None, rope_theta=10000, rope_scaling=scaling)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        spec = read_config(checkpoint).attention[0]
    assert isinstance(spec, LatentSpec)
    assert spec.rope is not None
    assert spec.rope.scale == 1.0
    assert spec.scale == pytest.approx(48**-0.5 * 1.3688879**2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 16}, "wrong shape"),
        ({"v_head_dim": 16}, "wrong shape"),
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim must be"),
        ({"qk_rope_head_dim": 12}, "wrong shape"),
        ({"qk_rope_head_dim": 15}, "even"),
        ({"q_lora_rank": None}, "missing"),
        ({"num_experts_per_tok": 9}, "cannot be chosen"),
        ({"n_group": 3}, "equal groups"),
        ({"topk_group": 5}, "cannot be used"),
        ({"topk_method": "random"}, "topk_method 'random' is not supported"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh' is not supported"),
        ({"n_routed_experts": 9}, "groups|missing"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": -1, "mscale_all_dim": 1}}, "factor"),
    ],
)
def test_a_config_that_does_not_fit_is_one_clear_line(
    written: Path, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    copytree(written, tmp_path, dirs_exist_ok=True)
    edited(tmp_path, **change)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        load_ours(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_v3_without_its_bias_and_a_v2_that_normalizes(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    save_tiny("deepseek-v3", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "correction" not in k}, path)
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias.*missing"):
        load_ours(tmp_path)
    save_tiny("deepseek-v2", tmp_path)
    edited(tmp_path, norm_topk_prob=True)
    with pytest.raises(UnsupportedModelError, match="norm_topk_prob"):
        load_ours(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 40}, "rotary and"),
        ({"rope": None}, "rotary keys"),
        ({"kv_heads": 2}, "one of them"),
        ({"window": 8}, "window"),
    ],
)
def test_a_spec_checks_itself(change: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 48,
        "scale": 1.0,
        "eps": 1e-6,
        "rope": Rope((1.0,) * 8),
        "latent": 32,
        "nope": 16,
        "value": 16,
    }
    assert LatentSpec(**values).query_rows == 4 * 32
    with pytest.raises(ValueError, match=message):
        LatentSpec(**{**values, **change})
