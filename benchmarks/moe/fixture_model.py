"""The small trained mixture of ``benchmarks/moe/fixture``, made as large as wanted, and its text.

Experts get more columns of zeros: gate and up then give zeros, which down multiplies by zeros, so
that logits and routing stay what they were while an expert costs what a large one costs.
"""

from __future__ import annotations

import hashlib
import sysconfig
from contextlib import closing
from pathlib import Path
from pydoc_data.topics import topics

import gguf
import numpy as np

from localrt.models.checkpoints import open_checkpoint
from localrt.models.tokenizers import load_tokenizer

__all__ = ["FIXTURE", "held_out", "widened"]

FIXTURE = Path(__file__).parent / "fixture/fixture-moe.gguf"
"""32 experts in each of 8 layers, of which 4 see a token."""

_BLOCK, _BLOCK_BYTES = 32, 18  # weights and bytes of Q4_0, the experts' format
_APART = {"test", "tests", "idlelib", "site-packages", "lib2to3", "encodings", "pydoc_data"}
_HELD_OUT = 16  # it has not learnt one text in so many
_SHORTEST, _LONGEST = 200, 400_000  # characters: larger files are tables


def widened(nbytes: int, folder: Path) -> Path:
    """The fixture with at least ``nbytes`` of experts, written to ``folder`` once."""
    out = folder / f"fixture-{nbytes}.gguf"
    if out.exists():
        return out
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(FIXTURE)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    kind = fields.pop("general.architecture").contents()
    experts = [tensor for tensor in reader.tensors if "_exps." in tensor.name]
    inner = fields[f"{kind}.expert_feed_forward_length"].contents()
    more = nbytes - sum(tensor.data.nbytes for tensor in experts)
    each = sum(tensor.n_elements for tensor in experts) // inner * _BLOCK_BYTES  # of a block more
    blocks = max(0, -(-more // each))
    writer = gguf.GGUFWriter(out, kind, use_temp_file=True)
    for name, field in fields.items():
        value, types = field.contents(), field.types
        if name.endswith("feed_forward_length"):
            value = inner + blocks * _BLOCK
        writer.add_key_value(name, value, types[0], types[1] if len(types) > 1 else None)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor in experts:  # (experts, rows, bytes of a row); zero bytes are zeros
            down = "ffn_down" in tensor.name
            more_rows, more_bytes = (0, blocks * _BLOCK_BYTES) if down else (blocks * _BLOCK, 0)
            data = np.pad(data, ((0, 0), (0, more_rows), (0, more_bytes)))
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def held_out(count: int, size: int, apart: int) -> list[list[int]]:
    """Texts of ``size`` tokens that the fixture has not learnt; one begins every ``apart``.

    They are of the language reference and the standard library of the Python that runs this.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = {f"topic {name}": text for name, text in topics.items()}
    for path in library.rglob("*.py"):
        name = str(path.relative_to(library))
        if not _APART & set(path.parts) and not _digest(name) % _HELD_OUT:
            found[name] = path.read_text(encoding="utf-8", errors="ignore")
    kept = [
        found[name]
        for name in sorted(found, key=_digest)
        if not _digest(name) % _HELD_OUT and _SHORTEST <= len(found[name]) <= _LONGEST
    ]
    with closing(open_checkpoint(FIXTURE)) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    ids: list[int] = []
    for text in kept:
        ids += [*tokenizer.encode(text, add_special=False), 0]  # 0 ends a text
        if len(ids) >= (count - 1) * apart + size:
            break
    return [ids[i * apart : i * apart + size] for i in range(count)]


def _digest(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)
