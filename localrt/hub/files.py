"""Which files of a repository make a model: the GGUF variants, or safetensors with their configs.

Works on relative paths with forward slashes, so that the same code serves the hub's lists and local
snapshots. Opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from localrt.common.errors import ModelNotFoundError
from localrt.models.weight_files import (
    ADAPTER_NAME,
    DENSE,
    INDEX_NAME,
    POOLING_NAME,
    WEIGHTS_NAME,
    is_draft_file,
    projector_files,
    rivals,
    weight_files,
)

DEFAULT_LABEL = "Q4_K_M"

_LABEL = re.compile(
    r"(?:^|(?<=[-._]))"
    r"(?:UD-)?(?:(?:I?Q|TQ)\d+(?:_[A-Z0-9]+)*|BF16|F16|F32|FP16|FP32|MXFP4(?:_MOE)?|NVFP4)"
    r"(?=$|[-.])",
    re.IGNORECASE,
)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})$")
_NOT_A_MODEL = re.compile(
    r"(^|[-._])(mmproj\b|imatrix(_unsloth)?\.gguf$)"
    r"|^(clip|vae)([-_.](l|g|h|vit|vision|model|b?f16|fp16|f32)\b.*)?\.gguf$",
    re.IGNORECASE,
)
_TOKENIZER_FILES = re.compile(r"tokenizer.*\.model|.*\.jinja|merges\.txt|vocab\.txt|spiece\.model")

ADAPTER_FILES = (ADAPTER_NAME, "adapter_model.safetensors")
"""What an adapter's repository has to hold."""


@dataclass(frozen=True, slots=True)
class GgufVariant:
    """One GGUF model of a repository: its quantization label and its file, or all its parts.

    ``drafts``: it is only a head that drafts for a model.
    """

    label: str
    stem: str
    files: tuple[str, ...]
    drafts: bool = False

    @property
    def is_labelled(self) -> bool:
        """Whether the file name states a quantization (else ``label`` is the name itself)."""
        return self.label != self.stem


def quantization_label(stem: str) -> str | None:
    """The quantization that a file name states, in upper case: ``"Q4_K_M"``, ``"UD-IQ2_XXS"``."""
    found = _LABEL.findall(stem)
    return found[-1].upper() if found else None


def name_words(name: str) -> list[str]:
    """The words of a model's, repository's or file's name in lower case, without a quantization:
    ``["qwen3", "8b"]`` of ``org/Qwen3-8B-GGUF:Q4_K_M``.
    """
    stem = name.rpartition("/")[2].replace(":", "-").removesuffix(".gguf")
    label = quantization_label(stem)
    stem = stem if label is None else re.sub(re.escape(label), "", stem, flags=re.IGNORECASE)
    return re.findall(r"[a-z0-9]+", stem.lower().replace("gguf", " "))


def gguf_variants(paths: Iterable[str]) -> list[GgufVariant]:
    """The GGUF models among ``paths``, with split files grouped. Projectors are left out, as are
    split files of which a part is missing.
    """
    groups: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        if not name.lower().endswith(".gguf") or _NOT_A_MODEL.search(name):
            continue
        stem = name[: -len(".gguf")]
        split = _SPLIT.match(stem)
        part, parts = (int(split["part"]), int(split["parts"])) if split else (1, 1)
        base = split["stem"] if split else stem
        groups.setdefault((f"{folder}/{base}" if folder else base, parts), []).append((part, path))
    variants = []
    for (base, parts), members in sorted(groups.items()):
        stem = base.rpartition("/")[2]
        members.sort()
        if [part for part, _ in members] != list(range(1, parts + 1)):
            continue
        folder = base.rpartition("/")[0].rpartition("/")[2]
        label = quantization_label(stem) or quantization_label(folder) or stem
        files = tuple(path for _, path in members)
        variants.append(GgufVariant(label, stem, files, is_draft_file(base)))
    return variants


def models_among(variants: Iterable[GgufVariant], repo: str) -> list[GgufVariant]:
    """The variants to choose from: no heads, except in a repository named as a head."""
    every = list(variants)
    models = [each for each in every if not each.drafts]
    return models or (every if is_draft_file(repo) else [])


def choose_variant(variants: Collection[GgufVariant], wanted: str | None, repo: str) -> GgufVariant:
    """The variant called ``wanted`` (label or file name, any case), by default ``DEFAULT_LABEL``.

    What only drafts is given by its file name, except in a repository that is named as a head.

    Raises:
        ModelNotFoundError: none or several fit; the message lists the variants.
    """
    models = models_among(variants, repo)
    heads = [each for each in variants if each.drafts]
    there = ", ".join(dict.fromkeys(variant.label for variant in models))
    if wanted is None:
        if len(models) == 1:
            return models[0]
        fitting = [variant for variant in models if variant.label == DEFAULT_LABEL]
        if not models and heads:
            names = ", ".join(head.files[0] for head in heads)
            raise ModelNotFoundError(f"{repo} holds only what drafts for a model ({names})")
        if not fitting:
            raise ModelNotFoundError(
                f"{repo} holds several GGUF files: choose one as {repo}:LABEL (there: {there})"
            )
    else:
        fitting = _matching(models, wanted) or _named(heads, wanted)
    if not fitting:
        raise ModelNotFoundError(f"{repo} has no GGUF file {wanted!r} (there: {there or 'none'})")
    if len(fitting) > 1:
        names = ", ".join(variant.files[0] for variant in fitting)
        raise ModelNotFoundError(
            f"{repo} has several {fitting[0].label} files: choose one as {repo}:FILE ({names})"
        )
    return fitting[0]


def head_variant(variants: Iterable[GgufVariant], label: str) -> str:
    """The file of the head that drafts for a repository's model: the one with the quantization
    ``label``, else of 8 bits, else any; empty if there is none.
    """
    heads = [each for each in variants if each.drafts]
    ranked = sorted(heads, key=lambda each: (each.label != label, each.label != "Q8_0"))
    return ranked[0].files[0] if ranked else ""


def variant_projectors(variant: GgufVariant, paths: Iterable[str]) -> list[str]:
    """The vision encoder among ``paths``, at the top or beside the model, and files that rival it;
    none for a model that only drafts.
    """
    folders = ("", variant.files[0].rpartition("/")[0])
    beside = [] if variant.drafts else [p for p in paths if p.rpartition("/")[0] in folders]
    encoders = projector_files(beside, variant.files[0])
    return encoders[:1] + (rivals(encoders[0], encoders, variant.files[0]) if encoders else [])


def variant_name(variant: GgufVariant, variants: Collection[GgufVariant]) -> str:
    """The name after the colon: the label, or the file name if several share a label, and of what
    only drafts.
    """
    labels = [other.label for other in variants if not other.drafts]
    own = not variant.drafts and labels.count(variant.label) == 1
    return variant.label if own else variant.files[0]


def _named(variants: list[GgufVariant], wanted: str) -> list[GgufVariant]:
    name = wanted.lower().removesuffix(".gguf")
    return [
        each
        for each in variants
        if name in (each.stem.lower(), each.files[0].lower().removesuffix(".gguf"))
    ]


def _matching(variants: list[GgufVariant], wanted: str) -> list[GgufVariant]:
    name = wanted.lower().removesuffix(".gguf")
    for names in (
        [variant.label.lower() for variant in variants],
        [variant.stem.lower() for variant in variants],
        [variant.files[0].lower().removesuffix(".gguf") for variant in variants],
        [variant.label.lower().removeprefix("ud-") for variant in variants],
    ):
        if name in names:
            return [variants[i] for i, known in enumerate(names) if known == name]
    return []


def safetensors_model_files(
    paths: Collection[str], shards: Collection[str] | None = None
) -> list[str]:
    """The files of a Hugging Face model among ``paths``, weights last; empty if there is none.

    Takes top-level files (subfolders hold other tools' copies) and the pooling, no pickles or ONNX.
    ``shards`` are the index's; without them, every file but a whole model may be a shard.
    """
    top = [path for path in paths if "/" not in path]
    weights = weight_files(top, shards)
    if INDEX_NAME in top and shards is None:
        parts = [path for path in top if path.endswith(".safetensors") and path != WEIGHTS_NAME]
        weights = parts or weights
    if not weights or "config.json" not in top:
        return []
    small = [path for path in top if path.endswith(".json") or _TOKENIZER_FILES.fullmatch(path)]
    dense = {f"{folder}/{name}" for folder in DENSE for name in ("config.json", WEIGHTS_NAME)}
    small += [path for path in paths if path == POOLING_NAME or path in dense]
    return sorted(small) + sorted(weights)


def has_safetensors(paths: Collection[str], shards: Collection[str] | None) -> bool:
    """Whether a folder holding ``paths`` has all its weights; ``shards`` are those of its index."""
    if "config.json" not in paths:
        return False
    return bool(weight_files([path for path in paths if "/" not in path], shards))
