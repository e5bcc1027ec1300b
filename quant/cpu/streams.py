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
from localrt.quant.cpu.weights import NativeVector, address_of, fill_args, kept_args, locate
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
        args = kept_args(weights.gate, weights, spec, _input_args)
        args.x, args.inputs, args.out = locate(x), locate(inputs), locate(out)
        args.rows, args.stride = inputs.shape
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
        args = kept_args(weights.down, weights, None, _connection_args)
        args.streams, args.out, args.rows = locate(streams), locate(out), rows
        args.shares = None if shares is None else locate(shares)
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
        args = kept_args(weights.key, weights, spec, _ngram_args)
        args.streams, args.ngrams, args.tokens = locate(streams), locate(rows), locate(tokens)
        args.spans, args.rows, args.span_count = spans, len(streams), len(step.states)
        self._api.lrt_add_ngrams(self._handle, args)
        for span in step.batch.spans:
            states_of(span.cache).layer_done(layer)
        return streams


def _input_args(weights: InputGateWeights, spec: InputGateSpec) -> InputArgs:
    first, activation = spec.layer * spec.width, ACTIVATIONS[spec.activation]
    out = weights.out.stack
    return fill_args(InputArgs, weights, spec, proj=out, first=first, activation=activation)


def _connection_args(weights: ConnectionWeights, _: None) -> ConnectionArgs:
    return fill_args(ConnectionArgs, weights)


def _ngram_args(weights: NgramWeights, spec: RecurrentSpec) -> NgramArgs:
    return fill_args(NgramArgs, weights, spec, conv=weights.taps.address, eps=weights.eps)
