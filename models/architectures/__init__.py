"""Architectures: their configs, and their tensors' names.

An architecture is a function of 10 to 100 lines, in a file of its family. It reads a config into a
``DecoderConfig`` (``models/config.py``), with one ``AttentionSpec`` per layer (heads, window,
rotary, scale, softcap). A ``Family`` (``family.py``) says under which names it is published, and
what its files call tensors and keys where that differs from Llama's. A tensor that no part asked
for is an error: a model that lacks one of its parts would silently write wrong text.
"""
