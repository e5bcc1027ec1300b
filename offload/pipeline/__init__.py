"""Carrying out a placement: lanes with their rings, stages, what stays in memory, and the passes.

A ``Lane`` is a processor with its ring: the CPU's is filled from the SSD, a GPU's over the link. A
``Stage`` is a unit in a pass: its place, its bytes, and the part that was made on them without
copying. It is called like a part, waits for its weights, has its lane compute the part, and
releases the place in the ring. ``StreamedWeights`` is the ``WeightStore`` of such stages.

Stages that stay on a GPU one behind the other are a ``Segment``: short passes of one sequence
replay it with one launch. A unit that comes through the ring is computed step by step, since it
lies elsewhere in each pass. When a unit of the GPU moves or a cache grows, what was recorded is
dropped. The host waits only where rows leave the GPU. A ``CrossingStage`` is an MLP that the CPU
computes in short passes and the GPU in long ones, to which it is then copied; the rows of a pass
alone say which.

The first plan has room for 512 tokens. As caches grow, or other programs need the memory, units are
evicted (``balance.py``); when there is room again they are kept, copied out of the ring as they
pass. What stays on a GPU lies in about 64 slabs, each spread over the pass: an allocator rounds
every allocation up, and one allocation for all could not be given back in part. Before each pass
weights, rings, keys and values, and what kernels need are summed; what is above the GPU's budget is
evicted: experts' slots first, then whole slabs. If a kernel finds no memory, some is evicted and
the pass is tried once more.

Races are looked for without a GPU: ``tests/offload/gpu/fakes.py`` has CUDA's streams and events,
and carries out each copy as late as its event allows.

It knows no plans and no text. Read ``streamed.py``, ``stage.py`` and ``lane.py`` first.
"""
