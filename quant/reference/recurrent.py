"""Recurrent layers on torch, row by row: the textbook form, and the oracle of the kernels.

It knows states and rows (``quant/ops/states.py``), not models.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.ops import recurrent
from localrt.quant.ops.hybrid_cache import states_of
from localrt.quant.ops.protocol import Span, ranges
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights
from localrt.quant.ops.states import StatePass

_KEY_EPS = 1e-6  # of the length that keys and queries are divided by


def widen(
    mixed: Tensor, weights: RecurrentWeights, spec: RecurrentSpec, linear: Callable[..., Tensor]
) -> Tensor:
    """Rows as projected in the end, of those (R, mix_rows) that are projected at first."""
    if weights.gate_up is None:
        return mixed
    rank = spec.low_rank
    sizes = [spec.channels, rank, spec.heads, rank]
    channels, gates, strengths, decays = torch.split(mixed, sizes, dim=1)
    gates, decays = linear(gates, weights.gate_up), linear(decays, weights.decay_up)
    return torch.cat([channels, gates, strengths, decays], dim=1)


def mix_rows(
    mixed: Tensor,
    weights: RecurrentWeights,
    spec: RecurrentSpec,
    spans: tuple[Span, ...],
    passes: list[StatePass],
    layer: int,
) -> Tensor:
    """(R, H V), float32, from rows as projected (R, ...), float32; the caches have the states."""
    rows = torch.cat([_columns(mixed, spec)[0], _factors(mixed, weights, spec)], dim=1)
    return _finish(_run_all(rows, weights, spec, spans, passes, layer), mixed, weights, spec)


def convolve_rows(
    rows: Tensor,
    taps: Tensor,
    spec: RecurrentSpec,
    spans: tuple[Span, ...],
    passes: list[StatePass],
    layer: int,
) -> Tensor:
    """(R, channels), float32: the convolution of ``rows`` (R, row size), which caches keep."""
    # Only its taps are read.
    weights = recurrent.RecurrentWeights(norm=None, mix=taps, taps=taps, out=taps)
    return _run_all(rows, weights, spec, spans, passes, layer)


def _run_all(
    rows: Tensor,
    weights: RecurrentWeights,
    spec: RecurrentSpec,
    spans: tuple[Span, ...],
    passes: list[StatePass],
    layer: int,
) -> Tensor:
    """Run all rows over their sequences' states."""
    parts = []
    for (first, stop, span), states in zip(ranges(spans), passes, strict=True):
        parts.append(_run(rows[first:stop], weights, spec, span, states, layer))
        states_of(span.cache).layer_done(layer)
    return torch.cat(parts)


def _columns(mixed: Tensor, spec: RecurrentSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Channels, gates, strengths and decays of rows, as far as the kind has them."""
    if spec.kind == "conv":
        before, gates, values = mixed.chunk(3, dim=1)
        return before * values, gates, gates[:, :0], gates[:, :0]
    rates = spec.factors - spec.heads
    if spec.kind == "delta":
        channels, gates, strengths, decays = torch.split(
            mixed, [spec.channels, spec.inner, spec.heads, rates], dim=1
        )
        return channels, gates, strengths, decays
    gates, channels, steps = torch.split(mixed, [spec.inner, spec.channels, spec.heads], dim=1)
    return channels, gates, steps, steps


def _factors(mixed: Tensor, weights: RecurrentWeights, spec: RecurrentSpec) -> Tensor:
    """Decays and strengths of rows, (R, factors)."""
    _, _, strengths, decays = _columns(mixed, spec)
    if spec.kind == "conv":
        return strengths
    assert weights.decay is not None, "it has a state"
    assert weights.decay_bias is not None, "it has a state"
    rates = weights.decay.float()
    steps = decays + weights.decay_bias.float()
    if not spec.decay_floor:
        steps = F.softplus(steps)
    if spec.kind == "delta":
        strengths = spec.strength * strengths.sigmoid()
        return torch.cat([_decays(steps, rates, spec), strengths], dim=1)
    steps = steps.clamp(*spec.time_steps)
    return torch.cat([(steps * rates).exp(), steps], dim=1)


def _decays(steps: Tensor, rates: Tensor, spec: RecurrentSpec) -> Tensor:
    logs = steps.view(len(steps), spec.heads, -1) * rates[:, None]
    if spec.decay_floor:
        logs = spec.decay_floor * torch.sigmoid(-logs)
    return logs.exp().flatten(1)


def _run(
    new: Tensor,
    weights: RecurrentWeights,
    spec: RecurrentSpec,
    span: Span,
    states: StatePass,
    layer: int,
) -> Tensor:
    """Run the ``new`` rows (rows, row size) of a sequence over its state."""
    source, target = states.source, states.target
    held, position = span.cache.length, int(source.positions[layer])
    kept, back = source.ring_of(layer), spec.back
    first = max(0, position - back)
    old = kept[np.arange(first, held) % source.ring]  # (tokens before, row)
    padding = old.new_zeros(back - (position - first), spec.row_size)
    rows = torch.cat([padding, old, new])  # those looked back on, those that wait, the new ones
    waiting = held - position
    linear, parents = len(rows) - back, np.zeros(0, np.int32)
    if states.parents is not None:
        linear, parents = waiting - states.extra, states.parents

    def parent(row: int) -> int:
        if row < linear:
            return row - 1
        before = int(parents[row - linear])
        return linear - 1 if before < 0 else linear + before

    taps = weights.taps.float().view(spec.taps, -1)
    after = {-1: _state(source.state(layer), spec)}
    seen = []
    for row in range(len(rows) - back):
        if row >= linear and parents[row - linear] == -2:
            continue
        inputs, at = [], row
        for _ in range(spec.taps):
            inputs.append(rows[back + at, : spec.channels])
            for _ in range(spec.dilation):
                at = parent(at) if at >= 0 else at - 1
        channels = (torch.stack(inputs[::-1]) * taps).sum(0)
        if weights.taps_bias is not None:
            channels = channels + weights.taps_bias.float()
        factors = rows[back + row, spec.channels :]
        out, after[row] = _step(after[parent(row)], channels, factors, weights, spec)
        if row < linear:
            after.pop(row - 2, None)  # rows without children
        if row >= waiting:
            seen.append(out)
        if row + 1 == states.fold - position:
            _store(after[row], target.state(layer))
    if states.fold == position and target is not source:
        target.state(layer)[:] = source.state(layer)
    # Rows that wait from here on, and those that they look back on.
    stay = np.arange(max(first, states.fold - back), held + span.rows)
    target.ring_of(layer)[stay % target.ring] = rows[back + stay - position]
    return torch.stack(seen)


def _step(
    state: Tensor, channels: Tensor, factors: Tensor, weights: RecurrentWeights, spec: RecurrentSpec
) -> tuple[Tensor, Tensor]:
    """A token's output (H V) and the state after it, of the state (H, K, V) before."""
    if not spec.stateful:
        return channels, state
    channels = F.silu(channels)
    keys, inner, heads = spec.keys, spec.inner, spec.heads
    if spec.kind == "delta":
        q, k, v = torch.split(channels, [keys, keys, inner])
    else:
        v, k, q = torch.split(channels, [inner, keys, keys])
    q, k = (x.view(spec.key_heads, spec.key_size) for x in (q, k))
    if spec.kind == "delta":
        q, k = (x * torch.rsqrt((x * x).sum(1, keepdim=True) + _KEY_EPS) for x in (q, k))
        q = q * spec.key_size**-0.5
    each = heads // spec.key_heads
    q, k = (x.repeat(each, 1) if spec.tiled else x.repeat_interleave(each, 0) for x in (q, k))
    v = v.view(heads, spec.value_size)
    decays, strengths = factors[:-heads].view(heads, -1, 1), factors[-heads:, None]
    state = state * decays
    written = v - (state * k[..., None]).sum(1) if spec.kind == "delta" else v
    state = state + k[..., None] * (written * strengths)[:, None]
    out = (state * q[..., None]).sum(1)
    if weights.skip is not None:
        out = out + weights.skip.float()[:, None] * v
    return out.flatten(), state


def _finish(seen: Tensor, mixed: Tensor, weights: RecurrentWeights, spec: RecurrentSpec) -> Tensor:
    """Norm and gate."""
    gates = _columns(mixed, spec)[1]
    if spec.kind == "conv":
        return seen * gates
    factor = gates.sigmoid() if spec.gate == "sigmoid" else F.silu(gates)
    if not spec.norm_size:
        return seen * factor
    if spec.gate_first:
        seen = seen * factor
    parts = seen.view(len(seen), -1, spec.norm_size)
    assert weights.out_norm is not None, "its results are normed"
    weight = weights.out_norm.float().view(-1, spec.norm_size)
    eps = spec.norm_eps or spec.eps
    normed: Tensor = (F.rms_norm(parts, (spec.norm_size,), eps=eps) * weight).flatten(1)
    return normed if spec.gate_first else normed * factor


def _state(flat: Tensor, spec: RecurrentSpec) -> Tensor:
    """(H, K, V) of a set's (H, V / 16, K, 16)."""
    if not spec.stateful:
        return flat
    blocks = flat.view(spec.heads, -1, spec.key_size, 16).transpose(1, 2)
    state: Tensor = blocks.reshape(spec.heads, spec.key_size, -1)[..., : spec.value_size]
    return state.clone()


def _store(state: Tensor, flat: Tensor) -> None:
    """The opposite."""
    if not len(flat):
        return
    heads, keys, values = state.shape
    padded = F.pad(state, (0, -values % 16))
    flat[:] = padded.view(heads, keys, -1, 16).transpose(1, 2).reshape(-1)
