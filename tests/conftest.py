"""Fixtures that many tests share: a tiny random model with a byte tokenizer and a chat template."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
from pathlib import Path

# Under nohup, or in the background of a script, SIGINT is ignored, which processes that tests start
# would inherit; a handler is not inherited, they begin with the default.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What tests pack and keep is neither looked for nor left in the user's own folders.
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="localrt-tests-")
os.environ["LOCALRT_KV_DISK"] = "off"
# Several processes' threads of torch would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import atexit
import gc
import itertools
import json
import random
import shutil
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import hypothesis
import numpy as np
import pytest

import localrt
from localrt.documents import confined
from localrt.engine import answer
from localrt.models import first_opening
from localrt.quant.cpu import ops as native_ops
from localrt.quant.cpu.abi import find_library

# Processes beside each other share the cores: one for each, where a test asks for none.
if "PYTEST_XDIST_WORKER" in os.environ:
    native_ops.default_threads = lambda: 1

# Hundreds of tests open a model for the first time; tests/models/test_first_opening.py starts the
# process that parses it.
first_opening.has_helpers = lambda: False
confined.has_helpers = lambda: False  # likewise tests/documents/test_confined.py

# Usually a property's examples are the same in each run, so that a change passes or fails by
# itself; `search` draws new ones. How long one takes depends on the machine.
for _profile, _examples in (("usual", 12), ("search", 1000)):
    hypothesis.settings.register_profile(
        _profile,
        max_examples=_examples,
        derandomize=_profile != "search",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("usual")

atexit.register(shutil.rmtree, os.environ["XDG_DATA_HOME"], ignore_errors=True)

needs_kernels = pytest.mark.skipif(find_library() is None, reason="the kernels are not compiled")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


def _makes_links() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            Path(folder, "link").symlink_to("nowhere")
        except OSError:
            return False
    return True


needs_links = pytest.mark.skipif(not _makes_links(), reason="symbolic links are refused")
needs_scripts = pytest.mark.skipif(sys.platform == "win32", reason="a text is no program")
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="no process is sent a signal")

NOT_EVERYWHERE = {
    *("bitsandbytes", "compressed_tensors", "peft", "safetensors", "scipy"),
    *("sentencepiece", "torch", "transformers"),
    *("fcntl", "pty", "resource", "termios"),
}
"""What tests compare with or look at, and some systems do not have."""


@pytest.hookimpl(trylast=True)  # what is left out is not counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes share the tests, each begins with some that may take longer than usual. Each
    gets a run of consecutive tests, of nearly the same length.
    """
    usual = float(config.getini("timeout"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    limits = ((item, item.get_closest_marker("timeout")) for item in items)
    long = [item for item, limit in limits if limit is not None and limit.args[0] > usual]
    others = [item for item in items if item not in long]
    places = (len(items) * (n % processes) // processes + n // processes for n in range(len(long)))
    for place, item in sorted(zip(places, long, strict=True), key=lambda pair: pair[0]):
        others.insert(place, item)
    items[:] = others


def _missing(error: BaseException | None) -> str:
    """Why a test cannot run, if that is a package that not every system has."""
    if isinstance(error, localrt.MissingExtraError):
        error = error.__cause__
    name = (getattr(error, "name", None) or "").partition(".")[0]
    missing = isinstance(error, ModuleNotFoundError) and name in NOT_EVERYWHERE
    return f"needs {name}" if missing and find_spec(name) is None else ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    error = report.call.excinfo and report.call.excinfo.value
    if reason := _missing(error and error.__cause__):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if reason := _missing(call.excinfo and call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, reason)
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if "not slow" in config.option.markexpr:
        terminalreporter.write_line(
            "left out: what is marked slow; `scripts/test -m slow` runs it, `.ci/run` everything"
        )


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def pytest_collection_finish() -> None:
    """What all test files have imported is not looked through again: loading and closing a model
    collect garbage, which would take seconds among millions of objects.
    """
    gc.collect()
    gc.freeze()


def write_byte_tokenizer(folder: Path, template: str | None = CHATML) -> int:
    """A byte-level tokenizer.json with three control tokens; returns the vocabulary's size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocab)


def write_tiny_model(
    folder: Path,
    *,
    template: str | None = CHATML,
    context: int = 512,
    spare: int = 0,
    wide: int = 64,
) -> Path:
    """A random Llama of 60,000 parameters as a Hugging Face folder, of more if it is ``wide``.
    ``spare`` rows of its matrices are no tokens.
    """
    vocab = write_byte_tokenizer(folder, template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    shape: dict[str, Any] = {
        **{"vocab_size": vocab + spare, "hidden_size": wide, "intermediate_size": 3 * wide // 2},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": context, "bos_token_id": 0, "eos_token_id": 2},
    }
    if find_spec("transformers") is None or wide != 64:
        return _write_tiny_by_hand(folder, shape)
    from tests.models.tiny import kept

    label = f"llama-{vocab + spare}-{context}"
    made = kept(label, lambda path: _write_with_transformers(path, shape), Path(__file__))
    return shutil.copytree(made, folder, dirs_exist_ok=True)


def _write_with_transformers(folder: Path, shape: dict[str, Any]) -> None:
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.LlamaConfig(**shape, pad_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


def _write_tiny_by_hand(folder: Path, shape: dict[str, Any]) -> Path:
    """The same with other numbers, on systems without torch."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    text = json.dumps({**config, **shape, "rms_norm_eps": 1e-6, "tie_word_embeddings": False})
    (folder / "config.json").write_text(text)
    wide, inner, rows = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    layer = {"input_layernorm": (wide,), "post_attention_layernorm": (wide,)}
    layer |= {f"mlp.{name}_proj": (inner, wide) for name in ("gate", "up")}
    layer |= {f"self_attn.{name}_proj": (wide, wide) for name in "qo"}
    layer |= {f"self_attn.{name}_proj": (wide // 2, wide) for name in "kv"}
    layer |= {"mlp.down_proj": (wide, inner)}
    shapes = {"lm_head": (rows, wide), "model.embed_tokens": (rows, wide), "model.norm": (wide,)}
    for at in range(shape["num_hidden_layers"]):
        shapes |= {f"model.layers.{at}.{name}": size for name, size in layer.items()}
    header, data, draw = {}, bytearray(), np.random.default_rng(7)
    for name, size in shapes.items():
        values = 0.2 * draw.standard_normal(size, np.float32)
        begin, data = len(data), data + values.tobytes()
        offsets = [begin, len(data)]
        header[f"{name}.weight"] = {"dtype": "F32", "shape": size, "data_offsets": offsets}
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Iterator[localrt.Model]:
    """The tiny model, computing in float32 where torch is there."""
    options: dict[str, Any] = {"format": "f32"} if find_spec("torch") else {}
    with localrt.load(tiny_folder, **options) as model:
        yield model


@pytest.fixture(autouse=True)
def given_seeds(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Answers without a seed differ within a test, and are the same in each of its runs: a random
    model may end an answer before its first token.
    """
    seeds = itertools.count(zlib.crc32(request.node.nodeid.encode()) << 32)

    def seeded(seed: int | None) -> random.Random:
        return random.Random(next(seeds) if seed is None else seed)

    monkeypatch.setattr(answer, "Random", seeded)


@pytest.fixture
def given_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading measures nothing: what the machine reads and computes per second is given."""
    from localrt.loading import placing
    from localrt.offload.reading.disk_speed import DiskProfile
    from localrt.offload.reading.files import ReadMode
    from localrt.planning import measure
    from tests.planner.models import machine

    rates = DiskProfile(ReadMode(direct=False, threads=2, block=1 << 20), 1e9, 0.0), machine()
    for module in (measure, placing):
        monkeypatch.setattr(module, "machine_profile", lambda *_, **__: rates)


@pytest.fixture
def nothing_on_stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with ``< /dev/null``."""
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


@pytest.fixture
def quiet_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, own folders, and nothing is measured: plans are for given rates."""
    from localrt.offload import hardware
    from localrt.planning import measure
    from localrt.planning.machine import MachineProfile
    from tests.planner.models import machine

    for name in ("LOCALRT_CACHE", "HF_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("LOCALRT_OFFLINE", "1")
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(hardware, "other_gpus", lambda _root=None: ())

    def measured(*_: Any, **__: Any) -> tuple[MachineProfile, str]:
        sources = {**machine().sources, "ssd_bytes_s": "measured", "kernels": "measured"}
        return dataclasses.replace(machine(), ssd_bytes_s=1e9, sources=sources), ""

    monkeypatch.setattr(measure, "machine_here", measured)
