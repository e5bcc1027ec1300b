"""The llama.cpp engine, on llama-cpp-python's low-level API.

It has the same base class as the native engine, so sampling, stop strings, chat and prefix reuse
behave the same. A build may die of an illegal instruction on another processor, or where a virtual
machine lists AMX and does not allow it. It is therefore tried once, in a process of its own, and
the verdict is kept (``trial.py``).
"""
