"""Markdown from ``quality.json``: a short table, and all rows.

The short one shows each format by its default method and by rounding, at their weights' own loss.
It computes nothing that the JSON does not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common.record import machine_of, markdown_table, versions_of
from localrt.common.formatting import format_rate
from localrt.quant.methods import METHODS

Record = dict[str, Any]
Row = dict[str, Any]

_SHORT_FORMATS = ("int4-g32", "nf4", "mxfp4", "nvfp4", "q3_k", "q2_k")
_GGML = ("ggml-q3_k", "ggml-iq3_s", "ggml-q2_k", "ggml-iq2_s")  # llama.cpp's quantizer
_SHORT_PEERS = ("bnb-nf4", "bnb-fp4", "hqq-g64", *_GGML)
_MIX = "mix of "
_NAMES = {
    "published": "as published",
    "llamacpp": "as published, llama.cpp",
    "bnb-nf4": "bitsandbytes NF4",
    "bnb-nf4-dq": "bitsandbytes NF4, double-quantized scales",
    "bnb-fp4": "bitsandbytes FP4",
    "hqq-g64": "hqq, 4 bits, groups of 64",
    "hqq-g32": "hqq, 4 bits, groups of 32",
    **{
        name: f"llama.cpp {name.removeprefix('ggml-').upper()}, importance matrix" for name in _GGML
    },
}


def short_table(record: Record) -> str:
    """The weights' own change of perplexity: one column per model and text."""
    models, texts = _models(record), _texts(record)
    heads = [f"{_short(model)}, {text}" for model in models for text in texts]
    reference = [
        f"{text['perplexity']:.2f}" for one in record["references"] for text in one["texts"]
    ]
    lines = [["reference (perplexity)", "", *reference]]
    for name in _short_names(record):
        rows = [_find(record, model, name) for model in models]
        cells = [_change(_score(row, text, "float")) for row in rows for text in texts]
        bits = _range([row["bits_per_weight"] for row in rows if row and row["scores"]])
        lines.append([_title(name), bits, *cells])
    return f"{markdown_table(['weights', 'bits', *heads], lines)}\n\n{_caption(record)}"


def full_tables(record: Record) -> str:
    """A table per model, every row: both texts, on kernels and in floating point."""
    parts = []
    for one in record["references"]:
        plain = ", ".join(
            f"{text['text']} {text['perplexity']:.3f} ± {text['perplexity_error']:.3f} "
            f"({text['scored_tokens']} tokens)"
            for text in one["texts"]
        )
        parts += [f"### {one['model']}", "", f"Perplexity of the reference: {plain}.", ""]
        for text in _texts(record):
            parts += [_full_table(record, one["model"], text), ""]
        skipped = [
            f"{row['name']}: {row['skipped']}"
            for row in record["rows"]
            if row["model"] == one["model"] and row.get("skipped")
        ]
        if skipped:
            parts += [f"Not measured: {'; '.join(skipped)}.", ""]
    return "\n".join([*parts, _caption(record)])


def _full_table(record: Record, model: str, text: str) -> str:
    headers = [f"{text}: weights", "bits", "perplexity", "change", "KL", "same top token"]
    headers += ["kernels: perplexity", "change", "KL", "decode tok/s"]
    lines = []
    rows = [row for row in record["rows"] if row["model"] == model and not row.get("skipped")]
    speeds = {
        speed["name"]: format_rate(speed["decode_tok_s"])
        for speed in record.get("speeds", [])
        if speed["model"] == model
    }
    for row in sorted(rows, key=_place):
        plain, kernel = _score(row, text, "float"), _score(row, text, "kernels")
        mark = " (default)" if row.get("default") else ""
        cells = [
            f"{_title(row['name'])}{mark}",
            f"{row['bits_per_weight']:.2f}",
            *_cells(plain),
            f"{100 * plain['top1']:.1f} %" if plain else "",
            *_cells(kernel),
            speeds.get(_speed_name(row), ""),
        ]
        lines.append(cells)
    return markdown_table(headers, lines)


def _cells(score: dict[str, Any] | None) -> list[str]:
    if score is None:
        return ["", "", ""]
    return [
        f"{score['perplexity']:.3f}",
        f"{round(100 * score['change'], 2) + 0.0:+.2f} ± {100 * score['change_error']:.2f} %",
        f"{max(score['kl'], 0):.4f} ± {score['kl_error']:.4f}",
    ]


def _caption(record: Record) -> str:
    settings = record["settings"]
    texts = "; ".join(f"{text['name']}: {text['source']}" for text in settings["texts"])
    return (
        f"`{record['command']}`. The reference is each file's own weights, unpacked, in f32; "
        "changes and KL are against it, ± one standard error. Weights alone are measured in f32. "
        f"Embedding and head stay as published. {settings['tokens']} tokens of each text in "
        f"windows of {settings['ctx']}, of which the second half is scored. {texts}. Calibrated on "
        f"the rest of the texts, in turn, {settings['calibration_tokens']} tokens, none of which "
        f"is evaluated on. {machine_of(record)}. {versions_of(record)}."
    )


def _short_names(record: Record) -> list[str]:
    """Rows of the short table that any model has: peers, then the main formats' methods."""
    names = list(dict.fromkeys(row["name"] for row in record["rows"] if row["scores"]))
    default = {row["name"] for row in record["rows"] if row.get("default")}
    ours = [
        name
        for format_ in _SHORT_FORMATS
        for name in names
        if name.split(" ")[0] == format_ and (name in default or name.endswith(" rtn"))
    ]
    mixes = [name for name in names if name.startswith(_MIX)]
    return [*(name for name in _SHORT_PEERS if name in names), *ours, *mixes]


def _models(record: Record) -> list[str]:
    return [one["model"] for one in record["references"]]


def _texts(record: Record) -> list[str]:
    return [text["name"] for text in record["settings"]["texts"]]


def _find(record: Record, model: str, name: str) -> Row | None:
    rows = (row for row in record["rows"] if row["model"] == model and row["name"] == name)
    return next(rows, None)


def _score(row: Row | None, text: str, path: str) -> dict[str, Any] | None:
    scores = row["scores"] if row else []
    return next((s for s in scores if s["text"] == text and s["path"] == path), None)


def _change(score: dict[str, Any] | None) -> str:
    return "" if score is None else f"{100 * score['change']:+.1f} %"


def _range(bits: Sequence[float]) -> str:
    shown = sorted({f"{value:.2f}" for value in bits})
    return shown[0] if len(shown) == 1 else f"{shown[0]}-{shown[-1]}"


def _place(row: Row) -> tuple[int, str, int]:
    """Published weights, other libraries, our formats, methods from simple to elaborate; mixes."""
    if row["name"].startswith(_MIX):
        return len(_NAMES) + 1, row["name"], 0
    if row["format"] is None:
        return list(_NAMES).index(row["name"]), "", 0
    return len(_NAMES), row["format"], METHODS.index(row["method"])


def _speed_name(row: Row) -> str:
    """The row that was timed for this one: GPTQ leaves the same bytes in the same places as RTN."""
    return f"{row['format']} rtn" if row["method"] == "gptq" else row["name"]


def _title(name: str) -> str:
    return _NAMES.get(name, name)


def _short(model: str) -> str:
    """``qwen2.5-coder-0.5b-instruct-q4_k_m`` without what all of its kind share."""
    return model.replace("-instruct", "").replace("-Instruct", "")
