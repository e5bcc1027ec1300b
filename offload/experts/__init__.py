"""Mixtures of experts: which experts stay in memory, which are loaded, and which device computes
them.

An expert is a unit; a sparse layer's router and shared experts are another. Each expert is computed
for the rows that chose it, wherever it is, and results are summed in a fixed order. Resident
experts of a layer are computed by one call of the kernels. If not all fit, a cache policy decides
which are in RAM, read from the SSD, and which on a GPU, copied over the link. The GPU computes what
it has, the CPU the rest. docs/mixtures.md has the details.

``policy`` and ``cache`` only make decisions, from numbers and names; ``memory``, ``pool`` and
``hybrid`` carry them out with weights, threads and a clock.
"""
