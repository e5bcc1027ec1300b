"""Records which experts a model sends its tokens to: a trace for ``benchmarks.moe.cache``.

    python -m benchmarks.moe.record_trace MODEL OUT.npz [--tokens 2000]

MODEL decodes Python's standard library token by token, as it stands rather than generated: greedy
text of a small model repeats itself, and its routing with it. Only files are read that the fixture
(``benchmarks/moe/fixture``, a folder that MODEL may be) has not learnt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.common.command import make_parser
from benchmarks.moe.fixture_gguf import fixture_model
from benchmarks.moe.fixture_text import read_texts
from benchmarks.moe.routing_trace import RoutingTrace, TraceHeader, TraceRecorder
from localrt.answering.core import open_core
from localrt.engine.protocol import Engine
from localrt.errors import OptionError
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import Checkpoint, StoreCheckpoint, open_checkpoint
from localrt.models.registry import read_config
from localrt.offload.store.pack import fingerprint
from localrt.quant.ops.experts import Routing

__all__ = ["RoutingRecorder", "record_trace", "trace_header"]

PROMPT, LENGTH = 64, 512  # of each stretch of text


def trace_header(path: Path, checkpoint: Checkpoint) -> TraceHeader:
    """What a trace says of the model at ``path``.

    Raises:
        OptionError: it is no mixture of experts.
    """
    config = read_config(checkpoint)
    routers = [mixture.router for mixture in config.mixtures if mixture is not None]
    if not routers:
        raise OptionError(f"{path.name} is no mixture of experts: there is no routing to record")
    # A packed model routes like the one that it was packed from.
    packed = isinstance(checkpoint, StoreCheckpoint)
    return TraceHeader(
        model=path.name,
        architecture=config.architecture,
        fingerprint=checkpoint.manifest.source.fingerprint if packed else fingerprint(checkpoint),
        layers=len(routers),
        count=routers[0].count,
        used=routers[0].used,
    )


class RoutingRecorder:
    """Everything that ``engine``, the model at ``path``, is sent through from now on.

    Raises:
        OptionError: it is no mixture of experts.
    """

    def __init__(self, engine: Engine, path: Path) -> None:
        with closing(open_checkpoint(path)) as checkpoint:
            self._recorder = TraceRecorder(trace_header(path, checkpoint))
        self._passes = 0
        engine.watch_routing(self._add)

    def trace(self) -> RoutingTrace:
        """What was recorded so far."""
        return self._recorder.finish()

    def _add(self, layer: int, routing: Routing) -> None:
        self._passes += layer == 0
        self._recorder.add(self._passes, layer, routing.experts, routing.scores)


def record_trace(model: Path, tokens: int = 2000) -> RoutingTrace:
    """The routing of ``tokens`` tokens of text through ``model``, or the fixture in that folder."""
    path = fixture_model(model) if (model / "training.json").exists() else model
    with closing(open_core(str(path), LoadOptions(ctx=LENGTH), draft="off")) as core:
        recorder = RoutingRecorder(core.engine, path)
        text = "\n".join(read_texts().held_out)[: 16 * tokens]
        ids = core.tokenizer.encode(text, add_special=False)
        for start in range(0, tokens, LENGTH):
            part = ids[start : start + min(LENGTH, tokens - start)]
            with closing(core.new_session()) as session:
                session.extend(part[:PROMPT])
                for token in part[PROMPT:]:
                    session.extend([token])
        return recorder.trace()


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and save."""
    parser = make_parser(__doc__, json=False)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a mixture, or the fixture")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args(arguments)
    trace = record_trace(args.model, args.tokens)
    trace.save(args.out)
    print(f"wrote the routing of {trace.tokens} tokens to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
