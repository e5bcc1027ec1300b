"""Carries out a placement: lanes with their rings, stages, resident units, and passes.

A ``Lane`` is a processor with its ring: the CPU's is filled from the SSD, a GPU's over the link. A
``Stage`` is a unit in a pass: its place, its bytes, and the part made on them without a copy. It is
called like a part, waits for its weights, has its lane compute the part, and releases the place in
the ring. ``StreamedWeights`` is the ``WeightStore`` of such stages.

Consecutive stages that stay on a GPU are a ``Segment``: short passes of one sequence replay it with
one launch. A unit that comes through the GPU's ring lies at the same place in each pass, and is
replayed once it is there. When a unit of the GPU moves, its segment is recorded again; a pass
records few parts, so that it takes hardly longer. The host waits only where rows leave the GPU. A
``CrossingStage`` is an MLP that the CPU computes in short passes; in long ones it is copied to the
GPU and computed there. The number of rows alone decides.

The first plan has room for 512 tokens. As caches grow, or other programs need the memory, units are
evicted (``balance.py``); when there is room again they are copied out of the ring as they pass, and
kept. Resident units on a GPU lie in about 64 slabs, each spread over the pass: an allocator rounds
up every allocation, and a single allocation could not be freed in part. Before each pass weights,
rings, keys and values, and kernels' scratch are summed; any excess over the GPU's budget is
evicted: experts' slots first, then whole slabs. If a kernel finds no memory, some is evicted and
the pass is tried once more.

Tests find races without a GPU, on ones that copy as late as events allow (``tests/offload/gpu``),
and on a driver in virtual time (``tests/driver``), which shows schedules too.

It knows no plans and no text. Read ``streamed.py``, ``stage.py`` and ``lane.py`` first.
"""
