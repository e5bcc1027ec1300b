"""Measurements of localrt, run from the checkout's root: ``python -m benchmarks.NAME``.

``kernels``, ``offload``, ``moe``, ``speculation``, ``quality``, ``app``, ``memory`` and ``gpu`` are
packages; ``compare`` measures two checkouts by turns, and ``published`` puts forecasts beside
published speeds.
Results go to ``benchmarks/results``; ``tables`` makes the docs' tables of them.
"""
