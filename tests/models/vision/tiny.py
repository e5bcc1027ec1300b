"""Folders of tiny random models that see, with tokenizers and chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.models.tiny import kept

_NAMES = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that knows no pictures."""


def write_tokenizer(folder: Path, template: str = _TEMPLATE) -> dict[str, int]:
    """Write a tokenizer of bytes and a chat template; returns the ids of control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(_NAMES),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is this", "hello world"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {name: tokenizer.token_to_id(name) for name in _NAMES}


def qwen_folder(folder: Path, template: str = _TEMPLATE) -> Path:
    """A Qwen2.5-VL with random weights."""
    folder.mkdir(exist_ok=True)
    ids = write_tokenizer(folder, template)
    made = kept("qwen", lambda path: _write_qwen(path, ids), Path(__file__))
    return shutil.copytree(made, folder, dirs_exist_ok=True)


def _write_qwen(folder: Path, ids: dict[str, int]) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "depth": 2,
            "num_heads": 4,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "patch_size": 14,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        eos_token_id=ids["<|im_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.08)
    model.save_pretrained(folder)
