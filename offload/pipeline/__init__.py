"""Executes a placement: lanes with their rings, stages, resident units, and passes.

A ``Lane`` is a processor with its ring: the CPU's is filled from the SSD, a GPU's over the link. A
``Stage`` is a unit in a pass: where it is, its bytes, and the part that computes on them in place.
Calling a stage waits for its weights, computes the part, and frees its place in the ring.
``StreamedWeights`` is the ``WeightStore`` of these stages.

Consecutive stages that are resident on a GPU are a ``Segment``: short passes of one sequence replay
it with one launch. A unit in the GPU's ring is at the same place in each pass, so it is replayed
too, once it has arrived. When a unit moves, its segment is recorded again; each pass records only a
few parts, so it is hardly slower. The host waits only where rows leave the GPU. A
``CrossingStage`` is an MLP that the CPU computes in short passes; long passes copy it to the GPU
and compute it there. The number of rows alone decides.

The first plan has room for 512 tokens. As caches grow, or other programs need memory, units are
evicted (``balance.py``); when there is room again, they are copied out of the ring and become
resident. Resident units on a GPU are in about 64 slabs, each with units from all over the pass: an
allocation per unit would lose memory to rounding, and a single allocation could not be freed in
part. Before each pass, weights, rings, keys and values, and kernels' scratch are added up; if they
exceed the GPU's budget, expert slots are evicted first, then whole slabs. If a kernel still runs
out of memory, some is evicted and the pass is repeated once.

Tests find races without a GPU, on a stand-in for CUDA's driver that works as late as events allow
(``tests/driver``).

The pipeline knows neither planning nor text. Read ``streamed.py``, ``stage.py`` and ``lane.py``
first.
"""
