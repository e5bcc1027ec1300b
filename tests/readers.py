"""Everything that reads what strangers made: valid inputs of each reader, and how it reads one."""

from __future__ import annotations

import io
import json
import re
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from localrt.common.errors import LocalrtError
from tests.mutations import refusal

Use = Callable[[str, bytes], object]
"""Reads an input of a kind; raises what reading raises."""
Prepared = tuple[Iterable[tuple[str, bytes | str]], Use]


@dataclass
class Reader:
    """``prepare`` makes valid inputs in a folder of its own; ``modules`` are patterns of the files
    that read them. ``share`` is of a campaign's tries, ``seconds`` of processor time and
    ``memory``, in bytes, the most for one input.
    """

    prepare: Callable[[Path, ExitStack], Prepared]
    modules: str
    share: float
    seconds: float
    memory: int


READERS: dict[str, Reader] = {}
_REFUSED = rb'HTTP/1.1 4.*"(?:error|message)": ?("(?:[^"\\]|\\.)*")'


def _reader(
    share: float, modules: str, seconds: float = 2.0, memory: int = 64 << 20
) -> Callable[[Any], None]:
    def added(prepare: Callable[[Path, ExitStack], Prepared]) -> None:
        READERS[prepare.__name__] = Reader(prepare, modules, share, seconds, memory)

    return added


def _files(folder: Path, use: Callable[[str], object], names: Iterable[str] = ()) -> Prepared:
    """Inputs that replace one file of ``folder``, whose name ``use`` is told."""

    def files() -> list[str]:
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return [path.relative_to(folder).as_posix() for path in paths]

    found = {name: (folder / name).read_bytes() for name in files()}
    kinds = list(names or found)

    def changed(name: str, data: bytes) -> None:
        (folder / name).write_bytes(data)
        try:
            use(name)
        finally:
            left = {each for each in files() if not each.endswith(".lock")} - set(found)
            (folder / name).write_bytes(found[name])
            assert not left, f"files are left: {left}"

    return ((name, found[name]) for name in kinds), changed


_HEADER = {
    "__metadata__": {"format": "pt"},
    "model.norm.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    "lm_head.weight": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [16, 32]},
}


def _gguf() -> bytes:
    """A GGUF file with values of every kind, and tensors of three formats."""
    from tests.checkpoints import make_gguf as gguf

    numbers = [struct.pack("<I", value) for value in (32, 2, 1, 5)]
    strings = b"".join(map(gguf.string, "abc"))
    nested = gguf.array(gguf.UINT32, 1, numbers[3])
    return gguf.raw_gguf(
        [
            ("general.architecture", gguf.STRING, gguf.string("llama")),
            ("general.alignment", gguf.UINT32, numbers[0]),
            ("llama.attention.head_count", gguf.UINT32, numbers[1]),
            ("llama.head_count_kv", gguf.ARRAY, gguf.array(gguf.UINT32, 2, numbers[2] * 2)),
            ("llama.rope.freq_base", gguf.FLOAT32, struct.pack("<f", 1e4)),
            ("tokenizer.ggml.tokens", gguf.ARRAY, gguf.array(gguf.STRING, 3, strings)),
            ("nested", gguf.ARRAY, gguf.array(gguf.ARRAY, 1, nested)),
        ],
        [
            gguf.tensor_entry("token_embd.weight", [32, 3], 8, 0),
            gguf.tensor_entry("blk.0.attn_q.weight", [32, 4], 2, 128),
            gguf.tensor_entry("blk.0.attn_q.bias", [4], 0, 224),
        ],
        bytes(240),
    )


def _read_checkpoint(path: Path, max_bytes: int = 64) -> None:
    """Open it, and read all that it has."""
    from localrt.models.checkpoints import open_checkpoint

    with closing(open_checkpoint(path)) as checkpoint:
        for name in checkpoint.tensors:
            checkpoint.read(name)
            list(checkpoint.blocks(name, max_bytes=max_bytes))
        assert None not in checkpoint.metadata.values()


@_reader(0.14, "models/checkpoints/gguf/f*.py models/checkpoints/safetensors/f*.py models/*er.py")
def checkpoints(folder: Path, stack: ExitStack) -> Prepared:
    shards = dict.fromkeys(("model.norm.weight", "lm_head.weight"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (folder / "config.json").write_text('{"architectures": ["A"], "rope_parameters": {"x": 1}}')
    head = json.dumps(_HEADER).encode()
    data = struct.pack("<Q", len(head)) + head + bytes(32)
    (folder / "model.safetensors").write_bytes(data)
    (folder / "a.gguf").write_bytes(_gguf())
    return _files(
        folder, lambda name: _read_checkpoint(folder / name if "gguf" in name else folder)
    )


_VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "h", "i", "hi"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.merges": ["h i"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    "tokenizer.chat_template.tool_use": "{{ tools }}",
}


@_reader(0.06, "models/tokenizers/*.py localrt/chat_format/chat_template.py")
def tokenizers(folder: Path, stack: ExitStack) -> Prepared:
    """The files of a folder, and GGUF files with a vocabulary of either kind."""
    from localrt.chat_format.chat_template import load_template
    from localrt.models.checkpoints import open_checkpoint
    from localrt.models.tensor_source import Checkpoint
    from localrt.models.tokenizers import Tokenizer, load_tokenizer
    from localrt.models.tokenizers.hf import hf_tokenizer
    from tests.checkpoints.make_gguf import write_gguf
    from tests.conftest import write_byte_tokenizer
    from tests.tokenizers.test_hf import FOLDER_CONFIG, WITH_SPACES

    (folder / "tokenizer.json").write_text(json.dumps(WITH_SPACES))
    (folder / "tokenizer_config.json").write_text(json.dumps(FOLDER_CONFIG))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    (bytes_only := folder / "bytes").mkdir()
    write_byte_tokenizer(bytes_only)
    for kind in ("gpt2", "llama"):
        keys = {**_VOCABULARY, "tokenizer.ggml.model": kind}
        write_gguf(folder / f"{kind}.gguf", "llama", keys, {"a": (np.zeros((5, 32)), "f32")})

    def use(tokenizer: Tokenizer) -> None:
        for token in (-1, 0, 1, 300, 1 << 40):
            refusal(lambda token=token: tokenizer.token_bytes(token))

    def use_checkpoint(path: Path) -> None:
        with closing(open_checkpoint(path)) as checkpoint:
            use(load_tokenizer(checkpoint))
            load_template(checkpoint)

    def use_file(name: str) -> None:
        path = folder / name
        if path.suffix == ".gguf":
            use_checkpoint(path)
        else:
            use(hf_tokenizer(path.parent, eos=[2, -1]))
            load_template(cast(Checkpoint, SimpleNamespace(kind="safetensors", path=path.parent)))

    return _files(folder, use_file)


@_reader(0.05, "localrt/chat_format/jinja_sandbox.py", 8.0)
def templates(folder: Path, stack: ExitStack) -> Prepared:
    from localrt.chat_format.chat_template import ChatTemplate
    from tests.server.conftest import WITH_TOOLS

    def use(kind: str, data: bytes) -> None:
        source = data.decode("utf-8", "replace")
        template = ChatTemplate(source)
        template.render_segments([{"role": "user", "content": "hi"}], add_generation_prompt=True)

    return [("jinja", WITH_TOOLS)], use


def _without_sum(path: Path) -> None:
    """Take its sum from a description, as whoever changes one would, so that its values count."""
    values = json.loads(path.read_text("utf-8"))
    del values["crc32"]
    path.write_text(json.dumps(values), "utf-8")


@_reader(0.06, "models/checkpoints/store/*.py")
def stores(folder: Path, stack: ExitStack) -> Prepared:
    from localrt.offload.store import pack_store
    from localrt.quant.formats.tiled import tile_tensor
    from tests.store.synthetic import SyntheticCheckpoint
    from tests.store.test_store_checkpoint import read_everything

    source = SyntheticCheckpoint(Path("model"), vocab=16, hidden=32, inner=32, layers=1)
    store = pack_store(source, folder / "store", tiler=tile_tensor)
    _without_sum(store / "manifest.json")
    return _files(store, lambda name: read_everything(store, verify=False), ["manifest.json"])


@_reader(0.06, "offload/kv/saved.py")
def caches(folder: Path, stack: ExitStack) -> Prepared:
    from tests.kv.test_block_file import save_with_state, use_all

    save_with_state(folder)
    _without_sum(next(folder.rglob("tokens.json")))
    return _files(folder, lambda name: use_all(folder))


@_reader(0.19, "models/vision/picture.py localrt/history/pictures.py", 10.0)
def pictures(folder: Path, stack: ExitStack) -> Prepared:
    from PIL import Image

    from localrt.history.pictures import new_picture
    from localrt.models.vision.picture import open_picture
    from tests.picture_files import READ

    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    seeds = []
    for pair in ("RGBA PNG", "P PNG", "RGB JPEG", "RGB WEBP", "P GIF"):
        mode, kind = pair.split()
        image = Image.linear_gradient("L").resize((9, 7)).convert(mode)
        image.save(file := io.BytesIO(), kind, exif=exif)
        seeds.append((kind, file.getvalue()))
    seeds.append(("MPO", READ["camera"][0]))
    return seeds, lambda kind, data: (new_picture(data), open_picture(data))


@_reader(0.20, "localrt/documents/web.py localrt/documents/pdf.py localrt/documents/sheets.py", 5.0)
def documents(folder: Path, stack: ExitStack) -> Prepared:
    from localrt.documents.reading import read_document
    from tests.documents.samples import SEEDS

    return SEEDS.items(), lambda kind, data: read_document(data, name=f"a{kind}", pictures=True)


@_reader(0.01, "localrt/common/toml_file.py localrt/mcp/config.py tui/preferences.py")
def settings(folder: Path, stack: ExitStack) -> Prepared:
    from tests.tui.test_settings import read_all, write_all

    write_all(folder)
    return _files(folder / "localrt", lambda name: read_all(folder))


@_reader(0.02, "localrt/chat.py tui/conversation/state.py", memory=320 << 20)
def exports(folder: Path, stack: ExitStack) -> Prepared:
    from tests.tui.test_conversations import SAVED, loaded

    (folder / "a.json").write_text(json.dumps(SAVED))
    return _files(folder, lambda name: loaded(folder / name))


@_reader(0.02, "localrt/planning/describe_pc.py localrt/planning/machine.py")
def machines(folder: Path, stack: ExitStack) -> Prepared:
    from tests.planner.test_pc import SEEDS, planned

    return SEEDS, lambda kind, data: planned(**{kind: data.decode("utf-8", "replace")})


@_reader(0.03, "localrt/chat_format/gbnf.py localrt/chat_format/structured.py", 5.0)
def grammars(folder: Path, stack: ExitStack) -> Prepared:
    from tests.chat_format.test_structured import SEEDS, byte_grammars, follow

    grammars = byte_grammars(folder)
    return SEEDS.items(), lambda kind, data: follow(grammars, kind, data)


@_reader(0.15, "localrt/server/*.py localrt/server/*/*.py", 20.0)
def requests(folder: Path, stack: ExitStack) -> Prepared:
    import localrt
    from tests.conftest import write_tiny_model
    from tests.server import conftest as server
    from tests.server.test_bad_input import BODIES, WRONG
    from tests.server.test_client_shapes import MESSAGES, PATHS

    model = stack.enter_context(localrt.load(write_tiny_model(folder), draft="off"))
    model.defaults["max_tokens"] = 2
    running = stack.enter_context(server.serving(model, history=":memory:"))
    one, message = "/v1/conversations/ID", {"content": [{"text": "Hi"}]}
    page = {"filename": "a.html", "file_data": "data:text/html;base64,YQ=="}
    bodies: list[tuple[str, Any]] = [
        *((path, {**BODIES.get(path, {}), **dict(more)}) for path, more, *_ in WRONG),
        *(
            (PATHS[kind], {**BODIES[PATHS[kind]], "messages": given, "input": given})
            for kind, given, _ in MESSAGES
        ),
        *((one, {"title": "x", "shown": "1"}), (f"{one}/items", message)),
        *(("/v1/conversations", {"title": "x"}), ("/v1/documents", page)),
        *((f"{one}/answers", {"continued": "1"}), ("/v1/conversations/import", page)),
    ]
    chunks = "Host: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    raw = f"GET /v1/models?a=%20 HTTP/1.1\r\nHost: x\r\n\r\nPOST /tokenize HTTP/1.1\r\n{chunks}"

    def use(kind: str, data: bytes) -> None:
        if kind.startswith("/"):
            if "/ID" in kind:
                made = running.request("POST", "/v1/conversations", {})[1]
                kind = kind.replace("ID", made["id"])
            head = f"POST {kind} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            data = f"{head}Content-Length: {len(data)}\r\n\r\n".encode("latin-1") + data
        answer = b""
        with suppress(ConnectionError), server.connected(running.port, data) as given:
            if not kind.startswith("/"):
                given.shutdown(socket.SHUT_WR)
            answer = given.makefile("rb").read()
        assert not re.match(rb"HTTP/1.1 50[02]", answer), answer[-99:]
        if told := re.search(_REFUSED, answer, re.DOTALL):
            raise LocalrtError(json.loads(told[1]))

    return [("raw", raw), *((path, json.dumps(body)) for path, body in bodies)], use
