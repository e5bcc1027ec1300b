"""Measurements of localrt, run from the checkout's root: ``python -m benchmarks.NAME``.

``common`` has the shared parts: the command line, interleaved runs and medians, result files with a
row per measurement, and tables. Every other module is one benchmark with its table. Results go to
``benchmarks/results``; ``tables`` makes the docs' tables from them.
"""
