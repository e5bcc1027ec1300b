"""Architectures by their names in ``config.json`` and GGUF.

Does not know engines: ``load_decoder`` takes any ``Ops``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from localrt.common.errors import UnsupportedModelError
from localrt.common.option_names import option
from localrt.models.checkpoints.base import Checkpoint
from localrt.models.config import DecoderConfig
from localrt.models.decoder import Decoder, load_resident
from localrt.models.raw_config import RawConfig
from localrt.models.weights import WeightLoader
from localrt.quant.formats import FORMATS, GGML_FORMATS
from localrt.quant.ops.protocol import Ops

# Module (and function, if it has several) to published names: GGUF's general.architecture,
# config.json's architectures
_PUBLISHED = {
    "llama": "llama LlamaForCausalLM mistral MistralForCausalLM",
    "llama.llava": "LlavaForConditionalGeneration Idefics3ForConditionalGeneration "
    "SmolVLMForConditionalGeneration",
    "llama.ministral3": "mistral3 Ministral3ForCausalLM Mistral3ForConditionalGeneration",
    "llama.mixtral": "MixtralForCausalLM",
    "qwen.qwen2": "qwen2 Qwen2ForCausalLM qwen2vl Qwen2VLForConditionalGeneration "
    "Qwen2_5_VLForConditionalGeneration",
    "qwen.qwen3": "qwen3 Qwen3ForCausalLM qwen3vl Qwen3VLForConditionalGeneration",
    "gemma.gemma2": "gemma2 Gemma2ForCausalLM",
    "gemma.gemma3": "gemma3 Gemma3ForCausalLM Gemma3ForConditionalGeneration",
    "gemma3n": "gemma3n Gemma3nForCausalLM Gemma3nForConditionalGeneration",
    "gemma4": "gemma4 Gemma4ForCausalLM Gemma4ForConditionalGeneration",
    "phi3": "phi3 Phi3ForCausalLM",
    "smollm3": "smollm3 SmolLM3ForCausalLM",
    "qwen.qwen2_moe": "qwen2moe Qwen2MoeForCausalLM",
    "qwen.qwen3_moe": "qwen3moe Qwen3MoeForCausalLM qwen3vlmoe Qwen3VLMoeForConditionalGeneration",
    "olmo.olmoe": "olmoe OlmoeForCausalLM",
    "olmo.olmo2": "olmo2 Olmo2ForCausalLM Olmo3ForCausalLM",
    "olmo.olmo_hybrid": "OlmoHybridForCausalLM",
    "hunyuan": "hunyuan-dense HunYuanDenseV1ForCausalLM",
    "exaone4": "exaone4 Exaone4ForCausalLM",
    "llama.seed_oss": "seed_oss SeedOssForCausalLM",
    "ernie": "ernie4_5 Ernie4_5ForCausalLM ernie4_5-moe Ernie4_5_MoeForCausalLM",
    "granite": "granite GraniteForCausalLM",
    "granite.granite_swa": "granite_swa GraniteSWAForCausalLM GraniteMoeSWAForCausalLM",
    "granite.granite_moe": "granitemoe GraniteMoeForCausalLM GraniteMoeSharedForCausalLM",
    "gpt_oss": "gpt-oss GptOssForCausalLM",
    "lfm.lfm2": "lfm2 Lfm2ForCausalLM lfm2moe Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration",
    "lfm.lfm3": "Lfm3ForCausalLM Lfm3VlForConditionalGeneration",
    "granite.granite_hybrid": "granitehybrid GraniteMoeHybridForCausalLM",
    "qwen3_5": "qwen35 qwen35moe Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration "
    "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration qwen3next Qwen3NextForCausalLM",
    "qwen4_exp": "qwen4exp Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration",
    "kimi_linear": "kimi-linear KimiLinearForCausalLM",
    "mamba.falcon_h1": "falcon-h1 FalconH1ForCausalLM",
    "mamba.nemotron_h": "nemotron_h nemotron_h_moe NemotronHForCausalLM "
    "NemotronH_Omni_Reasoning_V3 NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2",
    "deepseek": "deepseek2 DeepseekV2ForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM",
    "deepseek.glm4_moe": "glm4moe Glm4MoeForCausalLM",
}
_PLACES = {name: place for place, names in _PUBLISHED.items() for name in names.split()}
ARCHITECTURES = {name: place.rpartition(".")[2] for name, place in _PLACES.items()}


def find_architecture(name: str) -> Callable[[RawConfig], DecoderConfig]:
    """The function that reads the config of a checkpoint's architecture.

    Raises:
        UnsupportedModelError: an unknown architecture; lists the known ones.
    """
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(set(ARCHITECTURES.values())))
        raise UnsupportedModelError(
            f"architecture {name!r:.60} is not known to the native engine (known: {known}); "
            f"a GGUF file may run with {option('engine', 'llamacpp')}"
        )
    file, _, own = _PLACES[name].partition(".")
    module = import_module(f"localrt.models.architectures.{file}")
    function = f"read_{own or 'config'}"
    read: Callable[[RawConfig], DecoderConfig] = getattr(module, function)
    return read


def read_config(checkpoint: Checkpoint, *, context: int | None = None) -> DecoderConfig:
    """Read the checkpoint's config; rotary scaling may depend on ``context``, in tokens."""
    name = checkpoint.architecture
    if name == "llama" and checkpoint.config.get("num_local_experts"):
        name = "MixtralForCausalLM"  # GGUF has one name for both
    read = find_architecture(name)
    try:
        return read(RawConfig(checkpoint, context=context))
    except ValueError as error:
        raise UnsupportedModelError(f"{checkpoint.path.name}: {error}") from error


def require_readable(checkpoint: Checkpoint) -> None:
    """Check that localrt can unpack every tensor's format.

    Raises:
        UnsupportedModelError: names the first unsupported one, and an alternative.
    """
    for info in checkpoint.tensors.values():
        if FORMATS.get(info.format.name) != info.format:
            readable = ", ".join(known.name.upper() for known in GGML_FORMATS.values())
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor {info.name!r} is {info.format.name.upper()}, which the "
                f"native engine cannot read: use a file with one of {readable}, "
                f"or {option('engine', 'llamacpp')}"
            )


def load_decoder(
    checkpoint: Checkpoint,
    ops: Ops,
    config: DecoderConfig,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> Decoder:
    """Read every tensor into ``ops`` and build the model; ``on_bytes`` gets each read's bytes."""
    require_readable(checkpoint)
    return Decoder(load_resident(config, ops, WeightLoader(checkpoint, ops, on_bytes)))
