"""Mixtures of experts: which experts are held, which are brought in, and who computes them.

An expert is a unit; a sparse layer's router and shared experts are another. Each choice of each row
is a slot. Experts fill slots wherever they are computed, and slots are combined in a fixed order.
Experts in memory are one call of the kernels per layer. Where they do not all fit, a cache policy
decides which are in RAM, filled from the SSD, and which on a GPU, filled over the link. A scheduler
divides a layer between GPU and CPU by measured costs. docs/mixtures.md has the details.

``scheduler`` and ``cache`` are numbers and names; ``memory``, ``pool`` and ``hybrid`` carry them
out with weights, threads and a clock.
"""
