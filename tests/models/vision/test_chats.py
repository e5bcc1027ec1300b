"""Conversations with pictures: the ids that transformers' processors make, and the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

import localrt
from localrt.chat_format.pictures import pictures_of
from localrt.models.vision.picture import Picture
from tests.inside import core_of, engine_of
from tests.models.vision.families import FAMILIES, IMAGE, Family, minicpm_processor
from tests.models.vision.oracles import expanded, plain

_TEMPLATE = """{%- for message in messages -%}
{{- '<|start|>' + message.role + '\n' -}}
{%- for part in message.content -%}
{{- 'PICTURE' if part.type == 'image' else part.text -}}
{%- endfor -%}
{{- '<|end|>\n' -}}
{%- endfor -%}
{{- '<|start|>assistant\n' if add_generation_prompt -}}
"""
PICTURES = Family.pictures
_TEXTS = ["what is this\n\n\nhello world\n\nand this\n"] * 3  # so that new lines make tokens
_TILES = [f"row_{row}_col_{column}" for row in (1, 2, 3) for column in (1, 2, 3)]


def tokenizer(image: str, placeholder: str, *names: str, first: str = "<|start|>") -> Any:
    """A tokenizer of bytes and their pairs, with ``names`` and ``image`` as control tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=[first, "<|end|>", image, *names],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_TEXTS, trainer)
    assert made.token_to_id(image) == IMAGE
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|end|>",
        chat_template=_TEMPLATE.replace("PICTURE", placeholder),
        extra_special_tokens={
            "image_token": image,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )


def processor(name: str, images: Any) -> Any:
    """Transformers' processor of a family, whose pictures ``images`` prepares."""
    if name == "gemma3":
        own = tokenizer("<image_soft_token>", "<start_of_image>")
        return Gemma3Processor(images, own, image_seq_length=16)
    if name == "idefics3":
        names = ["<fake_token_around_image>", "<global-img>", *(f"<{tile}>" for tile in _TILES)]
        return Idefics3Processor(images, tokenizer("<image>", "<image>", *names), image_seq_len=9)
    names = ["<|image_start|>", "<|image_end|>", *(f"<|img_{tile}|>" for tile in _TILES)]
    return Lfm2VlProcessor(images, tokenizer("<image>", "<image>", *names))


def message(role: str, *parts: str | Picture) -> dict[str, Any]:
    """A message of texts and pictures."""

    def shown(part: str | Picture) -> dict[str, Any]:
        kind = "text" if isinstance(part, str) else "image"
        return {"type": kind, kind: part}

    return {"role": role, "content": [shown(part) for part in parts]}


CHATS: dict[str, Sequence[dict[str, Any]]] = {
    "text": [message("user", "what is this")],
    "picture-first": [message("user", PICTURES[0], "what is this")],
    "pictures": [
        message("user", "what is this\n", PICTURES[1]),
        message("assistant", "hello world"),
        message("user", "and this", PICTURES[0], PICTURES[1], "\n\nhello"),
    ],
}


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize("name", ["gemma3", "idefics3", "lfm2-vl-tiles"])
def test_chats(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name](tmp_path)
    theirs = processor(name, family.processor)
    theirs.tokenizer.save_pretrained(tmp_path)
    with localrt.load(str(tmp_path), device="cpu", format="f32", ctx=1024) as model:
        for chat in CHATS.values():
            text = theirs.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True
            )
            images = [picture.image() for picture in pictures_of(chat)]
            inputs = theirs(images=images or None, text=text, return_tensors="pt")
            (ids,) = inputs["input_ids"].tolist()
            assert plain(core_of(model).requests.render(chat), IMAGE) == ids
            with torch.no_grad():
                found = family.model.generate(
                    **inputs, do_sample=False, max_new_tokens=8, min_new_tokens=8
                )
            answer = model.generate(chat, temperature=0.0, max_tokens=8, ignore_eos=True)
            assert list(answer.token_ids) == found[0, len(ids) :].tolist()


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize("name", ["mistral3", "gemma4", "gemma4-unified", "internvl", "minicpm-v"])
def test_tokens_around_rows(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {}
    if name == "mistral3":
        own = tokenizer("[IMG]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
        sizes = {"vocab_size": 310}
    elif name == "internvl":  # its template ends the line behind a picture
        own = tokenizer("<IMG_CONTEXT>", "<IMG_CONTEXT>\n", "<img>", "</img>")
    elif name == "minicpm-v":
        tags = [f"<{end}{tag}>" for tag in ("image", "slice", "image_id") for end in ("", "/")]
        own = tokenizer("<|image_pad|>", "<|image_pad|>", *tags)
    else:
        names = ("<|image>", "<image|>", "<|start|>")
        own = tokenizer("<|image|>", "<|image|>", *names, first="<pad>")
        sizes = {"own": {"vocab_size": 310, "vocab_size_per_layer_input": 310}}
    FAMILIES[name](tmp_path, **sizes)
    own.save_pretrained(tmp_path)
    with localrt.load(str(tmp_path), device="cpu", format="f32", ctx=1024) as model:
        vision = engine_of(model).vision
        assert vision is not None
        encoder = vision.encoder
        for chat in CHATS.values():
            text = own.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            pictures = pictures_of(chat)
            begin, *parts = text.split(encoder.placeholder)
            shown = [expanded(encoder.prepare(each), encoder.placeholder) for each in pictures]
            if name == "minicpm-v":  # a picture's number stands before it
                theirs = minicpm_processor()
                shown = theirs._prepend_local_ids([text], shown, encoder.placeholder)
            begin += "".join(map("".join, zip(shown, parts, strict=True)))
            ids = own.encode(begin, add_special_tokens=False)
            assert plain(core_of(model).requests.render(chat), IMAGE) == ids
