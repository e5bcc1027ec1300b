"""The CPU's steps of layers' own inputs and of several residual streams: see ``Ops``."""

from __future__ import annotations

import ctypes

import numpy as np

from localrt.quant.cpu.abi import (
    ACTIVATIONS,
    VISION_STEPS,
    ConnectionArgs,
    InputArgs,
    NgramArgs,
    VisionArgs,
)
from localrt.quant.cpu.passes import NativePass
from localrt.quant.cpu.weights import (
    NativeVector,
    address_of,
    locate,
)
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.hybrid_cache import states_of
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.ops.streams import (
    ConnectionWeights,
    InputGateSpec,
    InputGateWeights,
    InputProjection,
    NgramWeights,
)


class StreamSteps:
    """A part of ``NativeOps``."""

    _api: ctypes.CDLL
    _handle: int | None

    def _array(self, rows: int, cols: int) -> Floats:
        raise NotImplementedError

    def project_inputs(self, x: Floats, rows: Floats, weights: InputProjection) -> Floats:
        """(R, L * P), written over ``rows``."""
        inputs = rows.reshape(len(x), -1)
        self._api.lrt_project_inputs(
            self._handle,
            weights.matrix.stack,
            locate(x),
            len(x),
            weights.width,
            address_of(weights.norm),
            weights.eps,
            locate(inputs),
        )
        return inputs

    def gate_inputs(
        self, x: Floats, inputs: Floats, weights: InputGateWeights, spec: InputGateSpec
    ) -> Floats:
        out = self._array(len(x), weights.out.stack.rows)
        args = InputArgs(
            x=locate(x),
            inputs=locate(inputs),
            out=locate(out),
            post_norm=address_of(weights.post_norm),
            gate=weights.gate.stack,
            proj=weights.out.stack,
            rows=len(x),
            stride=inputs.shape[1],
            first=spec.layer * spec.width,
            activation=ACTIVATIONS[spec.activation],
            eps=spec.eps,
        )
        self._api.lrt_gate_inputs(self._handle, args)
        return out

    def layer_norm(
        self, x: Floats, weight: NativeVector, eps: float, *, centered: bool = True
    ) -> Floats:
        out = self._array(*x.shape)
        args = VisionArgs(x=locate(x), out=locate(out), weight=weight.address, eps=eps, heads=1)
        args.rows, args.size = x.shape
        args.strides[0], args.rms = x.shape[1], not centered
        self._api.lrt_vision(self._handle, VISION_STEPS["norm"], args)
        return out

    def repeat_stream(self, x: Floats, count: int) -> Floats:
        return np.tile(x, (1, count))

    def read_streams(
        self, streams: Floats, weights: ConnectionWeights
    ) -> tuple[Floats, Floats | None]:
        rows, count = len(streams), weights.count
        out = self._array(rows, streams.shape[1] // count)
        shares = None if weights.share is None else np.empty((rows, count), np.float32)
        args = ConnectionArgs(
            streams=locate(streams),
            out=locate(out),
            norm=address_of(weights.norm),
            down=weights.down.stack,
            up=weights.up.stack,
            rows=rows,
            count=count,
            eps=weights.eps,
        )
        if weights.share is not None and shares is not None:
            args.share, args.shares = weights.share.stack, locate(shares)
        self._api.lrt_read_streams(self._handle, args)
        return out, shares

    def share_out(self, streams: Floats, y: Floats, shares: Floats) -> Floats:
        streams.reshape(*shares.shape, -1)[:] += y[:, None] * shares[:, :, None]
        return streams

    def add_ngrams(
        self,
        streams: Floats,
        rows: Floats,
        weights: NgramWeights,
        spec: RecurrentSpec,
        step: NativePass,
        layer: int,
    ) -> Floats:
        tokens, spans = step.batch.tokens.astype(np.float32), step.state_args(layer)
        args = NgramArgs(
            streams=locate(streams),
            ngrams=locate(rows),
            tokens=locate(tokens),
            key_norm=address_of(weights.key_norm),
            stream_norm=address_of(weights.stream_norm),
            value_norm=address_of(weights.value_norm),
            conv=address_of(weights.taps),
            spans=spans,
            key=weights.key.stack,
            value=weights.value.stack,
            rows=len(streams),
            span_count=len(step.states),
            count=weights.count,
            taps=spec.taps,
            dilation=spec.dilation,
            eps=weights.eps,
        )
        self._api.lrt_add_ngrams(self._handle, args)
        for span in step.batch.spans:
            states_of(span.cache).layer_done(layer)
        return streams
