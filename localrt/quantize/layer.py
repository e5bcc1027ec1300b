"""Quantizes the tensors of a layer: rounds each alone, or calibrates it on the layer's inputs.

Matrices that share an input are quantized as one: q, k and v, and gate and up, share the rotation
of their input and the scale of the tensor. With mr-gptq, the rotation H of the output projection's
input is folded into v if its blocks divide a head: attention only mixes rows of v, so v and o are
stored rotated by H, and nothing is rotated at run time. The experts of an MoE layer are rounded
alone by every method.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from localrt.models.checkpoints import Checkpoint, TensorInfo
from localrt.models.config import (
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    ROUTER,
    SHARED_DOWN,
    SHARED_GATE,
    SHARED_GATE_UP,
    DecoderConfig,
    LayerNames,
)
from localrt.models.layers.attention import latent_groups
from localrt.models.layers.recurrent import recurrent_groups
from localrt.models.tensor_source import WeightBlock
from localrt.offload.store.pack import stored_pieces, tiled_pieces
from localrt.offload.store.writer import Pieces
from localrt.quant.cpu.ops import fast_tiler
from localrt.quant.formats import CODECS, F32, PackedTensor, pack, unpack
from localrt.quant.formats.convert import require_finite
from localrt.quant.formats.packed import Floats
from localrt.quant.methods import (
    Quantized,
    ScaleSearch,
    block_hadamard,
    quantize,
    restored_rows,
    rotation,
)
from localrt.quant.ops.attention import AttentionSpec, LatentSpec

ROUTERS = (f".{ROUTER}.weight", f".{SHARED_GATE}.weight")
"""Name endings of the matrices that choose or weigh experts: small, sensitive, not quantized."""

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")  # the expert's number in a name


def folded_rotation(config: DecoderConfig, infos: Mapping[str, TensorInfo]) -> int:
    """Block size of the rotation that can be folded into v of every layer; 0: none can."""
    if len(config.attending) < config.layers or len(config.memory) > config.layers:
        return 0  # in recurrent layers a gate comes before the output projection
    if not all(spec.value_dim for spec in config.attending):
        return 0  # a head's values are not rows of a matrix before the output projection
    out = infos[f"model.layers.0.{config.names.out}.weight"]
    size = rotation(out.format) if out.format.name in CODECS else 0
    return size if size and all(spec.head_dim % size == 0 for spec in config.attending) else 0


class LayerQuantizer:
    """Quantizes tensors of ``source`` to the formats of ``infos`` in pieces, by ``method``.

    Without a ``config``, as for an encoder, matrices are only rounded.
    """

    def __init__(
        self,
        source: Checkpoint,
        config: DecoderConfig | None,
        infos: Mapping[str, TensorInfo],
        search: ScaleSearch,
        *,
        method: str = "rtn",
        folded: int = 0,
    ) -> None:
        self.source = source
        self._attention = () if config is None else config.attention
        self._names = names = LayerNames() if config is None else config.names
        self.infos = infos
        self._method = method
        self._folded = folded
        self._tiler = fast_tiler()
        self._search = search
        self._groups: tuple[tuple[str, ...], ...] = (names.qkv,)
        self._expert_groups: tuple[tuple[str, ...], ...] = (EXPERT_GATE_UP, (EXPERT_DOWN,))
        if config is None:
            return
        first = next(iter(config.attending), None)
        states = config.recurrent
        attention: tuple[tuple[str, ...], ...] = (names.qkv, (names.out,))
        self._groups = (
            *(latent_groups(first) if isinstance(first, LatentSpec) else attention),
            *(() if states is None else recurrent_groups(states)),
            names.gate_up,
            (names.down,),
            SHARED_GATE_UP[0 if config.mlp.gated else 1 :],
            (SHARED_DOWN,),
        )

    def rounded(self, name: str) -> Iterator[WeightBlock]:
        """Yield any tensor of the model, rounded to nearest, a few rows at a time.

        Vectors, and tensors that already have their format, keep their values.
        """
        format_ = self.infos[name].format
        if len(self.infos[name].shape) == 1 or format_ == self.source.tensors[name].format:
            yield from stored_pieces(self.source, name, self._tiler)
            return
        scale = self._shared_scale(name)
        yield from tiled_pieces(
            (self._round(name, values, scale) for values in self._rows(name)), self._tiler
        )

    def calibrated(self, layer: int, hessians: Mapping[str, Floats]) -> Pieces:
        """Return a function that yields the quantized pieces of a tensor of the layer, by name.

        ``hessians`` has H by the first name of a group; matrices without H are rounded.
        """
        prefix = f"model.layers.{layer}."
        groups = (
            group
            for group in self._groups
            if group[0] in hessians
            and all(f"{prefix}{stem}.weight" in self.infos for stem in group)
        )
        group_of = {f"{prefix}{stem}.weight": group for group in groups for stem in group}
        done: dict[str, Quantized] = {}

        def pieces(name: str) -> Iterator[WeightBlock]:
            if name not in group_of:
                is_vector = len(self.infos[name].shape) == 1
                yield from self._vector(name, prefix) if is_vector else self.rounded(name)
                return
            if name not in done:
                group = group_of[name]
                done.update(self._quantize(layer, group, hessians[group[0]]))
            quantized = done.pop(name)
            yield replace(self._tiler(quantized.tensor), hadamard=quantized.hadamard)

        return pieces

    # -- parts -----------------------------------------------------------------------------------

    def _quantize(
        self, layer: int, group: tuple[str, ...], hessian: Floats
    ) -> dict[str, Quantized]:
        """Quantize a group's matrices as one, and return them by name."""
        names = [f"model.layers.{layer}.{stem}.weight" for stem in group]
        values = np.concatenate([rows for name in names for rows in self._rows(name)])
        format_ = self.infos[names[0]].format
        is_out = self._folded > 0 and group == (self._names.out,)
        if self._folded and group == self._names.qkv:
            start = len(values) - self._value_rows(layer)
            values[start:] = block_hadamard(values[start:].T, self._folded).T
        if format_.name in CODECS:
            whole = quantize(
                values,
                format_,
                method=self._method,
                hessian=hessian,
                name=names[0],
                hadamard=self._folded if is_out else None,
                search=self._search,
            )
        else:  # rows that divide into no format's groups are rounded
            if is_out:
                values = block_hadamard(values, self._folded)
            whole = Quantized(pack(values, format_, name=names[0]))
        hadamard = 0 if is_out else whole.hadamard
        found: dict[str, Quantized] = {}
        start = 0
        for name in names:
            stop = start + self.infos[name].shape[0]
            rows = replace(
                whole.tensor,
                name=name,
                shape=(stop - start, values.shape[1]),
                data=whole.tensor.data[start:stop],
            )
            found[name] = Quantized(rows, hadamard)
            start = stop
        return found

    def _rows(self, name: str) -> Iterator[Floats]:
        """Yield a matrix's values, a few rows at a time."""
        for block in self.source.blocks(name):
            for values in restored_rows(block):
                require_finite(values, name)
                yield values

    def _vector(self, name: str, prefix: str) -> Iterator[WeightBlock]:
        """Yield a norm or bias unchanged; only the bias of a rotated v is rotated too."""
        if not self._folded or name != f"{prefix}{self._names.qkv[-1]}.bias":
            yield from stored_pieces(self.source, name, self._tiler)
            return
        values = unpack(self.source.read(name)).reshape(-1).copy()
        start = len(values) - self._value_rows(int(prefix.split(".")[2]))
        values[start:] = block_hadamard(values[start:], self._folded)
        yield PackedTensor(name, F32, values.shape, values.view(np.uint8).reshape(1, -1))

    def _round(self, name: str, values: Floats, scale: float | None) -> PackedTensor:
        format_ = self.infos[name].format
        if format_.name not in CODECS:
            return pack(values, format_, name=name)
        return quantize(values, format_, name=name, scale=scale, search=self._search).tensor

    def _shared_scale(self, name: str) -> float | None:
        """The scale that a matrix shares with those of the same input, if its format has one."""
        codec = CODECS.get(self.infos[name].format.name)
        if codec is None or codec.tensor_scale(1.0) == 1.0:
            return None
        stem = name.removesuffix(".weight")
        expert = _EXPERT.search(stem)
        groups = self._groups
        if expert is not None:
            groups = tuple(
                tuple(own.format(expert[0]) for own in group) for group in self._expert_groups
            )
        group = next(
            (
                [f"{stem.removesuffix(own)}{other}.weight" for other in group]
                for group in groups
                for own in group
                if stem.endswith(f".{own}")
            ),
            [name],
        )
        rows = (values for other in group if other in self.infos for values in self._rows(other))
        return codec.tensor_scale(max(float(np.abs(values).max(initial=0)) for values in rows))

    def _value_rows(self, layer: int) -> int:
        spec = self._attention[layer]
        assert isinstance(spec, AttentionSpec), "values are folded where every layer attends"
        return spec.kv_heads * spec.head_dim
