"""Find out whether a build of llama.cpp works on this machine, in a process of its own.

A build for other processors crashes with an illegal instruction and takes the process with it. So
does one that uses AMX if the processor lists it but a virtual machine's host does not allow it: at
the first matrix product, not at load. The trial runs a 40 KB model of zeros. Its result stays in
the cache folder until the build or the machine changes.
"""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from localrt.common.errors import MissingExtraError
from localrt.common.files import write_text
from localrt.common.option_names import option
from localrt.offload.hardware import identity

_FILE = "llamacpp.json"
_TIMEOUT_S = 60.0
# Signals of an illegal instruction or address. An abort may be a check in llama.cpp that only this
# small model fails; a killed process says nothing about the build.
_FATAL = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")
_WINDOWS_ILLEGAL = 0xC000001D

_HIDDEN, _INNER, _VOCAB = 64, 128, 256
_U32, _F32, _STRING = 4, 6, 8  # GGUF's types of metadata
_Q4_0 = 2  # ggml's type that all repacking kernels, AMX's too, support: blocks of 32 in 18 bytes


def check_build(cache: Path) -> None:
    """Try the installed llama-cpp-python unless ``cache`` has its result already.

    Raises:
        MissingExtraError: it crashes on this machine.
    """
    if getattr(sys, "frozen", False) or (build := _build()) is None:
        return  # a packaged app has no interpreter; a missing package is reported elsewhere
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


def trial_command() -> list[str]:
    """Return the command of the trial."""
    root = str(Path(__file__).resolve().parents[3])
    start = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from localrt.engine.llamacpp.trial import main; main()"
    )
    return [sys.executable, "-c", start, root]


def main() -> None:
    """Run the trial, which may crash: load a small model, compute some tokens, then one."""
    from localrt.engine.llamacpp.engine import LlamaCppSession
    from localrt.engine.llamacpp.model import LlamaCppModel

    with suppress(ImportError, ValueError):  # it may crash: write no core file
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zeros.gguf"
        path.write_bytes(_model_of_zeros())
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
            trial_command(),
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
        values = json.loads(path.read_text(encoding="utf-8"))
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


def _model_of_zeros() -> bytes:
    """Return a GGUF file: a Llama with one layer and all matrices in 4 bits."""
    keys: list[tuple[str, int, bytes]] = [
        ("general.architecture", _STRING, _text("llama")),
        ("tokenizer.ggml.model", _STRING, _text("no_vocab")),
        ("llama.attention.layer_norm_rms_epsilon", _F32, struct.pack("<f", 1e-5)),
    ]
    numbers = {
        "vocab_size": _VOCAB,
        "context_length": 64,
        "embedding_length": _HIDDEN,
        "block_count": 1,
        "feed_forward_length": _INNER,
        "attention.head_count": 2,
        "rope.dimension_count": _HIDDEN // 2,
    }
    keys += [(f"llama.{name}", _U32, struct.pack("<I", n)) for name, n in numbers.items()]
    square, up, down = (_HIDDEN, _HIDDEN), (_HIDDEN, _INNER), (_INNER, _HIDDEN)  # columns first
    layer = {"attn_norm": (_HIDDEN,), "ffn_norm": (_HIDDEN,), "ffn_gate": up, "ffn_up": up}
    layer |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square)
    tensors: dict[str, tuple[int, ...]] = {"token_embd": (_HIDDEN, _VOCAB)}
    tensors |= {"output": (_HIDDEN, _VOCAB), "output_norm": (_HIDDEN,)}
    tensors |= {f"blk.0.{name}": shape for name, shape in (layer | {"ffn_down": down}).items()}

    table, nbytes = b"", 0
    for name, shape in tensors.items():
        kind = _Q4_0 if len(shape) == 2 else 0
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        table += _text(f"{name}.weight") + sizes + struct.pack("<IQ", kind, nbytes)
        size = shape[0] * shape[1] // 32 * 18 if len(shape) == 2 else 4 * shape[0]
        nbytes += -(-size // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(_text(key) + struct.pack("<I", kind) + value for key, kind, value in keys)
    head += table
    return head + bytes(-len(head) % 32 + nbytes)


def _text(text: str) -> bytes:
    """Return a string in GGUF's encoding."""
    return struct.pack("<Q", len(text)) + text.encode()
