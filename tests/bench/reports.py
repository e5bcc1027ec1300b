"""Small reports of each kind, for tests."""

from typing import Any

MACHINE: dict[str, Any] = {
    "system": "Linux 6",
    "cpu": {"name": "a CPU", "physical_cores": 8},
    "memory": {"total": 32 * 10**9},
    "gpus": [{"name": "a GPU", "memory_bytes": 8 * 10**9, "driver": "580.1"}],
    "memory_read_bytes_s": 40e9,
}
FACTS: dict[str, Any] = {
    "machine": MACHINE,
    "versions": {"localrt": "1"},
    "command": "localrt bench",
    "interrupted": False,
}
TIMES = {"p50": 0.2, "p95": 0.4, "p99": 1.5}


def mix(
    name: str = "chat", met: float = 0.5, server: str = "localrt", **app: Any
) -> dict[str, Any]:
    times = [0.5 * index for index in range(40)]
    return {
        "kind": "mix",
        **FACTS,
        "mix": {"name": "desk", "seconds": 20, "seed": 0, "apps": [], "neighbours": []},
        "servers": [
            {
                "server": server,
                "settings": {},
                "runs": 2,
                "apps": [
                    {
                        "app": name,
                        "class": "interactive",
                        "model": "m",
                        "goals": {"ttft_s": 1},
                        "requests": 2,
                        "failed": 0,
                        "goals_met": met,
                        "ttft_s": TIMES,
                        "tpot_s": TIMES,
                        "stalls": 1,
                        "tokens": 80,
                        "tokens_s": 12.5,
                        "events": [
                            _event(1, 1.0, 3.0, True),
                            _event(1, 6.0, 11.5, False),
                            _event(1, 15.0, 15.5, None),
                            _event(2, 2.0, 3.0, True),
                        ],
                        **app,
                    }
                ],
                "goals_met": met,
                "samples": [
                    {
                        "run": 1,
                        "at_s": at,
                        "cpu": 0.4 + at / 40,
                        "owners": {server: 1e9 + at * 2e7, "browser": 5e8},
                        "free_bytes": 4e9,
                        "disk_read_bytes_s": 3e8 if at > 5 else 0,
                        "disk_write_bytes_s": 1e6,
                        "gpu": {"busy": 0.3, "bytes": 1e9, "watts": 50},
                        "celsius": None,
                        "watts": 35,
                    }
                    for at in times
                ],
                "joules": None,
                "joules_per_token": None,
                "neighbours": [{"name": "video", "kind": "frames", "frame_ms": {"p95": 18.0}}],
                "measuring_cpu_share": 0.004,
            }
        ],
    }


def _event(run: int, start: float, end: float, met: bool | None) -> dict[str, Any]:
    event = {"run": run, "at_s": start, "ttft_s": 0.2, "end_s": end, "tokens": 40, "met": met}
    return event | {"error": None if met else "late"}


def card(name: str = "m") -> dict[str, Any]:
    model = {
        "model": name,
        "reason": None,
        "streamed": True,
        "weight_bytes": 10**9,
        "bits_per_weight": 4.5,
        "prefill_tok_s": 400.0,
        "decode_tok_s": 25.0,
        "ttft_s": 1.3,
        "peak_ram_bytes": 2 * 10**9,
        "peak_vram_bytes": 7 * 10**9,
        "joules_per_token": None,
        "perplexity_change": 0.012,
        "perplexity_change_error": 0.003,
    }
    sizes = {"prompt_tokens": 512, "tokens": 128, "runs": 3}
    failed = {"model": "large", "reason": f"{name} does not fit"}
    return {"kind": "card", **FACTS, **sizes, "models": [model, failed]}


def sweep(name: str = "m", rate: float = 20.0) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokens": 32,
        **dict.fromkeys(("ctx", "format", "kv_format", "gpu_memory", "device", "ram")),
    }
    vary = {"prompt_tokens": [128, 512], "batch": [1, 4], "threads": [2], "draft": [name, "off"]}
    points = [
        {
            **settings,
            "prompt_tokens": prompt,
            "batch": batch,
            "threads": 2,
            "draft": draft,
            "ttft_s": prompt / 100,
            "tpot_s": 0.05,
            "prefill_tok_s": 100.0,
            "decode_tok_s": rate * batch,
            "peak_ram_bytes": prompt * batch * 10**6,
            "reason": None,
        }
        for prompt in vary["prompt_tokens"]
        for batch in vary["batch"]
        for draft in vary["draft"]
    ]
    measures = ("ttft_s", "tpot_s", "prefill_tok_s", "decode_tok_s", "peak_ram_bytes")
    points[-1] |= {**dict.fromkeys(measures), "reason": f"{name} does not fit"}
    return {"kind": "sweep", **FACTS, "model": name, "vary": vary, "runs": 3, "points": points}
