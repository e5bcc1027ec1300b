"""The compute room: one protocol, and its native, torch and CUDA implementations.

What all of them share lies here: ``protocol`` (the steps), ``attention`` and ``experts`` (shapes,
weights and choices that steps take), ``arrays`` and ``kv`` (what arrays and KV caches are),
``aligned`` (memory that is read into or pinned). ``choose`` picks the implementation for a device.
``cuda`` uses parts of ``torch``, and ``native`` to tile rows; nothing else crosses.
"""
