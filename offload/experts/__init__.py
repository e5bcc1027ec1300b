"""Mixtures of experts: which experts stay in memory, which are loaded, and who computes them.

An expert is a unit; a sparse layer's router and shared experts are another. Each expert computes
its results for the rows that chose it, wherever it is, and they are summed in a fixed order.
Resident experts of a layer are computed by one call of the kernels. If not all fit, a cache policy
decides which are in RAM, read from the SSD, and which on a GPU, copied over the link. A scheduler
divides a layer between GPU and CPU by measured costs. docs/mixtures.md has the details.

``scheduler`` and ``cache`` decide from numbers and names alone; ``memory``, ``pool`` and ``hybrid``
carry out their decisions with weights, threads and a clock.
"""
