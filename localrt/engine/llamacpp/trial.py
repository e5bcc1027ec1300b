"""Find out whether a build of llama.cpp works on this machine, in a process of its own.

A build for other processors crashes with an illegal instruction and takes the process with it. So
does one that uses AMX if the processor lists it but a virtual machine's host does not allow it: at
the first matrix product, not at load. The trial runs a 40 KB model of zeros. Its result stays in
the cache folder until the build or the machine changes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from localrt import system
from localrt.common.errors import MissingExtraError
from localrt.common.files import parse_json, write_text
from localrt.common.option_names import option
from localrt.common.processes import has_helpers, helper_command
from localrt.offload.hardware import identity

_FILE = "llamacpp.json"
_TIMEOUT_S = 60.0
# Signals of an illegal instruction or address. An abort may be a check in llama.cpp that only this
# small model fails; a killed process says nothing about the build.
_FATAL = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")
_WINDOWS_ILLEGAL = 0xC000001D

_HIDDEN, _INNER, _VOCAB = 64, 128, 256


def check_build(cache: Path) -> None:
    """Try the installed llama-cpp-python unless ``cache`` has its result already.

    Raises:
        MissingExtraError: it crashes on this machine.
    """
    if not has_helpers() or (build := _build()) is None:
        return  # a missing package is reported elsewhere
    known_by = [*identity(), *build]
    verdict = _known(cache / _FILE, known_by)
    if verdict is None:
        verdict = _try()
        if verdict is None:
            return
        with suppress(OSError):  # if the cache cannot be written, the next start tries again
            text = json.dumps({"identity": known_by, "dies_of": verdict})
            write_text(cache / _FILE, text, private=True, sync=False, folder=True)
    if verdict:
        raise MissingExtraError(
            f"this build of llama.cpp cannot run on this machine: it dies of {verdict}. Build it "
            'for this machine: CMAKE_ARGS="-DGGML_NATIVE=OFF" pip install --force-reinstall '
            "--no-cache-dir --no-binary llama-cpp-python llama-cpp-python; or use "
            f"{option('engine', 'native')} where that knows the model"
        )


def main() -> None:
    """Run the trial, which may crash: load a small model, compute some tokens, then one."""
    from localrt.engine.llamacpp.engine import LlamaCppSession
    from localrt.engine.llamacpp.model import LlamaCppModel

    system.write_no_core_file()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zeros.gguf"
        _write_zeros(path)
        model = LlamaCppModel.load(path, threads=1, device="cpu")
        session = LlamaCppSession(model, 64)
        session.extend(list(range(40)))
        session.extend([1])
        session.close()
        model.close()


def _try() -> str | None:
    """Return what killed the trial, "" if nothing did; None if it says nothing about the build."""
    try:
        code = subprocess.run(
            helper_command(__name__),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        ).returncode
    except (OSError, subprocess.SubprocessError):
        return None
    if code >= 0:  # loading a model will raise a Python error again
        illegal = code == _WINDOWS_ILLEGAL
        return "an illegal instruction" if illegal else ""
    with suppress(ValueError):
        name = signal.Signals(-code).name
        if name in _FATAL:
            return "an illegal instruction" if name == "SIGILL" else name
    return None


def _known(path: Path, known_by: list[str]) -> str | None:
    """Return the stored result, if it is for this build and machine."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
        verdict = values["dies_of"] if values["identity"] == known_by else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return verdict if isinstance(verdict, str) else None


def _build() -> list[str] | None:
    """Return what identifies a build: its libraries' names, sizes and times."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    facts = []
    for path in sorted((Path(spec.origin).parent / "lib").glob("*")):
        with suppress(OSError):
            status = path.stat()
            facts.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return [spec.origin, *facts]


def _write_zeros(path: Path) -> None:
    """Write a GGUF file: a Llama with one layer and all matrices in 4 bits."""
    from gguf import GGMLQuantizationType, GGUFWriter  # a tenth of a second, for the trial alone

    # The type that all repacking kernels support, AMX's too.
    packed = GGMLQuantizationType.Q4_0
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_VOCAB)
    writer.add_context_length(64)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(2)
    writer.add_rope_dimension_count(_HIDDEN // 2)
    square, up, down = (_HIDDEN, _HIDDEN), (_INNER, _HIDDEN), (_HIDDEN, _INNER)
    layer = {"ffn_gate": up, "ffn_up": up, "ffn_down": down}
    layer |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square)
    matrices = {f"blk.0.{name}": shape for name, shape in layer.items()}
    matrices |= dict.fromkeys(("token_embd", "output"), (_VOCAB, _HIDDEN))
    for name, (rows, columns) in matrices.items():
        zeros = np.zeros((rows, columns // 32 * 18), np.uint8)
        writer.add_tensor(f"{name}.weight", zeros, raw_dtype=packed)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.zeros(_HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
