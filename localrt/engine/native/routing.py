"""Recording which experts a model sends its tokens to, pass by pass, while it answers.

It knows engines and traces, not what is done with them: ``benchmarks/moe_cache.py`` replays them.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.engine.protocol import Engine
from localrt.errors import OptionError
from localrt.offload.experts.trace import TraceHeader, TraceRecorder

if TYPE_CHECKING:
    from localrt.models.checkpoints import Checkpoint
    from localrt.quant.ops.experts import Routing

__all__ = ["RoutingRecorder", "trace_header"]


def trace_header(path: Path, checkpoint: Checkpoint) -> TraceHeader:
    """What a trace says of the model at ``path``.

    Raises:
        OptionError: it is no mixture of experts.
    """
    from localrt.models.checkpoints import StoreCheckpoint
    from localrt.models.registry import read_config
    from localrt.offload.store.pack import fingerprint

    config = read_config(checkpoint)
    routers = [mixture.router for mixture in config.mixtures if mixture is not None]
    if not routers:
        raise OptionError(f"{path.name} is no mixture of experts: there is no routing to record")
    # A packed model routes like the one that it was packed from.
    if isinstance(checkpoint, StoreCheckpoint):
        digest = checkpoint.manifest.source.fingerprint
    else:
        digest = fingerprint(checkpoint)
    return TraceHeader(
        model=path.name,
        architecture=config.architecture,
        fingerprint=digest,
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
        from localrt.models.checkpoints import open_checkpoint

        with closing(open_checkpoint(path)) as checkpoint:
            self._recorder = TraceRecorder(trace_header(path, checkpoint))
        self._passes = 0
        engine.watch_routing(self._add)

    def save(self, path: Path) -> int:
        """Write what was recorded; returns the number of tokens.

        Raises:
            StorageError: it cannot be written.
        """
        trace = self._recorder.finish()
        trace.save(path)
        return trace.tokens

    def _add(self, layer: int, routing: Routing) -> None:
        self._passes += layer == 0
        self._recorder.add(self._passes, layer, routing.experts, routing.scores)
