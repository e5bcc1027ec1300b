"""Mixtures of experts: which experts are held, which are brought in, and who computes them.

``scheduler``, ``policy`` and ``cache`` are numbers and names; ``memory``, ``pool``, ``gpu``,
``stage`` and ``hybrid`` carry them out with weights, threads and a clock.
"""
