"""Measurements of localrt, run from the checkout's root: ``python -m benchmarks.NAME``.

``kernels``, ``offload``, ``moe``, ``speculation``, ``quality``, ``app`` and ``gpu`` are packages.
Results go to ``benchmarks/results``; ``tables`` makes the docs' tables of them.
"""
