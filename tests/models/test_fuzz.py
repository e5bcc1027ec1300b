"""Whatever configs, settings and adapters say, reading them works or ends in one line.

And it takes little memory, as these files are strangers'.
"""

from __future__ import annotations

import json
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import localrt
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.checkpoints.adapters import read_adapter
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.registry import ARCHITECTURES
from localrt.models.vision.encoder_cache import EncoderUnitReader
from localrt.models.vision.registry import read_encoder
from localrt.planning.models import shape_from_config
from localrt.quant.ops.vision import VisionSteps
from localrt.quant.reference.ops import TorchOps
from tests.checkpoints.make_gguf import write_gguf
from tests.checkpoints.test_fuzz import mutations
from tests.models.adapters import make_adapter
from tests.models.tiny import load_ours, save_tiny, tiny_model
from tests.models.tiny_encoders import ENCODERS, save_encoder
from tests.models.vision import families, tiny_qwen
from tests.models.vision.oracles import picture
from tests.mutations import FUZZ, changed, changes_of, is_line, paths, refusal

MOST_MEMORY = 48 << 20

# One of each architecture, with the keys that only some models of it have.
MODELS = {
    "llama-yarn": "sliding_window head_dim partial_rotary_factor rope_scaling original_max_position"
    "_embeddings",
    "qwen2-window": "max_window_layers layer_types",
    "qwen3": "use_sliding_window",
    "gemma2": "query_pre_attn_scalar attn_logit_softcapping hidden_activation",
    "gemma3": "rope_local_base_freq sliding_window_pattern final_logit_softcapping text_config",
    "gemma4-moe": "use_double_wide_mlp per_layer_config hidden_size_per_layer_input num_kv_shared"
    "_layers attention_k_eq_v",
    "qwen3.5-moe": "linear_conv_kernel_dim full_attention_interval mtp_num_hidden_layers",
    "qwen4-exp": "ple_layer_ids ple_embed_dim hc_count hc_lowrank indexer_budget indexer_head_dim"
    " ngram_vocab_size_base output_gate_type eos_token_id",
    "qwen3-next": "mlp_only_layers decoder_sparse_step linear_key_head_dim linear_value_head_dim",
    "lfm3": "use_attention_gate use_sandwich_norm sliding_window sliding_attention",
    "olmo-hybrid": "rope_theta linear_allow_neg_eigval linear_value_head_dim",
    "ling": "linear_head_dim short_conv_kernel_size layer_types kda_lower_bound num_nextn_predict"
    "_layers expert_swiglu_limit_list",
    "kimi-linear": "linear_attn_config full_attn_layers linear_head_dim moe_router_activation_func",
    "lfm2-moe": "conv_L_cache conv_bias block_auto_adjust_ff_dim full_attn_idxs num_dense_layers",
    "granite-hybrid-moe": "mamba_d_conv mamba_n_groups position_embedding_type shared_intermediate"
    "_size",
    "nemotron-h-groups": "hybrid_override_pattern layer_types num_hidden_layers moe_latent_size"
    " mlp_bias time_step_limit",
    "falcon-h1": "mamba_d_head mamba_rms_norm mamba_norm_before_gate mamba_proj_bias mlp_bias",
    "phi3-longrope": "original_max_position_embeddings",
    "smollm3-nope": "no_rope_layer_interval",
    "deepseek-v3": "moe_layer_freq scoring_func num_nextn_predict_layers",
    "deepseek-v4": "compress_ratios compress_rates layer_types mlp_layer_types num_hash_layers"
    " qk_rope_head_dim compress_rope_theta o_groups",
    "mixtral": "norm_topk_prob",
    "qwen2-moe": "mlp_only_layers decoder_sparse_step",
    "qwen3-moe": "num_local_experts",
    "olmoe": "clip_qkv",
    "granite-moe-shared": "shared_expert_intermediate_size",
    "gpt-oss": "swiglu_alpha swiglu_limit quantization_config",
    "ministral3": "sliding_window",
    "internvl-qwen3": "text_config model_type use_sliding_window",
    "llava": "text_config model_type head_dim",
    "olmo3-yarn": "rope_local_base_freq",
    "exaone4-window": "sliding_window_pattern",
    "seed-oss": "attention_out_bias",
    "ernie-moe": "moe_layer_end_index moe_layer_start_index moe_layer_interval",
    "granite": "embedding_multiplier",
    "hunyuan": "alpha",
    "granite-swa": "layer_rope_theta num_local_experts",
    "glm4": "partial_rotary_factor attention_bias",
    "muse-glimmer-bases": "post_norm_eps qk_scale_factor output_multiplier hidden_activation",
    "afmoe": "global_attn_every_n_layers mup_enabled num_dense_layers route_scale attention_bias",
    "laguna": "gating num_attention_heads_per_layer moe_router_logit_softcapping mlp_layer_types"
    " moe_apply_router_weight_on_input moe_routed_scaling_factor sliding_attention",
    "llama4": "no_rope_layers moe_layers attention_chunk_size floor_scale attn_scale layer_types"
    " num_experts_per_tok interleave_moe_layer_step intermediate_size_mlp",
    "glm4-moe": "use_qk_norm partial_rotary_factor mlp_layer_types",
    "mistral4": "llama_4_scaling_beta topk_group",
    "glm4-moe-lite": "first_k_dense_replace",
    "glm-dsa": "index_topk index_n_heads index_head_dim indexer_types index_topk_pattern"
    " index_topk_freq",
    "glm5-next": "index_topk index_kpool index_n_heads indexer_types linear_attn_config layer_types"
    " linear_lower_bound hc_mult swiglu_limit qk_rope_head_dim",
    "qwen3-vl-moe": "vision_config",
    "apertus": "xielu_alpha_p",
    "solar-open": "intermediate_size first_k_dense_replace",
    "step": "rope_theta partial_rotary_factors attention_other_setting moe_layers_enum"
    " num_nextn_predict_layers",
    "hy-v3": "route_norm norm_topk_prob",
    "exaone-moe-groups": "scoring_func first_k_dense_replace",
    "hunyuan-moe": "alpha num_experts_per_tok",
    "minimax-m2": "rotary_dim",
    "cohere2": "sliding_window_pattern layer_norm_eps logit_scale",
    "cohere2-moe-dense-first": "first_k_dense_replace prefix_dense_sliding_window_pattern"
    " sliding_window_pattern shared_expert_combination_strategy",
    "mellum-dense-first": "rope_local_base_freq mlp_layer_types num_local_experts",
}
SCALINGS = "rope_type factor rope_theta original_max_position_embeddings beta_fast beta_slow mscale"
SCALINGS += " mscale_all_dim attention_factor low_freq_factor high_freq_factor long_factor"
SCALINGS += " alpha short_factor partial_rotary_factor truncate full_attention llama_4_scaling_beta"


@dataclass
class Read:
    """What reads JSON documents: valid ones by name, the places that may be changed in one."""

    names: Sequence[str]
    document: Callable[[str], Any]
    places: Callable[[str, Any], list[Any]]
    uses: Sequence[Callable[[str, Any], object]]


def load_config(folder: Path, config: Any, context: int | None = None) -> None:
    """Load ``folder`` with this config, in little memory."""
    (folder / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            load_ours(folder, context=context)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < MOST_MEMORY


def read_configs(root: Path, stack: ExitStack) -> Read:
    """Of text models, loaded in their own context and in another, and planned."""

    @cache
    def config_of(name: str) -> Any:
        save_tiny(name, root / name)
        return json.loads((root / name / "config.json").read_text("utf-8"))

    def places(name: str, config: Any) -> list[Any]:
        scaled = [
            (part, key) for part in ("rope_parameters", "rope_scaling") for key in SCALINGS.split()
        ]
        return [*paths(config), *((key,) for key in MODELS[name].split()), *scaled]

    uses = (
        lambda name, config: load_config(root / name, config),
        lambda name, config: load_config(root / name, config, context=999),
        lambda name, config: shape_from_config(config, name="fuzzed"),
    )
    return Read(sorted(MODELS), config_of, places, uses)


FOLDERS: dict[str, Callable[[Path], object]] = {
    **{kind: partial(tiny_qwen.save_tiny_vl, kind) for kind in tiny_qwen.TINY},
    **{
        name: families.FAMILIES[name]
        for name in (
            *("gemma3", "idefics3", "smolvlm", "lfm2-vl", "internvl", "minicpm-v"),
            *("llava", "mistral3", "gemma4", "gemma4-unified"),
        )
    },
}
SETTINGS = (
    *("do_rescale", "do_normalize", "image_mean", "image_std", "rescale_factor", "resample"),
    *("size", "max_image_size", "min_pixels", "max_pixels", "do_image_splitting", "use_thumbnail"),
    *("min_tiles", "max_tiles", "tile_size", "max_image_tokens", "max_soft_tokens", "min_patches"),
    *("max_patches", "max_slice_nums", "scale_resolution", "slice_mode", "use_image_id"),
)


def read_encoders(root: Path, stack: ExitStack) -> Read:
    """Settings of encoders of pictures, and of what prepares these, by which one is seen."""

    @cache
    def opened(name: str) -> VisionFolder:
        (root / name).mkdir()
        FOLDERS[name](root / name)
        return stack.enter_context(closing(VisionFolder(root / name)))

    def document(name: str) -> Any:
        source = opened(name)
        config = {key: value for key, value in source.config.items() if key != "model_type"}
        return {"config": config, "processor": source.processor}

    def places(_: str, published: Any) -> list[Any]:
        more = [("processor", key) for key in SETTINGS]
        return [path for path in [*paths(published), *more] if len(path) > 1]

    def see(name: str, published: Any) -> None:
        source, steps = opened(name), VisionSteps(TorchOps(compute_format="f32", device="cpu"))
        config = {**published["config"], "model_type": source.config["model_type"]}
        encoder = read_encoder(config, published["processor"])
        prepared = encoder.prepare(picture(37, 50))
        with warnings.catch_warnings(), np.errstate(all="ignore"):  # pixels times a wrong number
            warnings.simplefilter("error", RuntimeWarning)
            encoder.encode(prepared, EncoderUnitReader(source, steps), steps)

    return Read(sorted(FOLDERS), document, places, [see])


def read_text_encoders(root: Path, stack: ExitStack) -> Read:
    """Configs of encoders of texts."""

    @cache
    def config_of(name: str) -> Any:
        save_encoder(ENCODERS[name], root / name)
        return json.loads((root / name / "config.json").read_text("utf-8"))

    def use(name: str, config: Any) -> None:
        (root / name / "config.json").write_text(json.dumps(config))
        localrt.load(root / name).close()

    names = ["bert", "embeddinggemma", "embeddinggemma2", "modernbert", "xlm-roberta"]
    return Read(names, config_of, lambda _, config: [*paths(config)], [use])


@contextmanager
def make_files(folder: Path) -> Iterator[Checkpoint]:
    """Write an adapter of both kinds; yields its base."""
    base = save_tiny("qwen2", folder / "base", layers=1)
    make_adapter(base.module, folder / "a", use_dora=True, target_modules=["q_proj", "down_proj"])
    with closing(open_checkpoint(folder / "base")) as checkpoint:
        rows, columns = checkpoint.tensors["model.layers.0.mlp.down_proj.weight"].shape
        tensors: dict[str, Any] = {
            "blk.0.ffn_down.weight.lora_a": (np.ones((2, columns), np.float32), "f32"),
            "blk.0.ffn_down.weight.lora_b": (np.ones((rows, 2), np.float32), "f16"),
        }
        keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0}
        write_gguf(folder / "a.gguf", "qwen2", keys, tensors)
        assert read_adapter(folder / "a", checkpoint).matrices
        assert read_adapter(folder / "a.gguf", checkpoint).matrices
        yield checkpoint


def exercise(path: Path, base: Checkpoint) -> None:
    """Read an adapter, in little memory."""
    with np.errstate(all="ignore"):
        assert read_adapter(path, base).nbytes < 1 << 24


def read_adapters(root: Path, stack: ExitStack) -> Read:
    """Configs of PEFT's folders."""
    base, path = stack.enter_context(make_files(root)), root / "a" / "adapter_config.json"
    config = json.loads(path.read_text("utf-8"))

    def use(_: str, changed: Any) -> None:
        path.write_text(json.dumps(changed))
        exercise(path.parent, base)

    more = [("rank_pattern", "q_proj"), ("alpha_pattern", "(")]
    return Read(["a"], lambda _: config, lambda _, own: [*paths(own), *more], [use])


READS: dict[str, Callable[[Path, ExitStack], Read]] = {
    "configs": read_configs,
    "encoders": read_encoders,
    "encoders of texts": read_text_encoders,
    "adapters": read_adapters,
}


@pytest.fixture(scope="module", params=READS)
def read(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Read]:
    with ExitStack() as stack:
        yield READS[request.param](tmp_path_factory.mktemp(request.param), stack)


@FUZZ
@given(data=st.data())
def test_any_values(read: Read, data: Any) -> None:
    name = data.draw(st.sampled_from(read.names))
    document = read.document(name)
    given = changed(document, data.draw(changes_of(read.places(name, document))))
    for use in read.uses:
        assert is_line(refusal(lambda use=use: use(name, given)))


@pytest.fixture(scope="module")
def adapter_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Checkpoint]]:
    folder = tmp_path_factory.mktemp("adapter")
    with make_files(folder) as base:
        yield folder, base


@FUZZ
@given(data=st.data())
@pytest.mark.parametrize("name", ["a/adapter_model.safetensors", "a.gguf"])
def test_any_bytes_of_an_adapter(name: str, adapter_files: Any, data: st.DataObject) -> None:
    (folder, base), path = adapter_files, adapter_files[0] / name
    valid = path.read_bytes()
    path.write_bytes(data.draw(mutations(valid)))
    try:
        path_read = path if name.endswith(".gguf") else folder / "a"
        assert is_line(refusal(lambda: exercise(path_read, base)))
    finally:
        path.write_bytes(valid)


@pytest.mark.parametrize("value", [10**400, "x" * 10_000, [], {}, None])
def test_odd_model_type(value: Any, tmp_path: Path) -> None:
    given = {**vars(save_tiny("llama", tmp_path).config), "model_type": value}
    assert is_line(refusal(lambda: load_config(tmp_path, given)))
    assert is_line(refusal(lambda: shape_from_config(given, name="fuzzed")))


def test_every_architecture() -> None:
    tried = {ARCHITECTURES[tiny_model(name).config.architectures[0]] for name in MODELS}
    assert tried == set(ARCHITECTURES.values())
