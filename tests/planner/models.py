"""Published configs, small shapes and machines to plan with."""

from __future__ import annotations

import functools
from typing import Any

from localrt.hub.names import find_known
from localrt.offload.account import Budgets
from localrt.offload.placement import PlacedUnit
from localrt.offload.shapes import ExpertShape, KvShape, ModelShape, PassSizes
from localrt.planning.forecast import Forecast, PlanRequest
from localrt.planning.machine import GpuProfile, KernelRate, MachineProfile
from localrt.planning.models import shape_from_config
from localrt.planning.search import make_forecast
from localrt.quant.cuda.gpu_cache import GpuRates
from localrt.quant.ops.attention import scratch_nbytes

_KNOWN = {
    "llama-3-70b": "llama3.3:70b",
    "qwen2.5-coder-1.5b": "qwen2.5-coder:1.5b",
    "qwen3-30b-a3b": "qwen3:30b",
    "gpt-oss-20b": "gpt-oss:20b",
    "gpt-oss-120b": "gpt-oss:120b",
    "lfm2-1.2b": "lfm2:1.2b",
    "llama-3.2-1b": "llama3.2:1b",
    "nemotron-3-nano-30b-a3b": "nemotron-3-nano:30b",
    "phi-4-mini": "phi4-mini:3.8b",
}


def _config(short_name: str) -> dict[str, Any]:
    """That which comes with localrt."""
    known = find_known(short_name)
    assert known is not None
    return dict(known.config())


CONFIGS: dict[str, dict[str, Any]] = {name: _config(short) for name, short in _KNOWN.items()} | {
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 72,
        "vocab_size": 163840,
        "model_max_length": 1048576,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 256,
        "num_shared_experts": 1,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
    },
    "qwen3.8-flash-next": {
        "model_type": "qwen4_exp_text",
        "hidden_size": 2560,
        "num_hidden_layers": 48,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rms_norm_eps": 1e-06,
        "full_attention_interval": 4,
        "output_gate_type": "sigmoid",
        "tie_word_embeddings": False,
        "linear_num_value_heads": 48,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "hc_count": 4,
        "hc_lowrank": 320,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 128,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": 2560,
        "ple_layer_ids": [2],
        "heads_per_ngram": 8,
        "make_ngram_vocab_size_divisible_by": 128,
        "ngram_size": 3,
        "ngram_vocab_size_base": 20000000,
        "split_ngram_parts": 128,
        "eos_token_id": 248044,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    },
    "falcon-h1-7b": {
        "model_type": "falcon_h1",
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 44,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 130048,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e11,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_rms_norm": False,
        "tie_word_embeddings": False,
    },
}

MB = 1_000_000

RATE = GpuRates(
    products={"int4-g32": (2e-12, 3e-12, 9e-12, 6e-11, 8e-11, 2e-10)},
    memory_bytes_s=250e9,
    to_gpu_bytes_s=12e9,
    busy_link=0.8,
    busy_cpu=0.7,
    crossing_s=3e-5,
    replay_s=2e-6,
)
"""A measured GPU."""


@functools.cache
def published(name: str) -> ModelShape:
    """The shape of a published model."""
    return shape_from_config(CONFIGS[name], name=name)


def machine(*, gpu: bool = False, ssd: float = 1e9, link: float = 12e9) -> MachineProfile:
    """A small desktop; with ``gpu`` a GPU of 256 GB/s."""
    rate = KernelRate((1, 64, 512), (2.5e-11, 2e-10, 1.4e-9))
    gpu_profile = GpuProfile(name="gpu", vram_bytes=8 << 30, bytes_s=256e9, flops=20e12, call_s=0.0)
    return MachineProfile(
        name="test machine",
        ssd_bytes_s=ssd,
        ram_bytes_s=30e9,
        kernels={"int4-g32": rate},
        attention=KernelRate((1, 64), (4e-11, 1e-11)),
        threads=2,
        gpu=gpu_profile if gpu else None,
        link_bytes_s=link if gpu else None,
    )


def shape(
    *,
    layers: int = 4,
    attention: int = 4096 * 500,
    mlp: int = 4096 * 2000,
    head: int = 2,
    experts: int = 0,
    used: int = 2,
    kv: int = 64,
) -> ModelShape:
    """A model of the given bytes per unit, all of them int4."""

    def unit(name: str, kind: Any, nbytes: int, layer: int | None = None) -> PlacedUnit:
        use = 0.0 if kind == "embedding" else used / experts if kind == "expert" else 1.0
        macs = 0 if kind in ("embedding", "norm") else nbytes * 16 // 9
        return PlacedUnit(
            name=name, kind=kind, nbytes=nbytes, macs=macs, format="int4-g32", layer=layer, use=use
        )

    units = [unit("embedding", "embedding", 4096 * 1000)]
    for layer in range(layers):
        units.append(unit(f"layers.{layer}.attention", "attention", attention, layer))
        units.append(unit(f"layers.{layer}.mlp", "mlp", mlp, layer))
        units += [
            unit(f"layers.{layer}.expert.{n}", "expert", mlp // 2, layer) for n in range(experts)
        ]
    units.append(unit("norm", "norm", 4096))
    units += [unit(f"head.{n}", "head", 4096 * 700) for n in range(head)]
    inner = mlp // 2 * 16 // 9 // 1536
    return ModelShape(
        name="test model",
        architecture="llama",
        units=tuple(units),
        sizes=PassSizes(
            hidden=512,
            inner=1024,
            vocab=4000,
            parts=2 * layers + 1,
            experts_used=used if experts else 0,
            expert_inner=inner if experts else 0,
            split_nbytes=scratch_nbytes(2, kv, 4096),
        ),
        context_length=4096,
        kv=(KvShape(groups=2, width=kv, macs=4 * kv),) * layers,
        parameters=sum(unit.macs for unit in units),
        experts=ExpertShape(count=experts, used=used, inner=inner) if experts else None,
    )


def planned(
    shape: ModelShape,
    machine: MachineProfile,
    budgets: Budgets,
    **options: Any,
) -> Forecast:
    """``make_plan``, with a request of these parts."""
    request = PlanRequest(shape=shape, machine=machine, budgets=budgets, **options)
    return make_forecast(request)
