"""Tiny random encoders of texts: transformers' models, their folders, and GGUF files of them."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.checkpoints.make_gguf import write_gguf
from tests.models.tiny_configs import hf
from tests.tokenizers.varied_text import varied_strings

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 90,
}


_MODERN: dict[str, Any] = dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id"), 0)
_MODERN |= dict.fromkeys(("bos_token_id", "eos_token_id"), 0)

_GEMMA: dict[str, Any] = {"use_bidirectional_attention": True, "head_dim": 16}
_GEMMA |= {"num_key_value_heads": 2, "pad_token_id": 0, "sliding_window": 10}
_GEMMA2: dict[str, Any] = {"num_key_value_heads": 2, "pad_token_id": 0, "sliding_window": 5}
_GEMMA2 |= {"head_dim": 12, "global_head_dim": 16, "num_global_key_value_heads": 1}
_GEMMA2 |= {"hidden_size_per_layer_input": 14, "embedding_dim": 30, "num_hidden_layers": 7}


def _made(name: str, form: str = "Model", **changed: Any) -> Callable[[], Any]:
    def make() -> Any:
        sizes = {} if "text_config" in changed else _SIZES
        config = getattr(hf, f"{name}Config")(**{**sizes, **changed})
        model = getattr(hf, f"{name}{form}")
        pooled = form == "Model" and name != "ModernBert" and "Gemma" not in name
        return model(config, add_pooling_layer=True) if pooled else model(config)

    return make


ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": _made("Bert"),
    "bert-odd": _made(
        "Bert", hidden_size=66, num_attention_heads=3, intermediate_size=37, hidden_act="gelu_new"
    ),
    "bert-words": _made("Bert", "ForMaskedLM", layer_norm_eps=1e-5),
    "roberta": _made("Roberta", type_vocab_size=1, pad_token_id=1),
    "roberta-words": _made("Roberta", "ForMaskedLM", type_vocab_size=1, pad_token_id=1),
    "xlm-roberta": _made("XLMRoberta", type_vocab_size=1),
    "xlm-roberta-words": _made("XLMRoberta", "ForMaskedLM", type_vocab_size=1, pad_token_id=3),
    "nomic-bert": _made("NomicBert"),
    "nomic-bert-words": _made("NomicBert", "ForMaskedLM"),
    "modernbert": _made("ModernBert", num_hidden_layers=5, local_attention=9, **_MODERN),
    "modernbert-words": _made("ModernBert", "ForMaskedLM", **_MODERN),
    "modernbert-odd": _made(
        "ModernBert",
        hidden_size=66,
        num_attention_heads=3,
        intermediate_size=37,
        num_hidden_layers=3,
        local_attention=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        hidden_activation="silu",
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        **_MODERN,
    ),
    "jina-v3": _made("JinaEmbeddingsV3", type_vocab_size=1),
    "jina-v3-words": _made("JinaEmbeddingsV3", "ForMaskedLM", hidden_act="gelu_new"),
    "embeddinggemma": _made("Gemma3Text", num_hidden_layers=7, query_pre_attn_scalar=16, **_GEMMA),
    "embeddinggemma2": _made("EmbeddingGemma2Text", **_GEMMA2),
    "embeddinggemma2-odd": _made(
        "EmbeddingGemma2",
        text_config={**_SIZES, **_GEMMA2, "num_global_key_value_heads": 2},
        vision_config={
            "model_type": "gemma4_vision",
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 12,
        },
    ),
}
RANKERS: dict[str, Callable[[], Any]] = {
    "bert": _made("Bert", "ForSequenceClassification", num_labels=1),
    "roberta": _made("Roberta", "ForSequenceClassification", type_vocab_size=1, num_labels=1),
    "xlm-roberta": _made(
        "XLMRoberta", "ForSequenceClassification", type_vocab_size=1, num_labels=1
    ),
    "nomic-bert": _made("NomicBert", "ForSequenceClassification", num_labels=1),
    "modernbert": _made("ModernBert", "ForSequenceClassification", num_labels=1, **_MODERN),
    "jina-v3": _made("JinaEmbeddingsV3", "ForSequenceClassification", num_labels=1),
}


def save_encoder(make: Callable[[], Any], folder: Path, seed: int = 0) -> Any:
    """Write a random encoder as a folder; returns transformers' model."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
            if parameter.ndim == 1:
                parameter.add_(0.5)
    model = model.float().eval()
    model.save_pretrained(folder)
    return model


def add_dense(folder: Path, *sizes: int) -> list[np.ndarray]:
    """Write matrices of these sizes as sentence-transformers does, and return them."""
    matrices = []
    for number, shape in enumerate(zip(sizes[1:], sizes, strict=False), 2):
        own = folder / f"{number}_Dense"
        own.mkdir()
        matrices.append(np.random.default_rng(number).standard_normal(shape, np.float32))
        save_file({"linear.weight": matrices[-1]}, own / "model.safetensors")
        kind = "torch.nn.modules.linear.Identity"
        (own / "config.json").write_text(json.dumps({"activation_function": kind}))
    return matrices


def states(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Transformers' last hidden states (n, D) of a text."""
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_hidden_states=True)
    last = found.get("last_hidden_state", found.hidden_states[-1])
    return np.asarray(last[0].numpy())


_GGUF = {
    "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
    "jina_embeddings_v3": gguf.MODEL_ARCH.JINA_BERT_V3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
}
"""Architectures in GGUF by ``model_type``; others are BERT."""


def encoder_gguf(folder: Path, path: Path, **more: Any) -> Path:
    """The folder's encoder as llama.cpp's converter writes it; ``more`` are metadata, in which
    ``bert.`` stands for any architecture.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    family = _GGUF.get(config["model_type"], gguf.MODEL_ARCH.BERT)
    arch = gguf.MODEL_ARCH_NAMES[family]
    names = gguf.get_tensor_name_map(family, config["num_hidden_layers"])
    first = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    tensors = {}
    for key, value in load_file(folder / "model.safetensors").items():
        key = re.sub(r"^(bert|roberta|nomic_bert|model)\.", "", key)
        key = re.sub(r"^classifier\.(weight|bias)", r"classifier.out_proj.\1", key)
        if key.startswith(("pooler.", "cls.", "lm_head.", "decoder.")):
            continue
        if key == "embeddings.position_embeddings.weight":
            value = value[first:]
        if config["model_type"] == "gemma3_text":
            value, key = value + ("norm" in key), f"model.{key}"
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        tensors[name] = value, "f32"
    for number in (2, 3):
        if (dense := folder / f"{number}_Dense/model.safetensors").exists():
            tensors[f"dense_{number}.weight"] = load_file(dense)["linear.weight"], "f32"
    metadata = {
        "bert.context_length": config["max_position_embeddings"] - first,
        "bert.embedding_length": config["hidden_size"],
        "bert.feed_forward_length": config["intermediate_size"],
        "bert.block_count": config["num_hidden_layers"],
        "bert.attention.head_count": config["num_attention_heads"],
        "bert.attention.layer_norm_epsilon": float(
            config.get("layer_norm_eps", config.get("norm_eps", 0))
        ),
        "bert.attention.causal": False,
        "tokenizer.ggml.token_type_count": config.get("type_vocab_size", 1),
        **_rotary(config),
        "tokenizer.ggml.model": "no_vocab",
        **more,
    }
    own = {re.sub("^bert", arch, key): value for key, value in metadata.items()}
    return write_gguf(path, arch, own, tensors)[0]


def _rotary(config: dict[str, Any]) -> dict[str, Any]:
    if (rope := config.get("rope_parameters")) is None:
        return {}
    if "rope_theta" in rope:
        return {"bert.rope.freq_base": rope["rope_theta"]}
    if "sliding_window" in config:
        return {
            "bert.rope.freq_base": rope["full_attention"]["rope_theta"],
            "bert.attention.sliding_window": config["sliding_window"],
            "bert.attention.head_count_kv": config["num_key_value_heads"],
            "bert.attention.key_length": config["head_dim"],
            "bert.attention.value_length": config["head_dim"],
            "bert.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        }
    return {
        "bert.rope.freq_base": rope["full_attention"]["rope_theta"],
        "bert.rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "bert.attention.sliding_window": config["local_attention"],
        "bert.attention.sliding_window_pattern": 3,
    }


def _save_tokenizer(backend: Backend, folder: Path, texts: Sequence[str], trainer: Any) -> Any:
    """Train and write a tokenizer with BERT's special tokens; returns transformers' own."""
    trainer.special_tokens, trainer.show_progress = list(_SPECIAL), False
    backend.train_from_iterator(texts, trainer)
    words = isinstance(backend.model, models.WordPiece)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if words else "[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    names = {f"{name[1:-1].lower()}_token": name for name in _SPECIAL}
    own = hf.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    own.save_pretrained(folder)
    return own


def word_pieces(folder: Path, *, cased: bool = False, vocab_size: int = 211) -> Any:
    """Write a WordPiece tokenizer trained on varied strings; returns transformers' own."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, limit_alphabet=vocab_size // 3)
    texts = [word for word in varied_strings(400, seed=1) if cased or word]
    return _save_tokenizer(backend, folder, texts, trainer)


def unigram(folder: Path, vocab_size: int = 211, characters: bytes = b"") -> Any:
    """Write XLM-RoBERTa's kind of tokenizer; returns transformers' own. ``characters`` is
    SentencePiece's table for normalizing.
    """
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    backend = Backend(models.Unigram())
    if characters:
        backend.normalizer = normalizers.Precompiled(characters)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    backend.train_from_iterator(
        [text for text in varied_strings(2000, seed=1) if text.isascii()],
        trainers.UnigramTrainer(
            vocab_size=vocab_size, special_tokens=special, unk_token="<unk>", show_progress=False
        ),
    )
    trained = json.loads(backend.to_str())["model"]
    scored = [(piece, float(np.float32(score))) for piece, score in trained["vocab"]]
    backend.model = models.Unigram(scored, trained["unk_id"], False)
    backend.decoder = decoders.Metaspace()
    ends = [(name, backend.token_to_id(name)) for name in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    names = {"bos": "<s>", "cls": "<s>", "pad": "<pad>", "eos": "</s>", "sep": "</s>"}
    names = {f"{key}_token": name for key, name in {**names, "unk": "<unk>"}.items()}
    own = hf.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    own.save_pretrained(folder)
    return own


def byte_level(folder: Path, vocab_size: int = 400) -> Any:
    """Write ModernBERT's kind of tokenizer; returns transformers' own."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet)
    return _save_tokenizer(backend, folder, varied_strings(400, seed=1), trainer)


def vocabulary_keys(own: Any) -> dict[str, Any]:
    """The keys of a GGUF file with the tokenizer, as llama.cpp's converter writes them."""
    spec = json.loads(own.backend_tokenizer.to_str())["model"]
    pieces = own.convert_ids_to_tokens(range(len(own)))
    types = [3 if token in own.all_special_ids else 1 for token in range(len(own))]
    more: dict[str, Any]
    if spec["type"] == "Unigram":
        types[own.unk_token_id] = 2
        ids = {"bos": own.bos_token_id, "eos": own.eos_token_id, "unknown": own.unk_token_id}
        more = {
            "model": "t5",
            "tokens": pieces,
            "scores": [float(score) for _, score in spec["vocab"]],
        }
        if (normalizer := json.loads(own.backend_tokenizer.to_str())["normalizer"]) is not None:
            table = b64decode(normalizer["precompiled_charsmap"])
            more["precompiled_charsmap"] = np.frombuffer(table, np.uint8)
    elif spec["type"] == "BPE":
        ids = {"bos": own.cls_token_id, "eos": own.sep_token_id}
        more = {"model": "gpt2", "pre": "modern-bert", "tokens": pieces}
        more |= {"merges": [" ".join(pair) for pair in spec["merges"]]}
        more |= dict.fromkeys(("add_bos_token", "add_eos_token", "add_sep_token"), True)
    else:
        ids = {"unknown": own.unk_token_id, "seperator": own.sep_token_id}
        phantom = [
            piece if kind == 3 else piece[2:] if piece.startswith("##") else f"▁{piece}"
            for piece, kind in zip(pieces, types, strict=True)
        ]
        more = {"model": "bert", "tokens": phantom}
    more |= {"token_type": types, **{f"{key}_token_id": token for key, token in ids.items()}}
    return {f"tokenizer.ggml.{key}": value for key, value in more.items()}
