"""The llama.cpp engine, on llama-cpp-python's low-level API.

It has the same base class as the native engine, so sampling, stop strings, chat and prefix reuse
behave the same. A build may crash with an illegal instruction on another processor, or where a
virtual machine lists AMX but does not allow it. A separate process therefore tries it once, and the
result is kept (``trial.py``).
"""
