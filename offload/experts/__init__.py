"""Mixtures of experts: which experts are held, which are brought in, and who computes them.

``scheduler`` and ``cache`` are numbers and names; ``memory``, ``pool`` and ``hybrid`` carry them
out with weights, threads and a clock.
"""
