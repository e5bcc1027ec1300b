"""Mixtures of experts: which experts stay in memory, which are loaded, and who computes them.

An expert is a unit; a sparse layer's router and shared experts are another. Each choice of each row
is a slot. Experts fill slots wherever they are computed, and slots are combined in a fixed order.
Experts in memory are one call of the kernels per layer. Where they do not all fit, a cache policy
decides which are in RAM, filled from the SSD, and which on a GPU, filled over the link. A scheduler
divides a layer between GPU and CPU by measured costs. docs/mixtures.md has the details.

``scheduler`` and ``cache`` decide from numbers and names alone; ``memory``, ``pool`` and ``hybrid``
carry out their decisions with weights, threads and a clock.
"""
