"""Tables of studies that were made once: their results are kept, their programs are not.

What they showed stands in the docs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.record import machine_of, markdown_table, versions_of
from localrt.common.formatting import format_bytes, format_rate, format_seconds

STUDIES = frozenset(
    {
        *("adapters", "app", "chat_start", "experts_ssd", "flash_next", "hybrids", "kv", "serve"),
        *("speculation", "types"),
    }
)
"""Names of their JSON files."""


Record = Mapping[str, Any]
Row = tuple[str, str]

_PEERS = ("llama.cpp", "ik_llama.cpp")


def hybrids_table(record: Mapping[str, Any]) -> str:
    """Models in memory and streamed: tokens a second, and how many times a peer's."""
    lines = []
    for row in record["rows"]:
        model, _, what = row["name"].partition(" ")
        found = row["results"]
        if what == "in memory":
            for key in ("prompt", "decode"):
                times = [found.get(f"times_{peer}", {}).get(key) for peer in _PEERS]
                ratios = ["" if one is None else f"{one:.2f}x" for one in times]
                ours = format_rate(found["medians"]["localrt"][key])
                lines.append([model, f"in memory, {key}", ours, *ratios])
        elif what == "streamed":
            limit, size = format_bytes(found["limit"]), format_bytes(found["file"])
            where = f"within {limit} of {size}, decode"
            ours = format_rate(found["native"]["median"])
            lines.append([model, where, ours, f"{found['times']:.1f}x", ""])
    headers = ["model", "", "tok/s", *(f"times {peer}" for peer in _PEERS)]
    return f"{markdown_table(headers, lines)}\n\n{_setting(record)}"


def flash_next_table(record: Mapping[str, Any]) -> str:
    """Rows of a table of n-grams in a model that is streamed, from ``flash_next.json``."""
    headers = [
        *("file", "budget", "peak", "decode", "prompt of 512", "read per token"),
        *("of that the table", "rows asked for", "waited for", "share of a token"),
    ]
    lines = [
        [
            *(format_bytes(row[key]) for key in ("file", "budget", "peak")),
            *(f"{format_rate(row[key])} tok/s" for key in ("median", "prompt_tok_s")),
            *(format_bytes(row[key]) for key in ("read_bytes", "rows_bytes")),
            *(format_seconds(row[key]) for key in ("rows_asked_s", "rows_waited_s")),
            f"{100 * row['share']:.2f} %",
        ]
        for row in record["rows"]
    ]
    return f"{markdown_table(headers, lines)}\n\n{_setting(record)}"


def remembering_table(record: Mapping[str, Any]) -> str:
    """What states are worth: edits, restarts, guesses, and a context to its end."""
    lines = []
    for row in record["rows"]:
        model, _, what = row["name"].partition(" ")
        found = row["results"]
        if what == "edited":
            ours, theirs = (_median(found["samples"][name]) for name in ("localrt", "llama.cpp"))
            text = f"the last {found['edited']} of {found['tokens']:,} tokens changed, first token"
            lines.append([model, text, ours, f"{theirs} (llama.cpp)", f"{found['times']:.0f}x"])
        elif what == "resumed":
            ours, theirs = (_median(found["samples"][name]) for name in ("resumed", "read"))
            text = f"a chat of {found['tokens']:,} tokens after a restart, first token"
            lines.append([model, text, ours, f"{theirs} (read again)", f"{found['times']:.0f}x"])
        elif what == "guessing":
            for key, times in found["times"].items():
                ours, theirs = (
                    format_rate(statistics.median(one[key] for one in found["samples"][name]))
                    for name in ("guessing", "plain")
                )
                text = f"tok/s with guesses, {key}"
                lines.append([model, text, ours, f"{theirs} (without)", f"{times:.2f}x"])
        elif what == "filled":
            peak, most = format_bytes(found["peak"]), format_bytes(found["budget"])
            text = f"{found['tokens']:,} tokens read within {most}: peak RAM"
            lines.append([model, text, peak, "", ""])
    return markdown_table(["model", "", "localrt", "beside", ""], lines)


def _median(samples: list[float]) -> str:
    return format_seconds(sorted(samples)[len(samples) // 2])


def _setting(record: Mapping[str, Any]) -> str:
    return (
        f"Measured once on {machine_of(record)}; medians of five, ratios turn by turn. "
        f"{versions_of(record)}."
    )


def ssd_table(record: Record) -> str:
    """One row for each engine and share of the experts."""
    rows = []
    for row in record["results"]:
        peers = [
            other["tok_s"]
            for other in record["results"]
            if other["share"] == row["share"] and other["engine"] == "llamacpp"
        ]
        ahead = peers and row["engine"] == "native"
        hits = row["hit_rate"]
        rows.append(
            [
                f"{100 * row['share']:.0f} % of the experts",
                format_bytes(row["limit_bytes"]),
                row["engine"],
                format_rate(row["tok_s"])
                + (f" ({row['tok_s'] / max(peers):.1f}x)" if ahead else ""),
                format_rate(row["predicted_tok_s"]),
                "-" if hits is None else f"{100 * hits:.0f} %",
                format_bytes(row["read_bytes_per_token"]),
            ]
        )
    headers = ["RAM for", "memory limit", "engine", "tok/s", "predicted", "experts in memory"]
    return (
        f"{markdown_table([*headers, 'read per token'], rows)}\n\nMeasured once: a "
        f"small mixture ({record['fixture']['tokens'] / 1e6:.1f} million tokens of training), "
        f"widened to {format_bytes(record['experts_bytes'])} of experts, on text that it has not "
        f"learnt; "
        f"medians of five. {machine_of(record)}. {versions_of(record)}."
    )


def types_table(record: Mapping[str, Any]) -> str:
    """Tokens a second, and how many times a peer's."""
    lines = []
    for row in record["rows"]:
        found = row["results"]
        for key in ("decode", "prompt"):
            times = [found.get(f"times_{peer}", {}).get(key) for peer in _PEERS]
            lines.append(
                [
                    f"{row['name']}, {format_bytes(found['file'])}",
                    key if key == "decode" else "prompt of 512",
                    format_rate(found["medians"]["localrt"][key]),
                    *("" if one is None else f"{one:.2f}x" for one in times),
                ]
            )
    headers = ["type", "", "tok/s", *(f"times {peer}" for peer in _PEERS)]
    place = f"on {machine_of(record)}. {versions_of(record)}."
    return f"{markdown_table(headers, lines)}\n\nMeasured once {place}"


def speculation_table(record: Record) -> str:
    """Every row."""
    parts = (_speculation_rows(record), _speculation_notes(record), _speculation_footer(record))
    return "\n\n".join(part for part in parts if part)


def speculation_short(record: Record) -> str:
    """What was measured at temperature 0, beside something else."""
    rows = [
        [f"{row['name']}: {result['what']}", f"{_speculation_value(result)} {result['unit']}"]
        for row in record["rows"]
        for result in row["results"]
        if not result.get("temperature")
    ]
    return f"{markdown_table(['setting', 'measured'], rows)}\n\n{_speculation_footer(record)}"


def _speculation_rows(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        for result in row["results"]:
            per_pass = result.get("tokens_per_pass")
            rows.append(
                [
                    row["name"],
                    result["what"],
                    f"{_speculation_value(result)} {result['unit']}",
                    _speculation_rates(result),
                    "" if per_pass is None else f"{per_pass:.1f}",
                    _speculation_prompts(row),
                ]
            )
        if not row["results"]:
            rows.append([row["name"], f"not measured: {row['skipped']}", "", "", "", ""])
    headers = ["setting", "", "measured", "tok/s, before", "tokens a pass", "prompts"]
    return markdown_table(headers, rows)


def _speculation_value(result: Record) -> str:
    return f"{result['value']:.2f}" if result["unit"].startswith("x") else f"{result['value']:.1f}"


def _speculation_rates(result: Record) -> str:
    if "tok_s" not in result:
        return ""
    return f"{format_rate(result['tok_s'])}, {format_rate(result['plain_tok_s'])}"


def _speculation_prompts(row: Record) -> str:
    rounds = f" x {row['rounds']}" if row["rounds"] > 1 else ""
    return f"{row['prompts']}{rounds}, {row['tokens']} tokens"


def _speculation_notes(record: Record) -> str:
    lines = []
    for row in record["rows"]:
        if "draft_bytes" in row:
            lines.append(
                f"- {row['name']}: {format_bytes(row['limit_bytes'])} for the target, and "
                f"{format_bytes(row['draft_bytes'])} more, which the draft adds to a process."
            )
        for result in row["results"]:
            if "repeated_share" in result:
                lines.append(
                    f"- {row['name']}: {result['repeated_share']:.0%} of an answer's runs of four "
                    "tokens stand in its prompt (median)."
                )
    return "\n".join(lines)


def _speculation_footer(record: Record) -> str:
    checks = [row["checked"] for row in record["rows"] if row.get("checked")]
    made = sum(check["generations"] for check in checks)
    same = sum(check["same_tokens"] for check in checks)
    minutes = sum(row["seconds"] for row in record["rows"]) / 60
    return (
        f"Measured once on {machine_of(record)}, {minutes:.0f} "
        f"minutes; medians of prompts; target {record['target']}, draft {record['draft']}. {same} "
        f"of {made} generations have the tokens of plain decoding. {versions_of(record)}."
    )


def kv_table(record: dict[str, Any]) -> str:
    """One row for each model and format."""
    headers = ["model", "cache", "bits", "perplexity", "change", "KL", "same top token", "tokens"]
    rows = [
        [model["model"], *_cells(name, model["bits"][name], found)]
        for model in record["models"]
        for name, found in model["formats"].items()
    ]
    settings = record["settings"]
    texts = "; ".join(f"{text['name']}: {text['source']}" for text in settings["texts"])
    return (
        f"{markdown_table(headers, rows)}\n\nMeasured once. Windows of {settings['ctx']} "
        "tokens, half of them prose, half code, all tokens but a window's first scored. Changes "
        "and KL are against bf16 at the same tokens, ± one standard error. Bits are of a number, "
        f"with its share of the scales. {texts}. {machine_of(record)}. {versions_of(record)}."
    )


def _cells(name: str, bits: float, found: dict[str, Any]) -> list[str]:
    cells = [name, f"{bits:.2f}", f"{found['perplexity']:.3f}"]
    if name == "bf16":
        return [*cells, "", "", "", f"{found['tokens']:,}"]
    return [
        *cells,
        f"{100 * found['change']:+.3f} ± {100 * found['change_error']:.3f} %",
        f"{found['kl']:.5f} ± {found['kl_error']:.5f}",
        f"{100 * found['top1']:.1f} %",
        f"{found['tokens']:,}",
    ]


def adapters_table(record: Mapping[str, Any]) -> str:
    """Decoding with and without adapters, and what adding one takes."""
    rows = [
        [
            _what(result),
            f"{result['plain_tok_s']:.1f} tok/s",
            f"{result['adapted_tok_s']:.1f} tok/s",
            f"{100 * result['cost']:.1f} %",
        ]
        for result in record["results"]
    ]
    headers = ["", "without adapter", "with one each", "takes longer by"]
    return (
        f"{markdown_table(headers, rows)}\n\nMeasured once: adapters of rank "
        f"{record['rank']} for all linear modules of {record['model']}; one takes "
        f"{format_bytes(record['bytes'])} and is added in {1000 * record['add_s']:.0f} ms. On "
        f"{machine_of(record)}. {versions_of(record)}."
    )


def _what(result: Mapping[str, Any]) -> str:
    if "prompt" in result:
        return f"a prompt of {result['prompt']}"
    return f"{result['chats']} at once" if result["chats"] > 1 else "one chat"


def app_table(results: Path) -> str:
    """One row for each thing measured; of a file that is not there, none."""
    rows: list[list[str]] = []
    machine: dict[str, Any] | None = None
    for name, rows_of in _APP_FILES.items():
        path = results / f"{name}.json"
        if not path.exists():
            continue
        record = json.loads(path.read_text(encoding="utf-8"))
        machine = record.get("machine") or record["results"][-1]["machine"]
        rows += map(list, rows_of(record))
    if machine is None:
        return "Not measured yet."
    table = markdown_table(["what", "measured"], rows)
    return f"{table}\n\nMedians on {machine_of({'machine': machine})}."


def _start(record: dict[str, Any]) -> Iterator[Row]:
    name = f"`localrt chat {record['model']}`"
    yield f"{name} to a prompt that takes keys", f"{record['typed_s']:.2f} s"
    yield f"{name} to the first token", f"{record['first_token_s']:.2f} s"


def _resume(record: dict[str, Any]) -> Iterator[Row]:
    for row in record["results"]:
        model = row["model"].removesuffix(".gguf")
        yield (
            f"{row['tokens']:,} tokens of {model} ({row['saved']}) from the disk",
            f"{row['resume_s']:.2f} s, {row['faster']:.0f}x faster than computed again; file not "
            f"cached: {row['resume_cold_s']:.2f} s, {row['faster_cold']:.0f}x",
        )


def _app(record: dict[str, Any]) -> Iterator[Row]:
    for row in record["results"]:
        if "cost" in row:
            yield f"the app's cost, {row['what']}", f"{100 * row['cost']:.1f} %"
        elif "median_ms" in row:
            measured = f"{row['median_ms']:.0f} ms, at worst {row['worst_ms']:.0f} ms"
            yield row["what"], measured
        else:
            yield row["what"], f"{row['worst_ms']:.0f} ms"


def _serve(record: dict[str, Any]) -> Iterator[Row]:
    model = record["model"].removesuffix(".gguf")
    what = (
        f"{record['chats']} chats of {record['turns']} turns at once on {model} within "
        f"{record['ram']}"
    )
    for row in record["results"]:
        guessing = "nobody guesses" if row["draft"] == "off" else "all guess ahead"
        yield (
            f"{what}, against one after another; {guessing}",
            f"{row['ratio']:.1f}x tokens per second",
        )


_APP_FILES: dict[str, Callable[[dict[str, Any]], Iterator[Row]]] = {
    "chat_start": _start,
    "app": _app,
    "resume": _resume,
    "serve": _serve,
}
